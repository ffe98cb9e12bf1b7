"""Reads the JSON object of `--kv-transfer-config` as vLLM does.

It refuses the same objects as vLLM, but with kvledger's messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pydantic

from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.refusals import refusals, unknown
from kvledger.adapters.vllm_plugin import CONNECTORS
from kvledger.lifecycle import ConfigurationError, Refusal

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig


def accepted(given: Mapping[str, Any], inside: str = "") -> KVTransferConfig:
    """Return the object `given` as vLLM reads it. `inside`: key that contains the object; empty if there is none.

    Raises:
        ConfigurationError: names every wrong key, why it is wrong, and what is allowed.
    """
    from vllm.config import KVTransferConfig

    if given.get("kv_connector") and given.get("kv_role") is None:
        key = f"{inside}.kv_role" if inside else "kv_role"
        raise ConfigurationError(Refusal("a connector needs a role", 'write "kv_both"', key))
    try:
        return KVTransferConfig(**given)
    except pydantic.ValidationError as error:
        known = [field.name for field in dataclasses.fields(KVTransferConfig)]
        elsewhere = ("is a key of kvledger", "move it into kv_connector_extra_config")
        found = refusals(error, known, dict.fromkeys(ConnectorSettings.model_fields, elsewhere), inside)
    raise ConfigurationError(*found)


def refuse_unknown(transfer: KVTransferConfig, inside: str = "") -> None:
    """Refuse a connector that vLLM does not know by name and that has no module path.

    Raises:
        ConfigurationError: the connector is unknown. The error names the most similar known name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = str(transfer.kv_connector)
    known = [*CONNECTORS, *sorted(KVConnectorFactory._registry.keys() - CONNECTORS.keys())]  # noqa: SLF001 -- as vLLM
    if name not in known and not transfer.kv_connector_module_path:
        raise ConfigurationError(
            unknown(f"{inside}.kv_connector" if inside else "kv_connector", name, name, known, "connector")
        )


def connectors(transfer: KVTransferConfig, inside: str = "") -> Iterator[KVTransferConfig]:
    """Yield the connector's object, or the objects of a `MultiConnector`'s children.

    `inside`: key that contains the connector's object; empty if there is none.

    Raises:
        ConfigurationError: no connector is named, a name is unknown, or the children are not a list of objects.
    """
    if not transfer.kv_connector:
        raise ConfigurationError(Refusal("no connector is named", 'write "KVLedgerConnector"', "kv_connector"))
    if transfer.kv_connector != "MultiConnector":
        refuse_unknown(transfer, inside)
        yield transfer
        return
    children = transfer.kv_connector_extra_config.get("connectors")
    key = f"{inside}.kv_connector_extra_config.connectors" if inside else "kv_connector_extra_config.connectors"
    if not isinstance(children, list) or not all(isinstance(child, Mapping) for child in children):
        raise ConfigurationError(
            Refusal("must be a list of objects", "write one object, with kv_role, for each connector", key, children)
        )
    for number, child in enumerate(children):
        found = accepted(child, f"{key}.{number}")
        refuse_unknown(found, f"{key}.{number}")
        yield found
