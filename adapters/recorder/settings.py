"""What an operator may write for the recorder, and what is refused of it before an engine starts.

It must not know what is recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic

from kvledger.adapters.recorder.wrapped import refuse_without_hybrid_memory, wrapped_class, wrapped_transfer
from kvledger.adapters.vllm.before_weights import refuse_log
from kvledger.adapters.vllm.log_settings import LogSettings
from kvledger.adapters.vllm.transfer import refuse_unknown
from kvledger.lifecycle import ConfigurationError, Refusal, described, raise_if_unstoppable

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class RecorderSettings(LogSettings):
    """The nested configuration, and the keys that the connector has for its log as well."""

    connector: dict[str, Any] = pydantic.Field(default_factory=dict)
    """What `--kv-transfer-config` would say without the recorder."""


def refuse_recorder(
    outer: KVTransferConfig, vllm_config: VllmConfig | None
) -> tuple[RecorderSettings, type[KVConnectorBase_V1]]:
    """Of the recorder that is named there; what else it returns is how it is set, and the class that is wrapped.

    Looking that class up refuses what it itself refuses.

    Raises:
        ConfigurationError: no connector that vLLM could make, one that this recorder cannot stand for, or a `log_dir`
            that cannot be written.
    """
    settings = RecorderSettings.from_extra_config(outer.kv_connector_extra_config)
    transfer = wrapped_transfer(outer.kv_connector_extra_config, outer)
    refuse_unknown(transfer, "connector")
    refuse_log(settings, vllm_config, by_workers=True)
    try:
        wrapped = wrapped_class(transfer)
    except ConfigurationError:
        raise
    except BaseException as error:
        raise_if_unstoppable(error)
        reason = f"vLLM cannot load it ({described(error)})"
        remedy = "put that right, or name another connector"
        raise ConfigurationError(Refusal(reason, remedy, "connector.kv_connector", transfer.kv_connector)) from error
    if outer.kv_connector == "KVLedgerRecorderHMA":
        refuse_without_hybrid_memory(transfer)
    return settings, wrapped
