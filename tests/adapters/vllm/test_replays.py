"""The log is the truth: folded again it is what the live ledger believed, at the end and at every step before.

Every other test of this folder is replayed too, when it is over (`make_engine` in `conftest.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvledger.lifecycle import Core, LedgerConfiguration, fold
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.codec import EventDecoder
from kvledger.storage.events import read_log

pytestmark = pytest.mark.scheduler


def crowd(make_engine: Any, **options: Any) -> Any:
    """Preemptions, loads, evictions: 12 host slots are too few for what four requests have to say."""
    engine = make_engine(
        **({"num_blocks": 14, "chunk_size": 8, "enable_prefix_caching": False, "host_bytes": 12 * 512} | options)
    )
    engine.add_crowd(4)
    return engine


def test_the_state_at_every_step_can_be_folded_again(make_engine: Any, runner: dict[str, bool]) -> None:
    """What was believed after each step, from the events up to there, and nothing else."""
    engine = crowd(make_engine, **runner)
    believed: dict[int, Any] = {}
    ledger = engine.connector.scheduler_side.ledger
    while engine.scheduler.has_requests():
        engine.step()
        believed[ledger.next_sequence - 1] = engine.projections.snapshot()
    events = engine.events()
    assert engine.num_preemptions > 1
    assert engine.logged(e.ChunksEvicted)
    for sequence in sorted(believed)[:: max(1, len(believed) // 40)]:
        assert (
            fold(Core.standard(), events, engine.replay_configuration, at=sequence).snapshot() == believed[sequence]
        ), sequence


def test_a_log_on_disk_replays_like_the_one_in_memory(make_engine: Any, tmp_path: Path) -> None:
    """Written, closed, read by somebody else: the same events, the same state."""
    engine = crowd(make_engine, log_dir=str(tmp_path), segment_bytes="16KiB")
    engine.run()
    engine.connector.shutdown()
    (directory,) = tmp_path.iterdir()
    assert len(list(directory.glob("*.kvlog"))) > 1
    reader = read_log(directory)
    decoder = EventDecoder(Core.standard(), reader.header)
    events = [
        (frame.first_sequence + offset, event)
        for frame in reader
        for offset, event in enumerate(decoder.decode(frame.payload))
    ]
    assert reader.damage == []
    assert [sequence for sequence, _ in events] == list(range(1, len(events) + 1))
    assert isinstance(events[-1][1], e.LogNote)
    configuration: Any = reader.header["configuration"]
    assert (
        fold(Core.standard(), events, LedgerConfiguration(**configuration)).snapshot() == engine.projections.snapshot()
    )


def test_a_log_holds_no_tokens(make_engine: Any, tmp_path: Path) -> None:
    """No token ids: a prompt of telling numbers is nowhere in the file, neither as text nor as an integer list."""
    engine = make_engine(num_blocks=30, chunk_size=8, log_dir=str(tmp_path))
    engine.serve("secret", [501, 502, 503, 504] * 10, 12, cache_salt="my very own salt")
    for event in engine.logged(e.Event):
        values = [value for value in msgspec.structs.astuple(event) if isinstance(value, tuple)]
        assert not any(set(value) >= {501, 502} for value in values if all(isinstance(item, int) for item in value))
    engine.connector.shutdown()
    (directory,) = tmp_path.iterdir()
    content = b"".join(path.read_bytes() for path in directory.glob("*.kvlog"))
    assert b"secret" in content, "request ids are there"
    assert b"my very own salt" not in content
    assert b"\xcd\x01\xf5\xcd\x01\xf6" not in content, "501, 502 as msgpack writes them"


def test_deciding_again_notices_a_changed_decision(make_engine: Any) -> None:
    """A log in which one answer was another one does not replay: the comparison can fail."""
    engine = crowd(make_engine)
    engine.run()
    events = engine.events()
    index = next(
        i for i, (_, event) in enumerate(events) if isinstance(event, e.LookupAnswered) and event.num_external_tokens
    )
    sequence, answer = events[index]
    events[index] = (sequence, msgspec.structs.replace(answer, num_external_tokens=8))
    audit = Audit(Core.standard(), engine.replay_configuration)
    audit.run(events)
    assert audit.divergences[0].sequence == sequence
    assert not audit.is_sound
