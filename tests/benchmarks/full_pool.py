"""What a prompt costs the scheduler's thread when the host pool is full and each save must evict.

One request after another with a prompt of its own is served. The host pool holds one and a quarter of such prompts.
The whole prompt is computed in one step, so one save has all of its chunks.

Measures: the longest single hook and the longest step while a prompt is served, in CPU time of the thread, and the log.
Does not measure: copies, the model, the worker's side of the hooks.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import attrs
from benchmarks.figures import Cases, Figure, compared
from benchmarks.served import BLOCK_SIZE, Load, Server, ours, peers

NUM_PROMPTS = 5
"""Prompts that are measured; as many turns."""
NUM_PROMPTS_BEFORE = 3
"""Prompts until the host pool is full and evicts."""
NOBODY = "no connector"
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
)


@attrs.define
class _Contender:
    server: Server
    log_dir: Path
    hooks_ns: list[int] = attrs.field(factory=list)
    """Duration of each hook since the last prompt, in nanoseconds."""
    longest_hooks_ms: list[float] = attrs.field(factory=list)
    longest_steps_ms: list[float] = attrs.field(factory=list)

    def time_hooks(self) -> None:
        """Time every hook that the scheduler calls."""
        connector = self.server.scheduler.connector
        for name in HOOKS if connector is not None else ():
            if hasattr(connector, name):
                setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.thread_time_ns()
            try:
                return hook(*arguments, **named)
            finally:
                self.hooks_ns.append(time.thread_time_ns() - started)

        return timed

    def serve_prompt(self) -> None:
        """Step until the next request has arrived, and note the longest hook and step."""
        server = self.server
        self.hooks_ns.clear()
        num_steps, num_arrived = len(server.schedule_ns), server.num_arrived
        while server.num_arrived == num_arrived:
            server.step()
        steps_ns = map(sum, zip(server.schedule_ns[num_steps:], server.update_ns[num_steps:], strict=True))
        self.longest_hooks_ms.append(max(self.hooks_ns, default=0) / 1e6)
        self.longest_steps_ms.append(max(steps_ns) / 1e6)

    @property
    def log_bytes(self) -> int:
        """What is in its log so far."""
        return sum(path.stat().st_size for path in self.log_dir.rglob("*.kvlog"))


def _measure(num_prompt_tokens: int) -> Sequence[Figure]:
    load = Load(
        num_requests=1,
        num_prompt_tokens=(num_prompt_tokens, num_prompt_tokens),
        num_output_tokens=(8, 8),
        max_num_batched_tokens=num_prompt_tokens + BLOCK_SIZE,
    )
    host_pages = num_prompt_tokens // BLOCK_SIZE * 5 // 4
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            name: _contender(load, Path(folder) / str(number), make)
            for number, (name, make) in enumerate(_transfers(host_pages).items())
        }
        for each in contenders.values():
            for _ in range(NUM_PROMPTS_BEFORE):
                each.serve_prompt()
            each.longest_hooks_ms.clear()
            each.longest_steps_ms.clear()
        before = {name: (each.log_bytes, each.server.num_steps) for name, each in contenders.items()}
        gc.collect()
        gc.freeze()  # as EngineCore does, so that nobody pays for another's heap
        names = list(contenders)
        for turn in range(NUM_PROMPTS):
            for place in range(len(names)):
                contenders[names[(turn + place) % len(names)]].serve_prompt()
        gc.unfreeze()
        steps = {name: each.longest_steps_ms for name, each in contenders.items()}
        figures = compared("longest step", "ms", steps, anchor=NOBODY)
        for name, each in contenders.items():
            if name != NOBODY:
                figures.append(Figure("longest hook", name, statistics.median(each.longest_hooks_ms), "ms"))
            log_bytes = each.log_bytes - before[name][0]
            num_steps = each.server.num_steps - before[name][1]
            if log_bytes:
                figures.append(Figure("log a step", name, log_bytes / num_steps, "B"))
            each.server.scheduler.shutdown()
        return figures


def _transfers(host_pages: int) -> Mapping[str, Callable[[Path], Mapping[str, Any] | None]]:
    def kvledger(chunk_size: int) -> Callable[[Path], Mapping[str, Any]]:
        return lambda log_dir: ours(host_pages, log_dir=str(log_dir), chunk_size=chunk_size)

    return {
        NOBODY: lambda _: None,
        "KVLedgerConnector, chunk 256": kvledger(256),
        f"KVLedgerConnector, chunk {BLOCK_SIZE}": kvledger(BLOCK_SIZE),
        **{name: partial(_given, transfer) for name, transfer in peers(host_pages).items()},
    }


def _given(transfer: Mapping[str, Any], _log_dir: Path) -> Mapping[str, Any]:
    return transfer


def _contender(load: Load, log_dir: Path, make: Callable[[Path], Mapping[str, Any] | None]) -> _Contender:
    contender = _Contender(Server(load, make(log_dir), num_steps=0), log_dir)
    contender.time_hooks()
    return contender


def cases(*, full: bool) -> Cases:
    """Two lengths, or four."""
    lengths = (8, 32, 64, 120) if full else (8, 120)
    return {f"prompts of {length}k tokens, a full host pool": partial(_measure, length * 1024) for length in lengths}
