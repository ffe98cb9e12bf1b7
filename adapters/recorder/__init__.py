"""Wraps any vLLM connector and writes a log of it that kvledger's tools read and audit like its own.

Set `"kv_connector": "KVLedgerRecorder"` or `"KVLedgerRecorderHMA"` in `--kv-transfer-config`, and the connector to wrap
under `"connector"` in its extra configuration. If vLLM does not load kvledger's plugin, add
`"kv_connector_module_path": "kvledger.adapters.recorder"`. Importing this package does not import vLLM until a class is
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvledger.adapters.recorder.connector import KVLedgerRecorder, KVLedgerRecorderHMA

__all__ = ["KVLedgerRecorder", "KVLedgerRecorderHMA"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from kvledger.storage.extras import CONNECTOR, require

    require(__name__, *CONNECTOR)
    from kvledger.adapters.recorder import connector

    return getattr(connector, name)
