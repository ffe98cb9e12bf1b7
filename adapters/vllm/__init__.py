"""The vLLM adapter: hooks become observations, decisions become metadata, workers move pages.

Name it in `--kv-transfer-config` with `"kv_connector": "KVLedgerConnector"`, and where vLLM does not load kvledger's
plugin also with `"kv_connector_module_path": "kvledger.adapters.vllm"`. What differs between vLLM versions stands in
`versions.py`.
"""

from kvledger.storage.extras import CONNECTOR, require

require(__name__, *CONNECTOR)

from kvledger.adapters.vllm.versions import refuse_older

refuse_older()

from kvledger.adapters.vllm.connector import KVLedgerConnector

__all__ = ["KVLedgerConnector"]
