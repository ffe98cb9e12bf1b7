"""ExampleConnector (`kv_connector/v1/example_connector.py`, vLLM 0.32).

Its metadata has vLLM's slot mappings, but no request ids. A copy begins with the first block of a request's table and
ends within the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvledger.adapters.recorded.payloads import STEP, Transferred


def copies(metadata: Any, block_size: int) -> Iterator[tuple[str, Transferred]]:
    """Yield one copy for each request in the step. The copy's job is the number of the request in the metadata."""
    for number, request in enumerate(metadata.requests):
        block_ids = tuple(int(slot) // block_size for slot in request.slot_mapping[::block_size])
        if block_ids:
            is_whole = len(request.slot_mapping) % block_size == 0
            yield "", Transferred(str(number), not request.is_store, 0, 0, block_ids, STEP, is_whole)
