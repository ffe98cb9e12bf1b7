"""The recorder's settings, and checks of them that need no engine. This module must not know what is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic

from kvledger.adapters.recorder.wrapped import refuse_without_hybrid_memory, wrapped_class, wrapped_transfer
from kvledger.adapters.vllm.log_settings import LogSettings
from kvledger.adapters.vllm.transfer import refuse_unknown
from kvledger.lifecycle import ConfigurationError, Refusal, described, raise_if_unstoppable

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class RecorderSettings(LogSettings):
    """The recorder's settings: the wrapped connector's configuration, and the settings of the log."""

    connector: dict[str, Any] = pydantic.Field(default_factory=dict)
    """The wrapped connector's configuration, in the form of `--kv-transfer-config`."""


def accepted_recorder(
    outer: KVTransferConfig, *, for_hybrid_memory: bool
) -> tuple[RecorderSettings, type[KVConnectorBase_V1]]:
    """Return the recorder's settings and the wrapped connector's class.

    Args:
        outer: the recorder's own part of vLLM's configuration.
        for_hybrid_memory: whether the recorder is `KVLedgerRecorderHMA`, so that the wrapped connector must support
            vLLM's hybrid memory.

    Raises:
        ConfigurationError: the configuration names no connector that vLLM can create, or a connector that this
            recorder cannot wrap.
    """
    settings = RecorderSettings.from_extra_config(outer.kv_connector_extra_config)
    transfer = wrapped_transfer(outer.kv_connector_extra_config, outer)
    refuse_unknown(transfer, "connector")
    try:
        wrapped = wrapped_class(transfer)
    except ConfigurationError:
        raise
    except BaseException as error:
        raise_if_unstoppable(error)
        reason = f"vLLM cannot load it ({described(error)})"
        remedy = "fix the error, or name another connector"
        raise ConfigurationError(Refusal(reason, remedy, "connector.kv_connector", transfer.kv_connector)) from error
    if for_hybrid_memory:
        refuse_without_hybrid_memory(transfer)
    return settings, wrapped
