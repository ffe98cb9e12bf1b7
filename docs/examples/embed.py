"""The core without an engine (`embed.py LOG_DIR`): a request computes, is preempted and resumes; its log is audited."""

import sys
from collections import Counter
from pathlib import Path

import kvledger
from kvledger.lifecycle import Channel, Core, Ledger, LedgerConfiguration, Scheduled, StepEncoder, log_header
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.storage.events import SegmentEventStore

core, configuration = Core.standard(), LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8)
log_dir, clock = Path(sys.argv[1]), iter(range(1_000_000, 1_000_000_000, 1_000_000))
store = SegmentEventStore.create(log_dir, log_header(core, configuration))
ledger = Ledger(core, configuration, store, checks_input=True)
steps = StepEncoder(ledger.projections)


def observe(event: e.Event) -> list[e.Event]:
    """Record an event, write it, carry out the jobs that it caused, and return the decisions."""
    decisions = ledger.observe(event)
    ledger.commit()
    ledger.advance(pending := ledger.ready(Channel.WORKERS))
    for job in pending.jobs:
        print(f"{job.id}: blocks {job.block_ids}, slots {job.slots}")  # a worker would copy the pages here
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

log = kvledger.open_log(log_dir)
(audit := Audit(core, configuration)).run((entry.sequence, entry.event) for entry in log.entries())
left = [reason for reason in log.request("a").why() if reason.of == "admission"]
tokens = Counter(str(reason.code) for reason in left for _ in range(reason.first_token, reason.end_token))
print("sound:", audit.is_sound, *audit.violations, *audit.divergences)
print("left to compute, by reason:", dict(tokens))
