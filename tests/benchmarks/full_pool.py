"""What the scheduler's thread pays when the host pool is full and each save must evict.

Prompts: one request after another, each with a prompt of its own. The host pool holds one and a quarter of such
prompts. The whole prompt is computed in one step, so one save has all of its chunks. The longest single hook and the
longest step while a prompt is served are measured in CPU time of the thread. The calls in the hook that makes most of
them are counted in further prompts. The same code makes the same calls on every machine.

Documents: many at a time, each of its own. The host pool holds half of those that are served at once.

Does not measure: copies, the model, the worker's side of the hooks.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import attrs
from benchmarks import scheduler_overhead
from benchmarks.figures import Cases, Figure, compared, with_ratios
from benchmarks.hook_watch import HookWatch
from benchmarks.served import BLOCK_SIZE, NOBODY, Load, MakeTransfer, Server, connectors, log_bytes

NUM_PROMPTS = 5
"""Prompts that are measured; as many turns."""
NUM_PROMPTS_BEFORE = 3
"""Prompts until the host pool is full and evicts."""
NUM_PROMPTS_COUNTED = 2
CALLS = "calls in the longest hook"
PEER = "SimpleCPUOffloadConnector"
DOCUMENTS = Load(num_requests=64, num_prompt_tokens=(4096, 8191), num_output_tokens=(32, 96), num_steps_before=100)
NUM_DOCUMENT_PAGES = DOCUMENTS.num_requests // 2 * 6144 // BLOCK_SIZE
"""Pages of a host pool that holds half of the documents."""


@attrs.define
class _Contender:
    server: Server
    log_dir: Path
    hooks: HookWatch
    longest_hooks_ms: list[float] = attrs.field(factory=list)
    longest_steps_ms: list[float] = attrs.field(factory=list)

    def serve_prompt(self) -> None:
        """Step until the next request has arrived, and note the longest hook and step."""
        server = self.server
        self.hooks.clear()
        num_steps, num_arrived = len(server.schedule_ns), server.num_arrived
        while server.num_arrived == num_arrived:
            server.step()
        steps_ns = map(sum, zip(server.schedule_ns[num_steps:], server.update_ns[num_steps:], strict=True))
        self.longest_hooks_ms.append(self.hooks.longest_ns / 1e6)
        self.longest_steps_ms.append(max(steps_ns) / 1e6)

    def count_calls(self) -> int:
        """Serve further prompts, and return the calls in the hook that made the most of them."""
        self.hooks.counts_calls = True
        num_calls = 0
        for _ in range(NUM_PROMPTS_COUNTED):
            self.serve_prompt()
            num_calls = max(num_calls, self.hooks.most_calls)
        return num_calls


def measure(num_prompt_tokens: int) -> Sequence[Figure]:
    """Compare all connectors with prompts of so many tokens."""
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
            for number, (name, make) in enumerate(connectors(host_pages).items())
        }
        for each in contenders.values():
            for _ in range(NUM_PROMPTS_BEFORE):
                each.serve_prompt()
            each.longest_hooks_ms.clear()
            each.longest_steps_ms.clear()
        before = {name: (log_bytes(each.log_dir), each.server.num_steps) for name, each in contenders.items()}
        gc.collect()
        gc.freeze()  # as EngineCore does, so that nobody pays for another's heap
        names = list(contenders)
        for turn in range(NUM_PROMPTS):
            for place in range(len(names)):
                contenders[names[(turn + place) % len(names)]].serve_prompt()
        gc.unfreeze()
        steps = {name: each.longest_steps_ms for name, each in contenders.items()}
        hooks = {name: each.longest_hooks_ms for name, each in contenders.items() if name != NOBODY}
        figures = compared("longest step", "ms", steps, anchor=NOBODY)
        figures += with_ratios("longest hook", "ms", hooks, anchor=PEER)
        for name, each in contenders.items():
            num_bytes = log_bytes(each.log_dir) - before[name][0]
            num_steps = each.server.num_steps - before[name][1]
            if num_bytes:
                figures.append(Figure("log a step", name, num_bytes / num_steps, "B"))
        gc.disable()  # a collection would be counted where it happens to run
        figures += [Figure(CALLS, name, contenders[name].count_calls(), "") for name in hooks]
        gc.enable()
        for each in contenders.values():
            each.server.scheduler.shutdown()
        return figures


def _contender(load: Load, log_dir: Path, make: MakeTransfer) -> _Contender:
    server = Server(load, make(log_dir), num_steps=0)
    return _Contender(server, log_dir, HookWatch(server.scheduler.connector))


def cases(*, full: bool) -> Cases:
    """Prompts of three lengths, or of four; k is 1,000 tokens. Documents."""
    lengths = (8, 30, 60, 120) if full else (8, 60, 120)
    prompts = {f"prompts of {length}k tokens, a full host pool": partial(measure, length * 1000) for length in lengths}
    documents = partial(scheduler_overhead.measure, DOCUMENTS, 200, NUM_DOCUMENT_PAGES)
    return {**prompts, "64 documents of 4k to 8k tokens, a full host pool": documents}
