"""What `kvledger verify` costs for an event, stage by stage, on logs of a busy server.

A log is made by vLLM's own scheduler with our connector (`served_logs.py`) or given by its path. Each stage goes
through it several times in pieces; a piece counts with its best time, so that other processes on the machine cost
little. The clock is the thread's CPU time. A plain loop, timed the same way, says how fast the machine was meanwhile.

    python tests/benchmarks/verify_speed.py                      # every mix
    python tests/benchmarks/verify_speed.py --mix steady --steps 180000 --rounds 1   # an hour of 50 steps a second
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import attrs

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.served_logs import MIXES, Mix, serve
from rich.console import Console
from rich.table import Table

from kvledger.adapters.logs.log import StoredLog, open_log
from kvledger.lifecycle import Core
from kvledger.lifecycle.audit import Audit, Checker, EventChecks, Model
from kvledger.lifecycle.audit.model.moment import Check
from kvledger.lifecycle.codec import EventDecoder
from kvledger.lifecycle.events import Event
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Replay, SequencedEvent
from kvledger.storage.events import Frame, read_log

BUDGET_EVENTS_PER_SECOND = 200_000
_Item = TypeVar("_Item")
_EVENTS_PER_PIECE = 400
_FRAMES_PER_PIECE = 50
_MAX_CHECK_NS = 100_000
_LOOPS_PER_PIECE = 20_000


@attrs.define
class Speed:
    """Microseconds of CPU time for an event of one log."""

    mix: str
    num_events: int = 0
    num_frames: int = 0
    num_bytes: int = 0
    read_us: float = 0.0
    """Frames, CRC-32C, chain."""
    decode_us: float = 0.0
    fold_us: float = 0.0
    decide_us: float = 0.0
    """Deciding again, comparing, and walking the reference machine along."""
    indices_us: float = 0.0
    """The audit's own indices, which several checkers share."""
    checkers_us: dict[str, float] = attrs.field(factory=dict)
    """Rule -> what its checks take, without the calls to them, each timed by itself."""
    all_checkers_us: float = 0.0
    """Every checker in one audit, without the indices."""
    total_us: float = 0.0
    loop_ns: float = 0.0
    """One turn of `for number in range(n): count += number`, timed in between."""

    @property
    def events_per_second(self) -> float:
        """Events verified in a second of CPU time."""
        return 1e6 / self.total_us


class _Stopwatch:
    """Name of a stage -> the best time of each of its pieces, in seconds."""

    def __init__(self) -> None:
        self._best: dict[str, dict[int, float]] = {}

    def time(self, name: str, pieces: Iterable[Callable[[], object]]) -> None:
        best = self._best.setdefault(name, {})
        for number, piece in enumerate(pieces):
            started = time.thread_time()
            piece()
            best[number] = min(best.get(number, 1e9), time.thread_time() - started)

    def seconds(self, name: str) -> float:
        return sum(self._best[name].values())


def measure(path: Path, mix: str, *, rounds: int = 5, each_checker: bool = True) -> Speed:
    """Verify the log at `path`, stage by stage.

    Raises:
        RuntimeError: the log is not sound, so that its figures would mean nothing.
    """
    segments = sorted(path.rglob("*.kvlog"))
    log = open_log(segments[0].parent if path.is_dir() and segments else path)
    decoder = EventDecoder(Core.standard(), log.header)
    frames = list(read_log(log.path))
    events = [
        numbered for frame in frames for numbered in decoder.decode_frame(frame.payload).numbered(frame.first_sequence)
    ]
    gc.collect()
    gc.freeze()
    watch = _Stopwatch()
    for _ in range(rounds):
        _take_round(watch, log, decoder, frames, events)
    per_event = 1e6 / len(events)
    speed = Speed(mix, len(events), len(frames), log.total_bytes())
    speed.loop_ns = watch.seconds("loop") * 1e9 / _LOOPS_PER_PIECE
    speed.read_us = watch.seconds("read") * per_event
    speed.decode_us = watch.seconds("decode") * per_event
    speed.fold_us = watch.seconds("fold") * per_event
    replay_us = watch.seconds("replay") * per_event
    indices_us = watch.seconds("indices") * per_event
    audit_us = watch.seconds("audit") * per_event
    speed.decide_us = replay_us - speed.fold_us
    speed.indices_us = indices_us - replay_us
    speed.all_checkers_us = audit_us - indices_us
    if each_checker:
        passes = [_nanoseconds_of_checkers(log, events) for _ in range(min(rounds, 3))]
        speed.checkers_us = {
            rule: min(each[rule] for each in passes) * per_event / 1e9 for rule in Core.standard().rules
        }
    speed.total_us = speed.read_us + speed.decode_us + audit_us
    return speed


def _take_round(
    watch: _Stopwatch,
    log: StoredLog,
    decoder: EventDecoder,
    frames: Sequence[Frame],
    events: Sequence[SequencedEvent],
) -> None:
    watch.time("loop", [_plain_loop])
    reader = iter(read_log(log.path))
    of_frames = list(_pieces(frames, _FRAMES_PER_PIECE))
    watch.time("read", ((lambda piece=piece: [next(reader) for _ in piece]) for piece in of_frames))
    watch.time("decode", ((lambda piece=piece: [decoder.decode(f.payload) for f in piece]) for piece in of_frames))
    of_events = list(_pieces(events, _EVENTS_PER_PIECE))
    projections = Projections(Core.standard(), log.configuration)

    def fold(piece: Sequence[SequencedEvent]) -> None:
        for sequence, event in piece:
            projections.fold(event, sequence)

    watch.time("fold", ((lambda piece=piece: fold(piece)) for piece in of_events))
    replay = Replay(Core.standard(), log.configuration, reference=Core.standard().reference)
    watch.time("replay", ((lambda piece=piece: replay.take(piece)) for piece in of_events))
    _time_audit(watch, "indices", _audit(log, ()), of_events)
    audit = _audit(log, None)
    _time_audit(watch, "audit", audit, of_events)
    audit.finish()
    if not audit.is_sound:
        message = f"{log.path} is not sound: {audit.violations[:1] or audit.divergences[:1] or audit.unfoldable}"
        raise RuntimeError(message)


