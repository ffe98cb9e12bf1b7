"""A recorder decides nothing of its own: it records on, however often a connector puts off its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.connectors import Recorded
from sim.lmcache_mp import LMCacheMP
from sim.recorded import audited, events_of

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

NUM_TIMES = 12
"""More than the core's own limit of lookups that are put off, 8."""


def test_an_answer_may_be_put_off_as_often_as_the_connector_likes(record: Callable[..., tuple[Any, Any]]) -> None:
    """Each time is in the log, and so is the answer behind the last one."""
    setup = Recorded(inner=LMCacheMP(num_polls=NUM_TIMES, chunk_size=16), name="KVLedgerRecorder")
    engine, recording = record(setup=setup)
    engine.add("a", range(64), 3)
    engine.run()
    events = [event for _, event in events_of(recording)]
    assert sum(isinstance(event, e.LookupDeferred) for event in events) == NUM_TIMES
    assert sum(isinstance(event, e.LookupAnswered) for event in events) == 1
    assert not [event for event in events if isinstance(event, e.ExtensionStopped)]
    assert audited(recording).is_sound
