"""The optional modules that kvledger uses, and the extra that installs each. Imports none of these modules."""

from __future__ import annotations

import importlib.util
import sys
from types import MappingProxyType
from typing import Final

CONNECTOR: Final = ("numpy", "packaging", "prometheus_client", "pydantic", "structlog", "torch", "vllm")
"""Modules that the connector needs. The extra `connector` installs all of them except vLLM."""

OTLP: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""Modules that `kvledger export --otlp` needs, by full name: other packages have modules in `opentelemetry`, too."""

EXTRAS: Final = MappingProxyType(
    {
        **dict.fromkeys(CONNECTOR, "connector"),
        "nats": "nats",
        "nkeys": "nats",
        **dict.fromkeys(OTLP, "otlp"),
        "pyarrow": "lake",
    }
)
"""Module → the extra that installs it."""


def require(what: str, *modules: str) -> None:
    """Raise an error if one of `modules` is not installed.

    Args:
        what: name of the feature that needs the modules, for the message.
        modules: keys of `EXTRAS` that belong to the same extra.

    Raises:
        ModuleNotFoundError: a module is missing. The message names all missing modules and the command that installs
            them.
    """
    missing = [name for name in modules if sys.modules.get(name) is None and not _is_found(name)]
    if not missing:
        return
    remedy = f"pip install 'kvledger[{EXTRAS[missing[0]]}]'"
    if "vllm" in missing:
        remedy += ", into the environment that vLLM runs in; kvledger's extras do not install vLLM"
    raise ModuleNotFoundError(f"{what} needs {', '.join(missing)}, not installed here: {remedy}", name=missing[0])


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
