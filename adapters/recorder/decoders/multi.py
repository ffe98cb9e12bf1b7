"""MultiConnector: what its children hand over, each by its own decoder (`kv_connector/v1/multi_connector.py`, 0.32).

The children's jobs are named after the child's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kvledger.adapters.recorder.payloads import Transferred


def copies(
    metadata: Any,
    decoded: Callable[[object], Iterator[tuple[str, Transferred]]],
) -> Iterator[tuple[str, Transferred]]:
    """The children's copies."""
    for place, child in enumerate(metadata.metadata):
        for request_id, copy in decoded(child):
            yield request_id, msgspec.structs.replace(copy, job=f"{place}/{copy.job}")


def awaited(metadata: Any, decoded: Callable[[object], Iterator[str]]) -> Iterator[str]:
    """The children's jobs that are waited for."""
    yield from (f"{place}/{job}" for place, child in enumerate(metadata.metadata) for job in decoded(child))


def completed(
    worker_metadata: Any, decoded: Callable[[object], Iterator[tuple[str, int]]]
) -> Iterator[tuple[str, int]]:
    """The children's jobs that are done."""
    for place, child in enumerate(worker_metadata.metadata):
        yield from ((f"{place}/{job}", count) for job, count in decoded(child))
