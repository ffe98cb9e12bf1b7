"""Refuses a configuration when vLLM looks the connector's class up, which is before an engine starts.

The first lookup is made where vLLM's whole configuration is put together (`config/vllm.py`, 0.32: does the connector
support hybrid memory), in the process that a person has started; the connector itself is made after the weights are
loaded. No hook is given the configuration at that time on every platform, so the call stack is asked: for the
connector's part, as vLLM's factory hands it on (`kv_connector/factory.py`, get_connector_class), and for the whole that
is being put together. Where it does not show them, the connector refuses later, in the same words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvledger.adapters.vllm.messages import messages, refusals_are_said
from kvledger.lifecycle import ConfigurationError, described, raise_if_unstoppable

if TYPE_CHECKING:
    from types import FrameType

    from vllm.config import KVTransferConfig, VllmConfig

_LOOKUP = "get_connector_class"
_WHOLE = "__post_init__"


def refuse_at_lookup(check: Callable[[KVTransferConfig, VllmConfig | None], object]) -> None:
    """Call `check` with the connector's part, where the module's attribute is asked for by vLLM's factory.

    It is given vLLM's whole configuration as well where the lookup is made to put that together, else None.

    Raises:
        ConfigurationError: what `check` raises.
    """
    from vllm.config import KVTransferConfig, VllmConfig

    lookup = _caller(sys._getframe(1), _LOOKUP)  # noqa: SLF001 -- the way to ask who calls
    transfer = None if lookup is None else lookup.f_locals.get("kv_transfer_config")
    if not isinstance(transfer, KVTransferConfig):
        return
    maker = _caller(lookup, _WHOLE)
    whole = None if maker is None else maker.f_locals.get("self")
    try:
        with refusals_are_said():
            check(transfer, whole if isinstance(whole, VllmConfig) else None)
    except ConfigurationError:
        raise
    except BaseException as error:  # noqa: BLE001 -- another vLLM may have its configuration in other words
        raise_if_unstoppable(error)
        messages.warning(
            "the configuration cannot be looked at before weights are loaded; what is wrong with it is said then",
            error=described(error),
        )


def _caller(frame: FrameType | None, name: str) -> FrameType | None:
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame
