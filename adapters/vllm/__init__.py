"""The vLLM adapter: turns hook calls into observations, and decisions into jobs with which the workers copy pages.

Name the connector in `--kv-transfer-config` with `"kv_connector": "KVLedgerConnector"`. If vLLM does not load
kvledger's plugin, add `"kv_connector_module_path": "kvledger.adapters.vllm"`. `versions.py` contains everything that
differs between vLLM versions. The class `KVLedgerConnector` is imported on first use, so that settings can be checked
without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvledger.storage.extras import CONNECTOR, require

require(__name__, *CONNECTOR)

from kvledger.adapters.vllm.versions import refuse_older

refuse_older()

if TYPE_CHECKING:
    from kvledger.adapters.vllm.connector import KVLedgerConnector

__all__ = ["KVLedgerConnector"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from kvledger.adapters.vllm.connector import KVLedgerConnector

    return KVLedgerConnector
