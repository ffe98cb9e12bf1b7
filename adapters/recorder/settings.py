"""The extra configuration of a recorder: what is wrapped, and where its log goes."""

from __future__ import annotations

from typing import Any

from kvledger.adapters.vllm.log_settings import LogSettings


class RecorderSettings(LogSettings):
    """The nested configuration, and the keys that the connector has for its log as well."""

    connector: dict[str, Any]
    """What `--kv-transfer-config` would say without the recorder."""
