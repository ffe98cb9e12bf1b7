"""Writes a log of LMCache#2158: a lookup answers from a cache and ignores what vLLM has computed since.

    python docs/examples/cached_answer.py LOG_DIR

A state handler has the bug; everything else is kvledger. The figures are those of the issue: 336 tokens are computed,
256 of them are saved (the pool holds no more), and the request is preempted, looked up twice and given blocks. No
engine runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from kvledger.lifecycle import Core, Ledger, LedgerConfiguration, Turn, handlers, log_header
from kvledger.lifecycle import events as e
from kvledger.storage.events import LogError, SegmentEventStore

REQUEST = "cmpl-bench-16-0"
MS = 1_000_000


class CachedAnswer(handlers.Preempted):
    """Answers the first lookup correctly and every later one with the bare hit, as LMCache 0.3.10 did.

    The bug is possible because the handler remembers hits. A handler must not have a memory.
    """

    def __init__(self) -> None:
        self._hits: dict[str, int] = {}

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        """Ignore `num_computed_tokens` from the second lookup on."""
        super().lookup_requested(turn.altered(self._ignore_computed_tokens), event)

    def _ignore_computed_tokens(self, answer: e.Event) -> e.Event:
        if not isinstance(answer, e.LookupAnswered):
            return answer
        hit = self._hits.get(answer.request_id)
        self._hits[answer.request_id] = answer.num_hit_tokens
        return answer if hit is None else msgspec.structs.replace(answer, num_external_tokens=hit)


OBSERVATIONS: tuple[e.Event, ...] = (
    e.RequestArrived(REQUEST, 0, 700, 1 * MS),
    e.ChunkKeysObserved(REQUEST, 0, (bytes(16), bytes(range(16)))),
    e.LookupRequested(REQUEST, 0, 700, 2 * MS),
    e.BlocksAllocated(REQUEST, tuple(range(1, 22)), 0, 2 * MS),
    e.StepScheduled(0, 336, ((0, 0, 336, 700),), (), (), (), 3 * MS),
    e.RequestPreempted(REQUEST, 336, 700, 20 * MS),
    e.StepScheduled(1, 0, (), (), (), (), 20 * MS),
    e.TransferReported(
        (1,),
        (0,),
        (),
        is_repeated=False,
        num_bytes=(16 * 65536,),
        duration_ns=900_000,
        error="",
        withheld="",
        time_ns=31 * MS,
    ),
    e.LookupRequested(REQUEST, 336, 700, 40 * MS),
    e.LookupRequested(REQUEST, 336, 700, 52 * MS),
    e.BlocksAllocated(REQUEST, tuple(range(1, 45)), 256, 52 * MS),
    e.StepScheduled(2, 108, ((0, 592, 108, 700),), (), (), (), 53 * MS),
    e.LoadErrorsObserved(tuple(range(22, 38)), 75 * MS),
    e.TokensRolledBack(REQUEST, 336, 75 * MS),
    e.StepScheduled(3, 364, ((0, 336, 364, 700),), (), (), (), 76 * MS),
    e.RequestFinished(REQUEST, "FINISHED_STOPPED", 700, 701, 110 * MS),
)
"""The observations, as the adapter would record them. The ledger adds the decisions."""


def write_log(log_dir: Path) -> Path:
    """Record the observations in a new log, and return its directory."""
    configuration = LedgerConfiguration(block_size=16, chunk_size=256, num_slots=16)
    core = Core.standard().replacing(CachedAnswer())
    store = SegmentEventStore.create(log_dir, log_header(core, configuration))
    ledger = Ledger(core, configuration, store, checks_input=True)
    for observation in OBSERVATIONS:
        ledger.observe(observation)
        ledger.commit()
    store.close()
    return log_dir


if __name__ == "__main__":
    try:
        print(write_log(Path(sys.argv[1])))
    except LogError as error:  # as when the folder holds a log already
        sys.exit(str(error))
