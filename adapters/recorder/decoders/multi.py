"""MultiConnector: what its children hand over, each by its own decoder (`kv_connector/v1/multi_connector.py`, 0.32)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kvledger.adapters.recorder.said import Transferred


def copies(
    metadata: Any,
    decoded: Callable[[object], Iterator[tuple[str, Transferred]]],
) -> Iterator[tuple[str, Transferred]]:
    """The children's copies; their jobs are named after the child's place."""
    for place, child in enumerate(metadata.metadata):
        for request_id, copy in decoded(child):
            yield request_id, msgspec.structs.replace(copy, job=f"{place}/{copy.job}")
