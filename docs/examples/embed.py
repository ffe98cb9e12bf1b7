"""The core without an engine (`embed.py LOG_DIR`): a request is computed, preempted, comes back, is judged."""

import sys
from pathlib import Path

from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.reasons import Accounts
from kvledger.lifecycle import Channel, Core, Ledger, LedgerConfiguration, Scheduled, StepEncoder, log_header
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.reader import Model, Reader
from kvledger.storage.events import SegmentEventStore

core, configuration = Core.standard(), LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8)
log_dir, clock = Path(sys.argv[1]), iter(range(1_000_000, 1_000_000_000, 1_000_000))
store = SegmentEventStore.create(log_dir, log_header(core, configuration))
ledger = Ledger(core, configuration, store)
steps = StepEncoder(ledger.projections)


def observe(event: e.Event) -> list[e.Event]:
    """Record what happened, and carry out what is owed upon it once that is written."""
    decisions = ledger.observe(event)
    ledger.commit()
    ledger.advance(owed := ledger.ready(Channel.WORKERS))
    for job in owed.jobs:
        print(f"{job.id}: blocks {job.block_ids}, slots {job.slots}")  # the pages would be copied here
        observe(e.TransferReported.by(ranks=[0], job_id=job.job_id, time_ns=next(clock)))
    return decisions


observe(e.RequestArrived("a", ledger.next_ordinal, 40, next(clock)))
observe(e.ChunkKeysObserved("a", 0, (b"hash of 0 to 15", b"hash of 0 to 31")))
observe(e.LookupRequested("a", 0, 40, next(clock)))
observe(e.BlocksAllocated("a", (1, 2, 3), 0, next(clock)))
observe(steps.encode([Scheduled("a", 0, 40, num_tokens=40)], next(clock)))
observe(e.RequestPreempted("a", 40, 41, next(clock)))
(answer,) = observe(e.LookupRequested("a", 0, 41, next(clock)))
loaded = answer.num_external_tokens if isinstance(answer, e.LookupAnswered) else 0
observe(e.BlocksAllocated("a", (7, 8, 9), loaded, next(clock)))
observe(steps.encode([Scheduled("a", loaded, 41 - loaded, num_tokens=41)], next(clock)))
observe(e.RequestFinished("a", "stopped", 41, 42, next(clock)))
store.close()

log, model = open_log(log_dir), Model(core.tables, configuration)
(audit := Audit(core, configuration)).run(log.events())
Reader(model, [accounts := Accounts(model)]).take(log.events())
print("sound:", audit.is_sound, *audit.violations, *audit.divergences)
print("left to compute, by reason:", {str(reason): count for reason, count in accounts.sums().misses().items()})
