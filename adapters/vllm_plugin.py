"""Makes the names of kvledger's connectors known in each process of vLLM, so that no module path is needed.

vLLM calls `register` through the entry point `vllm.general_plugins`. It does so with every model, even if no connector
of kvledger is used. This module must therefore import neither the connectors nor a package of the extra `connector`.
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
"""Connector → its module. If vLLM does not load this plugin, `kv_connector_module_path` must name the module."""


def register() -> None:
    """Register the connectors with vLLM. vLLM imports a connector when a configuration names it.

    Further calls do nothing. vLLM calls this function outside of its `try` (`vllm/plugins/__init__.py`,
    load_general_plugins, 0.32), so this function raises nothing. The modules of the connectors call it too, because a
    `MultiConnector` needs the registration. To read a child connector's figures, it looks up the child's class only by
    name, even if the child has a module path (`kv_connector/v1/multi_connector.py`, build_kv_connector_stats).
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        for name, module in CONNECTORS.items():
            with contextlib.suppress(ValueError):  # it is registered already
                KVConnectorFactory.register_connector(name, module, name)
    except Exception as error:  # noqa: BLE001 -- vLLM would not start, with or without a connector
        logging.getLogger("vllm.kvledger").warning(
            "kvledger could not register its connectors with vLLM (%s: %s); name their module in the configuration, as "
            'in "kv_connector_module_path": "kvledger.adapters.vllm", or leave "kvledger" out of VLLM_PLUGINS',
            type(error).__name__,
            error,
        )
