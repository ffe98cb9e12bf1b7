"""How fast a log of a gigabyte answers: `python tests/benchmarks/large_log.py --bytes 1e9 --directory DIR`.

The log is made by a ledger and a small scheduler (no vLLM): requests with prompts of some thousand tokens, shared
beginnings, preemptions, evictions, polls. It is made once and kept in DIR; each command then runs in a process of its
own, as a person would run it: the first one builds the index.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import attrs

from kvledger.lifecycle import Core, Ledger, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import vocabulary_header
from kvledger.storage.events import SegmentEventStore

BLOCK_SIZE = 16
CHUNK_SIZE = 256
NUM_BLOCKS = 9_000
NUM_SLOTS = 40_000
MAX_RUNNING = 64
STEP_NS = 20_000_000


@attrs.define
class Client:
    """A request as the scheduler knows it."""

    request_id: str
    ordinal: int
    prompt: int
    num_tokens: int
    target: int
    prefix: str
    computed: int = 0
    blocks: list[int] = attrs.field(factory=list)
    is_steady: bool = False
    num_keys: int = 0
    settled: int = 0


class Load:
    """Endless requests against one ledger; `step` plays one step of the engine."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.random = random.Random(1)
        self.free = list(range(1, NUM_BLOCKS))
        self.waiting: deque[Client] = deque()
        self.running: list[Client] = []
        self.reports: list[e.Event] = []
        self.num_steps = self.num_clients = 0
        self.preempted: list[str] = []

    @property
    def now(self) -> int:
        """Nanoseconds since the log was opened."""
        return self.num_steps * STEP_NS

    def observe(self, event: e.Event) -> list[e.Event]:
        """Record an observation; jobs are reported in the next step."""
        decisions = self.ledger.observe(event)
        for job in decisions:
            if isinstance(job, e.LoadIssued | e.SaveIssued | e.TailSaveIssued):
                num_bytes = len(job.slots) << 16
                duration_ns = num_bytes // 10
                report = e.TransferReported(
                    job.job_id, (0,), (), False, num_bytes, duration_ns, "", "", self.now + STEP_NS
                )
                self.reports.append(report)
        return decisions

    def step(self) -> None:
        """One step: reports, arrivals, admissions, preemptions, progress, ends."""
        self.num_steps += 1
        reports, self.reports = self.reports, []
        for report in reports:
            self.observe(report)
        while len(self.waiting) < 4:
            self.waiting.append(self._arrive())
        advanced: list[tuple[int, int, int, int]] = []
        extended: list[tuple[int, tuple[int, ...]]] = []
        settled: list[tuple[int, int, int]] = []
        paused: list[int] = []
        for client in list(self.running):
            if client in self.running:
                self._decode(client, advanced, extended, settled)
        self._admit(advanced)
        num_scheduled = len(self.running) + sum(scheduled - 1 for _, _, scheduled, _ in advanced)
        self.observe(
            e.StepScheduled(
                self.num_steps, num_scheduled, tuple(advanced), tuple(paused), tuple(extended), tuple(settled), self.now
            )
        )
        for client in list(self.running):
            if client.num_tokens >= client.target:
                self.running.remove(client)
                self.free += client.blocks
                tokens = client.num_tokens
                self.observe(
                    e.RequestFinished(client.request_id, "FINISHED_STOPPED", client.computed, tokens, self.now)
                )
        self.ledger.commit()

    def _arrive(self) -> Client:
        number = self.num_clients
        self.num_clients += 1
        prompt = self.random.randint(300, 4000)
        name = hashlib.blake2b(str(number).encode(), digest_size=4).hexdigest()
        client = Client(
            f"cmpl-{name}-{number}",
            number,
            prompt,
            prompt,
            prompt + self.random.randint(50, 800),
            f"system-{self.random.randint(0, 40)}" if self.random.random() < 0.4 else name,
        )
        self.observe(e.RequestArrived(client.request_id, number, prompt, self.now))
        self._tell_keys(client)
        return client

    def _tell_keys(self, client: Client) -> None:
        first, end = client.num_keys, client.num_tokens // CHUNK_SIZE
        if end > first:
            keys = tuple(
                hashlib.blake2b(
                    f"{client.prefix if c < 4 else client.request_id}/{c}".encode(), digest_size=16
                ).digest()
                for c in range(first, end)
            )
            self.observe(e.ChunkKeysObserved(client.request_id, first, keys))
            client.num_keys = end

    def _admit(self, advanced: list[tuple[int, int, int, int]]) -> None:
        while self.waiting and len(self.running) < MAX_RUNNING:
            client = self.waiting[0]
            (answer,) = self.observe(e.LookupRequested(client.request_id, 0, client.num_tokens, self.now))
            num_blocks = -(-(client.num_tokens + 1) // BLOCK_SIZE)
            if num_blocks > len(self.free):
                return
            self.waiting.popleft()
            client.blocks = [self.free.pop() for _ in range(num_blocks)]
            external = answer.num_external_tokens if isinstance(answer, e.LookupAnswered) else 0
            self.observe(e.BlocksAllocated(client.request_id, tuple(client.blocks), external, self.now))
            client.computed = external
            advanced.append((client.ordinal, external, client.num_tokens - external, client.num_tokens))
            client.computed, client.settled, client.is_steady = client.num_tokens, 0, False
            client.num_tokens += 1
            self.running.append(client)

    def _decode(
        self,
        client: Client,
        advanced: list[tuple[int, int, int, int]],
        extended: list[tuple[int, tuple[int, ...]]],
        settled: list[tuple[int, int, int]],
    ) -> None:
        if client.computed + 1 > len(client.blocks) * BLOCK_SIZE:
            while not self.free:
                self._preempt(self.running[-1])
            if client not in self.running:
                return
            block = self.free.pop()
            client.blocks.append(block)
            extended.append((client.ordinal, (block,)))
        if client.computed // CHUNK_SIZE > client.settled:
            settled.append((client.ordinal, client.settled, client.computed))
            client.settled = client.computed // CHUNK_SIZE
        if not client.is_steady:
            advanced.append((client.ordinal, client.computed, 1, client.num_tokens))
            client.is_steady = True
        client.computed += 1
        client.num_tokens += 1
        self._tell_keys(client)

    def _preempt(self, victim: Client) -> None:
        self.running.remove(victim)
        self.free += victim.blocks
        victim.blocks = []
        self.observe(e.RequestPreempted(victim.request_id, victim.computed, victim.num_tokens, self.now))
        self.preempted.append(victim.request_id)
        victim.is_steady = False
        self.waiting.appendleft(victim)


def _key(name: str, chunk: int) -> bytes:
    return hashlib.blake2b(f"{name}/{chunk}".encode(), digest_size=16).digest()


def make_log(directory: Path, num_bytes: int) -> str:
    """Write a log of at least that size; returns the id of a request that was preempted in its middle."""
    configuration = LedgerConfiguration(block_size=BLOCK_SIZE, chunk_size=CHUNK_SIZE, num_slots=NUM_SLOTS)
    header = {
        **vocabulary_header(Core.standard()),
        "configuration": attrs.asdict(configuration),
        "kvledger_version": "0.1.0",
        "vllm_version": "none",
        "opened_at_unix_ns": time.time_ns(),
    }
    store = SegmentEventStore.create(directory, header)
    load = Load(Ledger(Core.standard(), configuration, store))
    written = 0
    while written < num_bytes:
        for _ in range(20_000):
            load.step()
        written = sum(file.stat().st_size for file in directory.iterdir())
        print(f"\r{written / 1e6:7.1f} MB, {load.ledger.next_sequence:,} events", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    store.close()
    return load.preempted[len(load.preempted) // 2]


def commands(log: Path, request_id: str) -> Iterator[list[str]]:
    """What is timed, in order."""
    yield ["show", str(log)]
    yield ["show", str(log)]
    yield ["show", str(log), request_id]
    yield ["why", str(log), request_id]
    yield ["show", str(log), request_id[:-3]]


def main() -> None:
    """Make the log if it is not there, and time the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    log, note = arguments.directory / "log", arguments.directory / "request"
    if not note.exists():
        shutil.rmtree(log, ignore_errors=True)
        note.write_text(make_log(log, int(arguments.bytes)))
    request_id = note.read_text()
    cache = arguments.directory / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    for command in commands(log, request_id):
        started, before = time.perf_counter(), os.times()
        finished = subprocess.run(
            [sys.executable, "-m", "kvledger.adapters.cli.main", *command],
            stdout=subprocess.PIPE,
            env=environment,
            check=False,
        )
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        seconds = time.perf_counter() - started
        lines = len(finished.stdout.splitlines())
        print(f"{' '.join(command):60} exit {finished.returncode}, {lines} lines, {seconds:.2f} s ({cpu:.2f} s of CPU)")


if __name__ == "__main__":
    main()
