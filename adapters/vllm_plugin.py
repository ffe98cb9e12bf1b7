"""What vLLM loads of kvledger in each of its processes: the connectors' names, so that no module path is needed.

It must not import the connectors, nor anything that the extra `connector` brings: vLLM loads it with every model, also
where nobody names a connector of kvledger. An entry point (`vllm.general_plugins`) names `register`.
"""

from __future__ import annotations

import contextlib
import logging
from types import MappingProxyType
from typing import Final

CONNECTORS: Final = MappingProxyType(
    {
        "KVLedgerConnector": "kvledger.adapters.vllm",
        "KVLedgerRecorder": "kvledger.adapters.recorder",
        "KVLedgerRecorderHMA": "kvledger.adapters.recorder",
    }
)
"""The module of each; the one that `kv_connector_module_path` names where vLLM does not load this plugin."""


def register() -> None:
    """Make the connectors known to vLLM by name; each is imported when it is named. Any further call does nothing.

    vLLM calls it outside of its `try` (`vllm/plugins/__init__.py`, load_general_plugins, 0.32), so nothing is raised.
    The connectors call it as well: `MultiConnector` finds the class that reads a child's figures by name alone, even
    where the child was configured with a module path (`kv_connector/v1/multi_connector.py`, build_kv_connector_stats).
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        for name, module in CONNECTORS.items():
            with contextlib.suppress(ValueError):  # which says that it is registered
                KVConnectorFactory.register_connector(name, module, name)
    except Exception as error:  # noqa: BLE001 -- vLLM would not start, with or without a connector
        logging.getLogger("vllm.kvledger").warning(
            "kvledger could not make its connectors known to vLLM (%s: %s); name them with their module, as in "
            '"kv_connector_module_path": "kvledger.adapters.vllm", or let VLLM_PLUGINS leave out "kvledger"',
            type(error).__name__,
            error,
        )
