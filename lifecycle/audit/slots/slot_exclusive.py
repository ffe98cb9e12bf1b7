"""SLOT_EXCLUSIVE: what a save writes into is nobody else's."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model.moment import on


class SlotExclusive(Checker):
    """A save is given slots of the pool, each once, that hold nothing and that no other copy reads or writes.

    Verifies: this for the slots of every save, of chunks and of tails: against committed chunks, saved tails, copies in
    flight, and saves that were given up while a rank may still be writing.
    Does not verify: that the workers write into these slots and no others.
    """

    rule = "SLOT_EXCLUSIVE"

    @on(e.SaveIssued, e.TailSaveIssued)
    def _issued(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        if self.chunks.taken is not None:
            for slot in sorted(set(self.chunks.taken)):
                holder, sequence = self._holder_of(slot, event)
                self.broken(f"save {event.job_id} writes into slot {slot}, {holder}", sequence, event.cause)

    def _holder_of(self, slot: int, event: e.SaveIssued | e.TailSaveIssued) -> tuple[str, int]:
        """Who needs it, in words, and the event that shows it (0: none)."""
        model = self.model
        if not 0 <= slot < model.slots.num_slots:
            return f"but the pool has {model.slots.num_slots}", 0
        for job_id, job in model.jobs:
            if job_id != event.job_id and slot in job.slots:
                return f"which {'load' if job.is_load else 'save'} {job_id} is still copying", job.sequence
        for job_id, job in model.jobs.given_up.items():
            if slot in job.slots:
                return f"into which save {job_id}, which was given up, may still write", job.sequence
        key = model.chunks.of_slot(slot)
        if key is not None:
            return f"which holds chunk {key.hex()}", 0
        return "which holds a saved tail" if model.tails.of_slot(slot) is not None else "twice", 0
