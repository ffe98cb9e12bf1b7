"""The recorder: any connector of vLLM, wrapped, with the log and the audit that kvledger's own has.

Name it in `--kv-transfer-config` with `"kv_connector": "KVLedgerRecorder"` (or `"KVLedgerRecorderHMA"`); where vLLM
does not load kvledger's plugin, `"kv_connector_module_path"` is `"kvledger.adapters.recorder"`. The connector to wrap
stands under `"connector"` in its extra configuration. Readers of its logs need `extension.py` alone: nothing of vLLM is
imported before a class is asked for.
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
