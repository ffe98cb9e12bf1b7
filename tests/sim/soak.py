"""`make soak`: one engine serves tens of thousands of short requests and must not remember any of them.

Requests share beginnings, are preempted and aborted. After each tenth memory is measured; over the second half, when
every bounded store is full, it may not grow. At the end every container that belongs to requests must be empty.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
from lifecycle_driver.invariants import num_entries
from rich.console import Console
from rich.progress import Progress

from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.lab.simulation.expected import Expected
from kvledger.adapters.lab.simulation.hashed_model import BLOCK_SIZE, block_bytes
from kvledger.adapters.lab.simulation.tiny_model import VOCABULARY_SIZE
from kvledger.adapters.vllm import KVLedgerConnector
from sim.checks.nothing_left import check_slots, left_entries
from sim.clock import VirtualClock

MAX_GROWTH_BYTES = 4 * 1024**2
"""Of resident memory, over the second half."""

MAX_GROWTH_ALLOCATIONS = 0.2
"""Of small Python allocations a request, over the second half: one object kept for every fifth request is seen."""


@attrs.frozen
class Sample:
    """Memory after so many requests."""

    num_requests: int
    resident_bytes: int
    num_allocations: int


class Soak:
    """The engine, and who is alive in it."""

    def __init__(self, num_requests: int, seed: int = 0) -> None:
        """Start the engine, on a clock of its own."""
        self.num_requests = num_requests
        self.num_aborted = 0
        self.num_steps = 0
        self.samples: list[Sample] = []
        self._alive: dict[str, tuple[Expected, int, bool]] = {}
        self._rng = random.Random(seed)
        self._prefixes = [self._tokens(40) for _ in range(8)]
        self._clock = VirtualClock(random.Random(seed))
        with self._clock.read_by(KVLedgerConnector):
            self.engine = SimulatedEngine(
                num_blocks=14,
                max_num_seqs=8,
                max_num_batched_tokens=64,
                max_model_len=96,
                async_scheduling=True,
                chunk_size=8,
                host_bytes=block_bytes(BLOCK_SIZE) * 64,
                memory_log_bytes=256 * 1024,
            )

    def run(self, advance: Callable[[int], None] = lambda _num_requests: None) -> None:
        """Serve everybody; raises `AssertionError` for a wrong answer."""
        for number in range(self.num_requests):
            while len(self._alive) >= 10:
                self._step()
            self._arrive(f"r{number}")
            self._step()
            if (number + 1) % max(1, self.num_requests // 10) == 0:
                self._sample(number + 1)
            advance(1)
        while self.engine.scheduler.has_requests() or self.engine.is_computing:
            self._step()

    def check(self) -> None:
        """Nothing is left of anybody, memory is flat."""
        side = self.engine.connector.scheduler_side
        figures = side.journal.totals.figures
        assert not any(num_entries(side.ledger.projections).values()), num_entries(side.ledger.projections)
        left = left_entries(side, self.engine.worker)
        assert not left, f"left behind: {left}"
        check_slots(side.ledger.projections)
        assert not figures.num_violations, f"{figures.num_violations} rules broken"
        assert figures.num_preemptions > self.num_requests / 50, "nobody was preempted: this soaks nothing"

    def growth(self) -> tuple[int, float]:
        """Over the second half: resident bytes, and allocations a request."""
        middle, last = self.samples[len(self.samples) // 2 - 1], self.samples[-1]
        num_requests = last.num_requests - middle.num_requests
        num_allocations = last.num_allocations - middle.num_allocations
        return last.resident_bytes - middle.resident_bytes, num_allocations / num_requests

    def check_memory(self) -> None:
        """Only worth asking after thousands of requests, when bounded stores are full."""
        num_bytes, num_allocations = self.growth()
        assert num_bytes <= MAX_GROWTH_BYTES, f"resident memory grew by {num_bytes} bytes over the second half"
        assert num_allocations <= MAX_GROWTH_ALLOCATIONS, f"{num_allocations:.2f} allocations a request are kept"

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY_SIZE) for _ in range(count)]

    def _arrive(self, request_id: str) -> None:
        prompt = self._rng.choice(self._prefixes)[: self._rng.randrange(40)] + self._tokens(self._rng.randint(1, 8))
        max_tokens = self._rng.randint(1, 24)
        self._alive[request_id] = (Expected(prompt), max_tokens, False)
        self.engine.add(request_id, prompt, max_tokens, arrival_time=self._clock() / 1e9)

    def _step(self) -> None:
        self._clock.pass_step()
        self.num_steps += 1
        if self._alive and self._rng.random() < 0.02:
            request_id = self._rng.choice(list(self._alive))
            truth, max_tokens, _ = self._alive[request_id]
            self._alive[request_id] = (truth, max_tokens, True)
            self.num_aborted += 1
            self.engine.abort(request_id)
        if self.engine.scheduler.has_requests():
            self.engine.step()
        else:
            self.engine.update()
        requests = self.engine.scheduler.requests
        for request_id in [request_id for request_id in self._alive if request_id not in requests]:
            truth, max_tokens, is_aborted = self._alive.pop(request_id)
            outputs = self.engine.outputs.pop(request_id)
            self.engine.finish_reasons.pop(request_id, None)
            assert outputs == truth.output(len(outputs)), f"{request_id} got other tokens than its prompt leads to"
            assert is_aborted or len(outputs) == max_tokens, f"{request_id} got {len(outputs)} of {max_tokens} tokens"

    def _sample(self, num_requests: int) -> None:
        gc.collect()
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident_bytes = resident_pages * resource.getpagesize()
        self.samples.append(Sample(num_requests, resident_bytes, sys.getallocatedblocks()))


def main() -> int:
    """Exit code 0 where nothing is left and memory is flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    console = Console()
    started = time.monotonic()
    soak = Soak(arguments.requests, arguments.seed)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=arguments.requests)
        soak.run(lambda count: progress.update(task, advance=count))
    for sample in soak.samples:
        memory = f"{sample.resident_bytes / 1e6:8.1f} MB {sample.num_allocations:10,d} allocations"
        console.print(f"{sample.num_requests:8,d} requests {memory}")
    figures = soak.engine.connector.scheduler_side.journal.totals.figures
    num_bytes, num_allocations = soak.growth()
    console.print(f"{soak.num_steps:,d} steps in {(time.monotonic() - started) / 60:.1f} minutes")
    console.print(f"{figures.num_preemptions:,d} preemptions, {soak.num_aborted:,d} aborts")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    console.print(f"peak {peak / 1e6:.1f} MB; over the second half {num_bytes / 1e6:+.2f} MB, ")
    console.print(f"{num_allocations:+.3f} allocations a request")
    try:
        soak.check()
        soak.check_memory()
    except AssertionError as trouble:
        console.print(str(trouble), style="red")
        return 1
    console.print("nothing is left of anybody")
    return 0


if __name__ == "__main__":
    sys.exit(main())