class _Timed(Checker):
    """A checker whose checks are timed one by one, by the wall, with what the clock itself takes taken off."""

    def __init__(self, make: Callable[[Model], Checker], model: Model) -> None:
        super().__init__(model)
        self.num_ns = 0
        self.timed = make(model)

    def checks(self) -> EventChecks:
        """The same checks."""
        return [(event_class, self._timed(check)) for event_class, check in self.timed.checks()]

    def _timed(self, check: Check) -> Check:
        clock = time.perf_counter_ns

        def timed(event: Event) -> None:
            started = clock()
            before = clock()
            check(event)
            ended = clock()
            # Another process's turn in between is not ours.
            self.num_ns += min(max(0, ended - before - (before - started)), _MAX_CHECK_NS)

        return timed


def _nanoseconds_of_checkers(log: StoredLog, events: Sequence[SequencedEvent]) -> dict[str, int]:
    checkers = [partial(_Timed, make) for make in Core.standard().rules.values()]
    audit = Audit(Core.standard(), log.configuration, checkers=checkers)
    audit.run(events)
    return {checker.timed.rule: checker.num_ns for checker in audit.checkers if isinstance(checker, _Timed)}


def _time_audit(watch: _Stopwatch, name: str, audit: Audit, of_events: Sequence[Sequence[SequencedEvent]]) -> None:
    watch.time(name, ((lambda piece=piece: audit.take_frame(piece)) for piece in of_events))


def _audit(log: StoredLog, rules: Sequence[str] | None) -> Audit:
    checkers = None if rules is None else [Core.standard().rules[rule] for rule in rules]
    return Audit(Core.standard(), log.configuration, checkers=checkers)


def _pieces(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _plain_loop() -> int:
    count = 0
    for number in range(_LOOPS_PER_PIECE):
        count += number
    return count


def measure_mixes(
    mixes: Iterable[Mix], *, rounds: int, each_checker: bool, keep: Path | None = None
) -> Iterator[Speed]:
    """Serve and verify each mix; logs are kept in `keep`, if given, and taken from there when they are there."""
    with tempfile.TemporaryDirectory() as folder:
        for mix in mixes:
            log_dir = (keep or Path(folder)) / f"{mix.name}-{mix.num_steps}"
            if not log_dir.exists():
                serve(mix, log_dir)
            yield measure(log_dir, mix.name, rounds=rounds, each_checker=each_checker)


def table_of(speeds: Sequence[Speed]) -> Table:
    """A row for each stage, a column for each mix, in microseconds for an event."""
    table = Table(
        title="kvledger verify, µs of CPU time for an event", caption="checkers one by one: without the calls to them"
    )
    table.add_column("stage")
    for speed in speeds:
        table.add_column(f"{speed.mix}\n{speed.num_events} events", justify="right")
    stages = {
        "frames, CRC, chain": [speed.read_us for speed in speeds],
        "decode": [speed.decode_us for speed in speeds],
        "fold": [speed.fold_us for speed in speeds],
        "decide again, reference machine": [speed.decide_us for speed in speeds],
        "indices of the audit": [speed.indices_us for speed in speeds],
        "all checkers": [speed.all_checkers_us for speed in speeds],
        **{f"  {rule}": [speed.checkers_us[rule] for speed in speeds] for rule in speeds[0].checkers_us},
        "total": [speed.total_us for speed in speeds],
    }
    for name, figures in stages.items():
        table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    table.add_row("events a second", *(f"{speed.events_per_second:,.0f}" for speed in speeds))
    table.add_row("ns for a turn of a plain loop", *(f"{speed.loop_ns:.0f}" for speed in speeds))
    return table


def main() -> int:
    """Measure; the exit code is 1 where a mix misses the budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mix", action="append", choices=list(MIXES), help="only this one; may be repeated")
    parser.add_argument("--steps", type=int, help="engine steps, instead of the mix's own number")
    parser.add_argument("--rounds", type=int, default=5, help="times that each stage is taken")
    parser.add_argument("--log", type=Path, help="a log that is there, instead of mixes")
    parser.add_argument("--keep", type=Path, help="keep the logs here, and take those that are there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--no-checkers", action="store_true", help="only all checkers together")
    arguments = parser.parse_args()
    each_checker = not arguments.no_checkers
    if arguments.log:
        speeds = [measure(arguments.log, arguments.log.name, rounds=arguments.rounds, each_checker=each_checker)]
    else:
        mixes = [MIXES[name] for name in arguments.mix or MIXES]
        if arguments.steps:
            mixes = [attrs.evolve(mix, num_steps=arguments.steps) for mix in mixes]
        speeds = list(measure_mixes(mixes, rounds=arguments.rounds, each_checker=each_checker, keep=arguments.keep))
    if arguments.json:
        print(json.dumps([{**attrs.asdict(speed), "events_per_second": speed.events_per_second} for speed in speeds]))
    else:
        Console().print(table_of(speeds))
    return 0 if min(speed.events_per_second for speed in speeds) >= BUDGET_EVENTS_PER_SECOND else 1


if __name__ == "__main__":
    sys.exit(main())
