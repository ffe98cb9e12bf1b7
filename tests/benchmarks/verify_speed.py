"""What `kvledger verify` costs, beside what it cost the scheduler to serve what is verified.

A log is made by vLLM's own scheduler with our connector; what the scheduler's thread spent on it is the anchor. Then
the stages of an audit go through the log, each including those before it, several times in turns. The clock is the
thread's CPU time.

By several processes, the whole command is measured, by the clock and in CPU time: on four logs side by side.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import attrs
from benchmarks.figures import Cases, Figure, compared
from benchmarks.served import Load, Server, ours

from kvledger.adapters.tools.logs.log import StoredLog, open_log
from kvledger.lifecycle import Core
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.codec import EventDecoder
from kvledger.lifecycle.replay import Replay, SequencedEvent
from kvledger.storage.events import read_log

_STEPS_OF_AN_HOUR = 50 * 3600
_NUM_LOGS = 4
_SERVING = "serving it (scheduler)"


@attrs.frozen
class _Mix:
    """A load, and how kvledger is configured for it."""

    load: Load
    num_steps: int
    host_pages: int = 100_000
    extra_config: Mapping[str, object] = attrs.field(factory=dict)


_BUSY = Load(num_waiting=64, num_prompt_tokens=(100, 1000), num_output_tokens=(100, 1000), num_shared_beginnings=40)
_PRESSED = attrs.evolve(_BUSY, num_blocks=4000, enable_prefix_caching=False)
MIXES = {
    "steady": _Mix(_BUSY, 6000),
    "a save for each block": _Mix(_BUSY, 1500, extra_config={"chunk_size": 16}),
    "a device pool too small": _Mix(
        attrs.evolve(_PRESSED, num_prompt_tokens=(50, 200), num_output_tokens=(300, 1000)),
        3000,
        host_pages=12_000,
        extra_config={"chunk_size": 32},
    ),
    "96 requests that wait for copies": _Mix(
        attrs.evolve(
            _PRESSED,
            num_requests=96,
            num_waiting=24,
            num_blocks=2000,
            num_prompt_tokens=(200, 2000),
            num_output_tokens=(20, 200),
        ),
        4000,
        host_pages=20_000,
        extra_config={"chunk_size": 64, "load_mode": "async", "save_mode": "async"},
    ),
}


def serve(mix: _Mix, log_dir: Path, num_steps: int) -> tuple[StoredLog, int]:
    """A log of so many steps, and the thread CPU time of the scheduler's calls in nanoseconds."""
    server = Server(mix.load, ours(mix.host_pages, log_dir=str(log_dir), **mix.extra_config), num_steps=num_steps)
    for _ in range(num_steps):
        server.step()
    server.scheduler.shutdown()
    *_, path = sorted(log_dir.iterdir())  # their names begin with the time
    return open_log(path), sum(server.schedule_ns) + sum(server.update_ns)


def _measure(mix: _Mix, num_steps: int, num_rounds: int) -> Sequence[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        log, serving_ns = serve(mix, Path(folder), num_steps)
        stages: dict[str, Callable[[StoredLog], object]] = {
            "read, CRC, chain": _read,
            "and decode": _decode,
            "and decide again": _replay,
            "and audit: kvledger verify": _audit,
        }
        rounds: dict[str, list[float]] = {_SERVING: [serving_ns / 1e3 / num_steps] * num_rounds}
        gc.collect()
        for _ in range(num_rounds):
            for name, stage in stages.items():
                started = time.thread_time_ns()
                stage(log)
                rounds.setdefault(name, []).append((time.thread_time_ns() - started) / 1e3 / num_steps)
        num_events = _decode(log)
        figures = compared("CPU time a step", "µs", rounds, anchor=_SERVING)
        audit = figures[-1]
        return [
            *figures,
            Figure("events a step", _SERVING, num_events / num_steps, ""),
            Figure("log a step", _SERVING, log.total_bytes() / num_steps, "B"),
            Figure("events a second", audit.contender, num_events / num_steps / audit.value * 1e6, ""),
            Figure("an hour of 50 steps a second", audit.contender, audit.value / 1e6 * _STEPS_OF_AN_HOUR, "s"),
        ]


def _measure_processes(num_steps: int, num_rounds: int) -> Sequence[Figure]:
    """Logs with so many steps together."""
    mix = MIXES["a save for each block"]
    with tempfile.TemporaryDirectory() as folder:
        logs = [serve(mix, Path(folder), num_steps // _NUM_LOGS)[0] for _ in range(_NUM_LOGS)]
        clock: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        for _ in range(num_rounds):
            for jobs in (1, 2):
                taken = seconds_of("verify", folder, "--jobs", str(jobs))
                name = f"kvledger verify --jobs {jobs}"
                clock.setdefault(name, []).append(taken.by_the_clock)
                cpu.setdefault(name, []).append(taken.of_cpu)
        anchor = next(iter(clock))
        return [
            *compared("by the clock", "s", clock, anchor=anchor),
            *compared("CPU time", "s", cpu, anchor=anchor),
            Figure("size", anchor, sum(log.total_bytes() for log in logs) / 1e6, "MB"),
        ]


class Seconds(NamedTuple):
    """What a command took in a process of its own, with those that it started."""

    by_the_clock: float
    of_cpu: float


def seconds_of(*arguments: str, environment: Mapping[str, str] | None = None) -> Seconds:
    """Run `kvledger` with these arguments, as a person gives it. Raises where its exit code is not 0."""
    command = [sys.executable, "-m", "kvledger.adapters.tools.cli.main", *arguments]
    before = os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, env={**os.environ, **(environment or {})}, check=True)
    after = os.times()
    of_cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Seconds(after.elapsed - before.elapsed, of_cpu)


def _read(log: StoredLog) -> int:
    return sum(1 for _ in read_log(log.path))


def _decode(log: StoredLog) -> int:
    return sum(map(len, _events(log)))


def _events(log: StoredLog) -> Iterator[list[SequencedEvent]]:
    """Of each frame."""
    decoder = EventDecoder(Core.standard(), log.header)
    for frame in read_log(log.path):
        yield list(decoder.decode_frame(frame.payload).numbered(frame.first_sequence))


def _replay(log: StoredLog) -> None:
    replay = Replay(Core.standard(), log.configuration, reference=Core.standard().reference)
    for events in _events(log):
        replay.take(events)


def _audit(log: StoredLog) -> None:
    audit = Audit(Core.standard(), log.configuration)
    for events in _events(log):
        audit.take_frame(events)
    audit.finish()
    if not audit.is_sound:
        message = f"{log.path} is not sound: {audit.violations[:1] or audit.divergences[:1] or audit.unfoldable}"
        raise RuntimeError(message)


def cases(*, full: bool) -> Cases:
    """The mixes, and several processes, with a quarter of the steps in the short form."""
    num_steps, num_rounds = (6_000, 5) if full else (2_000, 3)
    return {
        **{
            name: partial(_measure, mix, mix.num_steps if full else mix.num_steps // 4, num_rounds)
            for name, mix in MIXES.items()
        },
        f"processes: {_NUM_LOGS} logs": partial(_measure_processes, num_steps, num_rounds),
    }
