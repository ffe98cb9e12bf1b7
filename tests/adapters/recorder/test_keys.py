"""The log says which requests have tokens in common, and none of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.recorded import audited, events_of

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def keys_of(recording: Any) -> dict[str, list[bytes]]:
    """Request id -> the keys of its chunks in turn."""
    keys: dict[str, list[bytes]] = {}
    for _, event in events_of(recording):
        if isinstance(event, e.ChunkKeysObserved):
            keys.setdefault(event.request_id, [])[event.first_chunk :] = event.keys
    return keys


@pytest.mark.parametrize("windows", [(0,), (0, 48), (48, 0, 33)], ids=str)
def test_requests_share_the_keys_of_the_blocks_that_they_share(
    record: Callable[..., tuple[Any, Any]], windows: tuple[int, ...]
) -> None:
    """One for each full block, of the prompt and of what was computed, with one group of layers and with several."""
    engine, recording = record(num_blocks=60 * len(windows), windows=windows)
    engine.add("writer", range(50), 30)
    engine.run()
    for request_id, prompt, salt in (
        ("reader", [*range(40), *range(900, 920)], None),
        ("stranger", range(500, 550), None),
        ("tenant", range(50), "another"),
    ):
        engine.add(request_id, prompt, 10, cache_salt=salt)
    engine.run()
    keys = keys_of(recording)
    assert {request_id: len(found) for request_id, found in keys.items()} == {
        "writer": (50 + 30) // 16,
        "reader": (60 + 10) // 16,
        "stranger": (50 + 10) // 16,
        "tenant": (50 + 10) // 16,
    }
    shared = {other: len({*keys["writer"]} & {*keys[other]}) for other in ("reader", "stranger", "tenant")}
    assert shared == {"reader": 40 // 16, "stranger": 0, "tenant": 0}
    assert audited(recording).is_sound
