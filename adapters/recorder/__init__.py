"""Wraps any vLLM connector and writes a log of its calls. kvledger's tools read and audit this log like any other.

In `--kv-transfer-config`, set `"kv_connector"` to `"KVLedgerRecorder"` or `"KVLedgerRecorderHMA"`, and write the
connector to wrap under `"connector"` in `"kv_connector_extra_config"`. If vLLM does not load kvledger's plugin, add
`"kv_connector_module_path": "kvledger.adapters.recorder"`. vLLM is imported only when a class of this package is used,
not when the package is imported.
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
