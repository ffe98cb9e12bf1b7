"""Finds the wrapped connector and its configuration.

The wrapped connector gets a copy of vLLM's configuration. The recorder's part in it is replaced by the wrapped
connector's part, as `MultiConnector` does for its children (`kv_connector/v1/multi_connector.py`,
_get_connector_classes_and_configs, 0.32).
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
    """Return the wrapped connector's configuration, from the recorder's `extra_config`.

    Engine id, role, failure policy and buffer device are inherited from `outer`, unless `extra_config` sets them.

    Raises:
        ConfigurationError: `extra_config` has no configuration of a connector, or vLLM refuses the configuration.
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
    """Return the class of the connector that vLLM would create for `transfer`.

    vLLM does not check that the name leads to a class of connectors (`kv_connector/factory.py`, 0.32).

    Raises:
        ConfigurationError: the name does not lead to a class of connectors.
        Exception: any error that the import of the class raises.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    found: object = KVConnectorFactory.get_connector_class(transfer)
    if not isinstance(found, type) or not issubclass(found, KVConnectorBase_V1):
        reason, remedy = "it is not a class derived from vLLM's KVConnectorBase_V1", "name such a class"
        raise ConfigurationError(Refusal(reason, remedy, "connector.kv_connector", transfer.kv_connector))
    return found


def refuse_without_hybrid_memory(transfer: KVTransferConfig) -> None:
    """Check that `KVLedgerRecorderHMA` can wrap a connector.

    Raises:
        ConfigurationError: it cannot wrap the connector. The message names the recorder that can.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if not KVConnectorFactory.supports_hma_config(transfer):
        reason, remedy = "it does not support vLLM's hybrid memory", "wrap it in KVLedgerRecorder"
        raise ConfigurationError(Refusal(reason, remedy, "connector.kv_connector", transfer.kv_connector))


def transfer_of(vllm_config: VllmConfig) -> KVTransferConfig:
    """Return the part of vLLM's configuration that `--kv-transfer-config` sets."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        message = "kv_transfer_config is not set, so there is no connector to record; set --kv-transfer-config"
        raise ConfigurationError(message)
    return transfer


def wrapped_config(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy of vLLM's configuration in which the wrapped connector takes the place of the recorder."""
    outer = transfer_of(vllm_config)
    config = copy.copy(vllm_config)
    config.kv_transfer_config = wrapped_transfer(outer.kv_connector_extra_config, outer)
    return config


def unwrapped(argument: object) -> tuple[type[Any], object] | None:
    """Return the wrapped connector's class and the configuration to pass to it in place of `argument`.

    None: `argument` is none of the three kinds of configuration that vLLM passes to class methods.
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
