"""Breadth-first search of the real reducer: two requests, few events, every state once.

A state is reached by its path of moves, played on a fresh ledger; states with equal canonical snapshots are one.
The scheduler's side is read from the ledger itself (who holds blocks, how much is computed), so nothing outside
the snapshot decides which moves exist.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvledger.lifecycle import RequestState as S
from lifecycle_driver.driver import Driver, keys_of
from lifecycle_driver.invariants import check_invariants

PROMPT = 33
"""Tokens of each prompt: two blocks of 16 and the token that must be computed."""
BLOCKS = {"a": (1, 2, 3), "b": (4, 5, 6)}
Move = tuple[str, ...]


class Search:
    """`run` explores up to `max_states` states."""

    def __init__(self, *, chunk_size: int, block_size: int, max_states: int) -> None:
        self._chunk_size = chunk_size
        self._block_size = block_size
        self._max_states = max_states
        self.states: dict[str, tuple[str, ...]] = {}
        self.num_edges = 0
        self.num_recovering = 0
        self.broken: list[str] = []
        self.stuck: list[str] = []

    def run(self) -> None:
        """Explore; what is wrong is collected, with the path that leads there."""
        waiting: deque[tuple[Move, ...]] = deque([()])
        self._arrive_at(self._play(()))
        while waiting and len(self.states) < self._max_states:
            path = waiting.popleft()
            played: Driver | None = self._play(path)
            for move in list(moves(played)):
                self.num_edges += 1
                longer = (*path, move)
                driver, played = played or self._play(path), None
                try:
                    play(driver, move)
                    check_invariants(driver.projections)
                except Exception as error:  # noqa: BLE001 -- collected with the path that led to it
                    self.broken.append(f"{longer}: {error!r}")
                    continue
                if self._arrive_at(driver):
                    waiting.append(longer)
                    self._check_recovery(longer, [name for name in BLOCKS if driver.state(name) is S.RECOVERING])

    def _play(self, path: tuple[Move, ...]) -> Driver:
        # Three slots for four pages: somebody has to make room.
        driver = Driver(chunk_size=self._chunk_size, block_size=self._block_size, num_slots=3, max_silent_steps=1000)
        for move in path:
            play(driver, move)
        return driver

    def _arrive_at(self, driver: Driver) -> bool:
        key = canonical(driver)
        if key in self.states:
            return False
        self.states[key] = tuple(record.state.value for record in driver.projections.tracker)
        return True

    def _check_recovery(self, path: tuple[Move, ...], recovering: Sequence[str]) -> None:
        for name in recovering:
            driver = self._play(path)
            self.num_recovering += 1
            driver.settle_all()
            if driver.state(name) in {S.RECOVERING, S.CHUNKED_PREFILL}:
                play(driver, ("compute", name))
            if driver.state(name) is not S.RUNNING:
                self.stuck.append(f"{path}: {name} is {driver.state(name)}")
            driver = self._play(path)
            play(driver, ("finish", name))
            driver.settle_all()
            if driver.state(name) is not None:
                self.stuck.append(f"{path}: {name} is not released")


def _said(answer: Any) -> tuple[int, int, int, bool] | None:
    if answer is None:
        return None
    return answer.num_computed_tokens, answer.num_tokens, answer.num_external_tokens, answer.is_async


def canonical(driver: Driver) -> str:
    """The state without what only counts: sequence numbers, steps; jobs by their order."""
    its = driver.projections
    tracker, lookups, chunks = its.tracker, its.lookup_cache.state, its.pool

    def named(of_lives: Mapping[int, Any]) -> dict[str, Any]:
        return {tracker.of(ordinal).request_id: value for ordinal, value in of_lives.items()}

    parts = {
        "requests": {
            record.request_id: {
                **msgspec.structs.asdict(record),
                **dict.fromkeys(("ordinal", "num_preemptions", "state_since_ns"), 0),
                "num_computed_tokens": tracker.num_computed_tokens(record),
                "generation": min(record.generation, 2),
                "num_failed_loads": min(record.num_failed_loads, 3),
                "num_tokens_before_preemption": 0,
                "block_ids": list(record.block_ids or ()),
                "tail": record.tail is not None,
                "answer": _said(record.answer),
                "claimed": _said(record.claimed),
                **dict.fromkeys(_PASSING, 0),
            }
            for record in tracker
        },
        "unfilled": sorted(tracker.unfilled.blocks),
        "hits": {name: hit.num_chunks for name, hit in named(lookups.hits).items()},
        "committed": [[key.hex(), slots] for key, slots in chunks.state.committed.items()],
        "by_age": list(chunks.state.by_age),
        "wanted": {name: len(keys) for name, keys in chunks.wanted.items()},
        "pinned": {name: len(keys) for name, keys in chunks.promised.items()},
        "departed": {key.hex(): gone.reason for key, gone in chunks.state.departed.items()},
        "slots": sorted(chunks.slots.state.references.items()),
        "jobs": [
            {**msgspec.structs.asdict(job), **dict.fromkeys(_COUNTING, 0), "generation": min(job.generation, 2)}
            for job in its.jobs
        ],
    }
    return json.dumps(parts, sort_keys=False, default=_plain)


_PASSING = (*("lost_block_ids", "window_freed_at", "window_freed_before_step", "num_local_tokens", "answered_at"),)
_COUNTING = ("job_id", "ordinal", "epoch", "asked_step", "asked_ns")


def _plain(value: Any) -> object:
    return value.hex() if isinstance(value, bytes) else list(value)


def moves(driver: Driver) -> Iterator[Move]:  # noqa: C901 -- a list of cases, one after the other
    """What a scheduler and its workers could do next."""
    for name in BLOCKS:
        state = driver.state(name)
        if state is None:
            yield "arrive", name
            continue
        if state is S.FINISHED:
            continue
        record = driver.record(name)
        computed = driver.projections.tracker.num_computed_tokens(record)
        has_blocks = bool(driver.record(name).block_ids)
        if not has_blocks:
            yield "lookup", name
            pending = driver.record(name).answer
            if pending is not None:
                yield "allocate", name, "0"
                if pending.num_external_tokens:
                    yield "allocate", name, str(pending.num_external_tokens)
                    yield "allocate", name, "5"
        elif computed < PROMPT:
            yield "compute", name
            if computed < part_of(driver):
                yield "compute_part", name
        if has_blocks and computed:
            yield "settle", name
            yield "preempt", name
        yield "finish", name
    for job in driver.projections.jobs:
        yield "done", str(job.job_id)
        yield "failed", str(job.job_id)


def part_of(driver: Driver) -> int:
    """Tokens of the first part of a prefill: it ends inside a block where chunks do."""
    return 24 if driver.configuration.chunk_size == 8 else 16


def play(driver: Driver, move: Move) -> None:
    """Make one move; the first element is its name, the second a request or a job."""
    _MOVES[move[0]](driver, *move[1:])


def _arrive(driver: Driver, name: str) -> None:
    chunk_size = driver.configuration.chunk_size
    # Both begin with the same block and go on differently.
    shared = keys_of("both", 16 // chunk_size)
    driver.arrive(name, PROMPT, (*shared, *keys_of(name, 16 // chunk_size)))


def _compute(driver: Driver, name: str, up_to: int = PROMPT) -> None:
    record = driver.record(name)
    computed = driver.projections.tracker.num_computed_tokens(record)
    taken_up = driver.record(name).claimed
    if not computed and taken_up is not None:
        loads = [load for load in driver.projections.jobs if load.kind.value == "load" and load.request_id == name]
        computed = min(taken_up.num_external_tokens, up_to - 1) if loads else 0
    driver.step((name, computed, up_to - computed, PROMPT))


def _settle(driver: Driver, name: str) -> None:
    computed = driver.projections.tracker.num_computed_tokens(driver.record(name))
    driver.step(settled=[(name, driver.record(name).num_chunks_handled, computed)])


def _preempt(driver: Driver, name: str) -> None:
    driver.preempt(name, driver.projections.tracker.num_computed_tokens(driver.record(name)))


def _finish(driver: Driver, name: str) -> None:
    computed = driver.projections.tracker.num_computed_tokens(driver.record(name))
    driver.finish(name, computed, PROMPT)


def _failed(driver: Driver, job_id: str) -> None:
    job = driver.projections.jobs.get(int(job_id))
    driver.report(int(job_id), ok=False)
    if job.kind.value == "load" and driver.record(job.request_id).block_ids:
        driver.roll_back(job.request_id, 0)


_MOVES: dict[str, Callable[..., None]] = {
    "arrive": _arrive,
    "lookup": lambda driver, name: driver.lookup(name, 0, PROMPT) and None,
    "allocate": lambda driver, name, external: driver.allocate(name, BLOCKS[name], int(external)) and None,
    "compute": _compute,
    "compute_part": lambda driver, name: _compute(driver, name, part_of(driver)),
    "settle": _settle,
    "preempt": _preempt,
    "finish": _finish,
    "done": lambda driver, job_id: driver.report(int(job_id)) and None,
    "failed": _failed,
}
