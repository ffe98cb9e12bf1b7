"""The optional modules that kvledger needs, and the extra that brings each. Imports none of them."""

from __future__ import annotations

import importlib.util
import sys
from types import MappingProxyType
from typing import Final

CONNECTOR: Final = ("numpy", "packaging", "prometheus_client", "pydantic", "structlog", "torch", "vllm")
"""Modules that the connector needs. The extra brings all but vLLM itself."""

OTLP: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""Modules that `kvledger export --otlp` needs; other packages share their namespace."""

EXTRAS: Final = MappingProxyType(
    {
        **dict.fromkeys(CONNECTOR, "connector"),
        "nats": "nats",
        "nkeys": "nats",
        **dict.fromkeys(OTLP, "otlp"),
        "pyarrow": "lake",
    }
)
"""Module → the extra that brings it."""


def require(what: str, *modules: str) -> None:
    """Raise an error if one of `modules` is not installed.

    Args:
        what: the feature that needs them, for the message.
        modules: keys of `EXTRAS`, all of one extra.

    Raises:
        ModuleNotFoundError: names every missing module, and the command that installs them.
    """
    missing = [name for name in modules if sys.modules.get(name) is None and not _is_found(name)]
    if not missing:
        return
    remedy = f"pip install 'kvledger[{EXTRAS[missing[0]]}]'"
    if "vllm" in missing:
        remedy += ", into the environment that vLLM runs in; no extra brings vLLM itself"
    raise ModuleNotFoundError(f"{what} needs {', '.join(missing)}, not installed here: {remedy}", name=missing[0])


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
