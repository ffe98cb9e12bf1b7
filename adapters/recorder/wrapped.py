"""Which connector is wrapped, and what it is given in the place of the recorder's own configuration.

`MultiConnector` is the pattern (`kv_connector/v1/multi_connector.py`, _get_connector_classes_and_configs, 0.32): a copy
of vLLM's configuration in which the nested one stands where the outer one stood.
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
    """The nested configuration; what it does not say of engine, role and failures it has from the outer one.

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
    """The class that vLLM would instantiate, which it does not check to be one (`kv_connector/factory.py`, 0.32).

    Raises:
        ConfigurationError: it is no class of connectors.
        Exception: whatever importing it raises.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    found: object = KVConnectorFactory.get_connector_class(transfer)
    if not isinstance(found, type) or not issubclass(found, KVConnectorBase_V1):
        reason, remedy = "is no class derived from vLLM's KVConnectorBase_V1", "name one"
        raise ConfigurationError(Refusal(reason, remedy, "connector.kv_connector", transfer.kv_connector))
    return found


def refuse_without_hybrid_memory(transfer: KVTransferConfig) -> None:
    """Refuse a connector that the recorder for hybrid memory cannot stand for.

    Raises:
        ConfigurationError: naming it, and the recorder that can.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if not KVConnectorFactory.supports_hma_config(transfer):
        reason, remedy = "it does not support vLLM's hybrid memory", "name KVLedgerRecorder around it"
        raise ConfigurationError(Refusal(reason, remedy, "connector.kv_connector", transfer.kv_connector))


def transfer_of(vllm_config: VllmConfig) -> KVTransferConfig:
    """The part that names a connector; vLLM asks for none without it."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        message = "kv_transfer_config is not set, so there is no connector to record"
        raise ConfigurationError(message)
    return transfer


def wrapped_config(vllm_config: VllmConfig) -> VllmConfig:
    """A copy of vLLM's configuration as it would be without the recorder."""
    outer = transfer_of(vllm_config)
    config = copy.copy(vllm_config)
    config.kv_transfer_config = wrapped_transfer(outer.kv_connector_extra_config, outer)
    return config


def unwrapped(argument: object) -> tuple[type[Any], object] | None:
    """The wrapped class, and the argument as it is to see it; None of an argument that has no configuration.

    vLLM asks classes before there is an instance, with one of three kinds of configuration.
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
