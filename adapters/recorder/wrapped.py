"""Finds the wrapped connector and its configuration.

As in `MultiConnector` (`kv_connector/v1/multi_connector.py`, _get_connector_classes_and_configs, 0.32), that is a copy
of vLLM's, with the inner connector's part in place of the outer one's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvledger.adapters.vllm.transfer import accepted
from kvledger.lifecycle import ConfigurationError, Refusal

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

_EXAMPLE = '"connector": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'


def wrapped_transfer(extra_config: Mapping[str, Any], outer: KVTransferConfig | None = None) -> KVTransferConfig:
    """Return the inner configuration. It inherits engine, role, failure policy and buffer device unless it sets them.

    Raises:
        ConfigurationError: there is none, or vLLM refuses it.
    """
    given = extra_config.get("connector")
    if not isinstance(given, Mapping) or not given.get("kv_connector"):
        raise ConfigurationError(Refusal("names no connector to record", f"write {_EXAMPLE}", "connector", given))
    inherited = {}
    if outer is not None:
        names = ("engine_id", "kv_role", "kv_load_failure_policy", "kv_buffer_device")
        inherited = {name: getattr(outer, name) for name in names if hasattr(outer, name)}
    return accepted({**inherited, **given}, inside="connector")


def wrapped_class(transfer: KVTransferConfig) -> type[Any]:
    """Return the class that vLLM would create; vLLM does not check that it is one (`kv_connector/factory.py`, 0.32).

    Raises:
        ConfigurationError: it is not a connector class.
        Exception: whatever importing it raises.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    found: object = KVConnectorFactory.get_connector_class(transfer)
    if not isinstance(found, type) or not issubclass(found, KVConnectorBase_V1):
        reason, remedy = "it is not a class derived from vLLM's KVConnectorBase_V1", "name such a class"
        raise ConfigurationError(Refusal(reason, remedy, "connector.kv_connector", transfer.kv_connector))
    return found


def refuse_without_hybrid_memory(transfer: KVTransferConfig) -> None:
    """Refuse a connector that `KVLedgerRecorderHMA` cannot wrap.

    Raises:
        ConfigurationError: naming it and the recorder that can.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if not KVConnectorFactory.supports_hma_config(transfer):
        reason, remedy = "it does not support vLLM's hybrid memory", "wrap it in KVLedgerRecorder"
        raise ConfigurationError(Refusal(reason, remedy, "connector.kv_connector", transfer.kv_connector))


def transfer_of(vllm_config: VllmConfig) -> KVTransferConfig:
    """Return the part of vLLM's configuration that names a connector."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        message = "kv_transfer_config is not set, so there is no connector to record; set --kv-transfer-config"
        raise ConfigurationError(message)
    return transfer


def wrapped_config(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy of vLLM's configuration as it would be without the recorder."""
    outer = transfer_of(vllm_config)
    config = copy.copy(vllm_config)
    config.kv_transfer_config = wrapped_transfer(outer.kv_connector_extra_config, outer)
    return config


def unwrapped(argument: object) -> tuple[type[Any], object] | None:
    """Return the wrapped class and the argument for it; None if the argument is no configuration.

    vLLM calls class methods with one of three kinds of configuration.
    """
    from vllm.config import KVTransferConfig, VllmConfig

    if isinstance(argument, VllmConfig):
        config = wrapped_config(argument)
        return wrapped_class(transfer_of(config)), config
    if isinstance(argument, KVTransferConfig):
        transfer = wrapped_transfer(argument.kv_connector_extra_config, argument)
        return wrapped_class(transfer), transfer
    if isinstance(argument, Mapping) and "connector" in argument:
        transfer = wrapped_transfer(argument)
        return wrapped_class(transfer), transfer.kv_connector_extra_config
    return None
