"""A connector that holds others, under a name of its own."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector


class Bundle(MultiConnector):
    """As `MultiConnector`."""
