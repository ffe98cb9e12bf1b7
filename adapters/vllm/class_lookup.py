"""Refuses a configuration when vLLM looks the connector's class up, which is before an engine starts.

The first lookup is made where vLLM's whole configuration is put together (`config/vllm.py`, 0.32: does the connector
support hybrid memory), in the process that a person has started; the connector itself is made after the weights are
loaded. No hook is given the configuration at that time on every platform, so the call stack is asked, as vLLM's factory
hands it on (`kv_connector/factory.py`, get_connector_class). Where it does not show it, the connector refuses later, in
the same words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import ConfigurationError

if TYPE_CHECKING:
    from types import FrameType

_LOOKUP = "get_connector_class"


def refuse_at_lookup(check: Callable[[dict[str, Any]], object]) -> None:
    """Call `check` with the extra configuration, where the module's attribute is asked for by vLLM's factory.

    Raises:
        ConfigurationError: what `check` raises; it is said before as well, since a traceback follows it.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 -- the way to ask who calls
    while frame is not None and frame.f_code.co_name != _LOOKUP:
        frame = frame.f_back
    transfer = None if frame is None else frame.f_locals.get("kv_transfer_config")
    extra_config = getattr(transfer, "kv_connector_extra_config", None)
    if not isinstance(extra_config, dict):
        return
    try:
        check(extra_config)
    except ConfigurationError as error:
        messages.error(f"{error}\n  `kvledger check` says what a configuration would do, without an engine")
        raise
