"""What a connector adds to the real scheduler: `schedule()` and `update_from_output()`, under loads of servers.

Every contender is given the same requests in the same process; steps are taken in turns, so that whatever else the
machine does hits all of them. The clock is the thread's own CPU time, so that other processes cost nobody anything.

Measures: the scheduler's side of the hooks, with the event log written to disk at durability `os`.
Does not measure: copies, the model, the worker's side of the hooks, what a slow disk makes a step wait.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from benchmarks.figures import Cases, Figure, compared, percentile_99
from benchmarks.served import BLOCK_SIZE, NOBODY, NOTHING, Load, Server, log_bytes, ours, peers

STEPS_PER_TURN = 10
"""Turns are short against the machine's moods and long against the first steps' cold caches."""

SHORT: Mapping[str, Load] = {
    "256 decoding": Load(),
    "1,024 requests, 2 arrivals and ends a step": Load(num_requests=1024, num_output_tokens=(512, 512)),
    "256 requests, a preemption storm": Load(
        num_waiting=64,
        num_prompt_tokens=(16, 32),
        num_output_tokens=(300, 500),
        num_blocks=2500,
        num_steps_before=300,
    ),
    "256 requests, 3 drafts each": Load(num_drafts=3),
}
FULL: Mapping[str, Load] = {
    **SHORT,
    "256 requests, 2 arrivals and ends a step": Load(num_output_tokens=(128, 128)),
    "1,024 decoding": Load(num_requests=1024),
    "256 requests, 2 long prompts among them": Load(num_long_prompts=2, max_num_batched_tokens=2048),
    "256 requests, 3 drafts each, 2 arrivals and ends a step": Load(num_drafts=3, num_output_tokens=(320, 320)),
    "256 decoding at 1k tokens": Load(num_prompt_tokens=(1024, 1279), max_num_batched_tokens=1 << 20),
    "256 decoding at 8k tokens": Load(num_prompt_tokens=(8192, 8447), max_num_batched_tokens=1 << 22),
    "64 decoding at 64k tokens": Load(
        num_requests=64, num_prompt_tokens=(65536, 65791), max_num_batched_tokens=1 << 23
    ),
}


@attrs.define
class Turns:
    """What a contender took, a mean over the steps of each turn, in microseconds."""

    schedule_us: list[float] = attrs.field(factory=list)
    update_us: list[float] = attrs.field(factory=list)
    steps_us: list[float] = attrs.field(factory=list)
    """Both together, of each step."""
    log_bytes: float = 0.0
    """A step."""
    preemptions: float = 0.0
    """A step."""

    @property
    def both_us(self) -> list[float]:
        """`schedule()` and `update_from_output()` together."""
        return [sum(both) for both in zip(self.schedule_us, self.update_us, strict=True)]


def take_turns(
    load: Load, contenders: Callable[[Path], Mapping[str, Mapping[str, Any] | None]], num_steps: int
) -> dict[str, Turns]:
    """Step a server with each connector, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        servers: dict[str, Server] = {}
        logs = {name: Path(folder) / str(number) for number, name in enumerate(contenders(Path(folder)))}
        for name, log_dir in logs.items():
            servers[name] = Server(load, contenders(log_dir)[name], num_steps=num_steps)
            servers[name].warm_up()
        turns = {name: Turns() for name in servers}
        before = {name: log_bytes(log_dir) for name, log_dir in logs.items()}
        names = list(servers)
        gc.collect()
        gc.freeze()  # as EngineCore does, so that nobody pays for another's heap
        for turn in range(num_steps // STEPS_PER_TURN):
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                _take_turn(servers[name], turns[name])
        gc.unfreeze()
        for name, server in servers.items():
            turns[name].log_bytes = (log_bytes(logs[name]) - before[name]) / num_steps
            turns[name].preemptions = server.num_preemptions / num_steps
            server.scheduler.shutdown()
        return turns


def _take_turn(server: Server, turns: Turns) -> None:
    for _ in range(STEPS_PER_TURN):
        server.step()
    schedule_ns, update_ns = server.schedule_ns[-STEPS_PER_TURN:], server.update_ns[-STEPS_PER_TURN:]
    turns.schedule_us.append(statistics.mean(schedule_ns) / 1000)
    turns.update_us.append(statistics.mean(update_ns) / 1000)
    turns.steps_us += [sum(both) / 1000 for both in zip(schedule_ns, update_ns, strict=True)]


def measure(load: Load, num_steps: int, host_pages: int | None = None) -> Sequence[Figure]:
    """Compare all connectors under a load.

    Args:
        load: what is asked of each.
        num_steps: steps that are measured.
        host_pages: size of the host pool. None: twice the blocks on the device.
    """
    num_pages = load.pool(num_steps) * 2 if host_pages is None else host_pages

    def contenders(log_dir: Path) -> dict[str, Mapping[str, Any] | None]:
        return {
            NOBODY: None,
            "a connector that does nothing": NOTHING,
            "KVLedgerConnector": ours(num_pages, log_dir=str(log_dir)),
            f"KVLedgerConnector, chunk {BLOCK_SIZE}": ours(num_pages, log_dir=str(log_dir), chunk_size=BLOCK_SIZE),
            **peers(num_pages),
        }

    turns = take_turns(load, contenders, num_steps)
    figures = [
        *compared("schedule()", "µs", {name: each.schedule_us for name, each in turns.items()}, anchor=NOBODY),
        *compared("update_from_output()", "µs", {name: each.update_us for name, each in turns.items()}, anchor=NOBODY),
        *compared(
            "99th percentile of a step",
            "µs",
            {name: [percentile_99(each.steps_us)] for name, each in turns.items()},
            anchor=NOBODY,
        ),
    ]
    for name, each in turns.items():
        figures.append(Figure("longest step", name, max(each.steps_us), "µs"))
        if any(turn.preemptions for turn in turns.values()):
            figures.append(Figure("preemptions a step", name, each.preemptions, ""))
        if each.log_bytes:
            figures.append(Figure("log a step", name, each.log_bytes, "B"))
    return figures


def cases(*, full: bool) -> Cases:
    """Four, or all of them."""
    return {
        name: partial(measure, load, 100 if load.num_requests > 256 else 200)
        for name, load in (FULL if full else SHORT).items()
    }
