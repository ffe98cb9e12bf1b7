"""Slots: which slots copies read and write."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.records import IssuedTail


class LoadableAfterCommit(Checker):
    """LOADABLE_AFTER_COMMIT: a load reads only pages that were completely saved, from slots that still hold them.

    Each slot of a load holds the page that the load needs from it: a page of a committed chunk of the request, or a
    page of the request's saved tail. A chunk is committed from the completion of its save until it is evicted or
    tainted, or until a reset.

    Verifies: the slots of a load hold its pages, in the same order. The audit computes from the log which chunks and
    tails are in the slots. Each page has all tokens that the load needs from it, even if a chunk or tail ends
    inside a block. A load reads a tail only if the load ends inside the tail or at the tail's end. When such a load is
    issued, the save of the tail has completed and no event has dropped the tail. A load has as many slots as blocks.
    Does not verify: the bytes in a slot; the blocks of a load (LOAD_DST_EXCLUSIVE); pages that a load leaves out
    (GROUP_AGREEMENT).
    """

    rule = "LOADABLE_AFTER_COMMIT"

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        layout, chunks, life = self.layout, self.chunks, self.lives.get(event.request_id)
        end_token = event.first_token + event.num_tokens
        pages = layout.pages_of(range(event.first_token, end_token))
        if len(event.slots) != len(event.block_ids):
            detail = (
                f"load {event.job_id} up to token {end_token} has {len(pages)} pages, but names {len(event.slots)} "
                f"slots and {len(event.block_ids)} blocks"
            )
            self.broken(detail, event.cause)
            return
        if len(event.slots) != len(pages):
            return  # LOAD_DST_EXCLUSIVE reports wrong blocks
        keys = [] if life is None else life.keys
        tail = self.tails.saved(life)
        if tail is not None and not tail.first_token < end_token <= tail.end_token:
            tail = None
        why_no_tail, tail_sequence = self.tails.why_none(life)
        # All before the tail must be whole chunks; look at each once.
        found = False
        for chunk in layout.chunks_of(range(event.first_token, end_token if tail is None else tail.first_token)):
            if chunk >= len(keys):
                detail = f"load {event.job_id} needs chunk {chunk}, whose key was never observed, and {why_no_tail}"
                self.broken(detail, tail_sequence, event.cause)
                return
            if keys[chunk] not in chunks:
                departed = chunks.departed(keys[chunk])
                why = "was never completely saved" if departed is None else f"is gone ({departed.reason})"
                sequence = 0 if departed is None else departed.sequence
                detail = f"load {event.job_id} needs chunk {chunk}, which {why}"
                self.broken(detail, sequence, event.cause)
                found = True
        foreign = [
            slot
            for page, slot in zip(pages, event.slots, strict=True)
            if not self._is_left_out(slot) and slot not in self._slots_of_page(page, end_token, keys, tail)
        ]
        if foreign and not found:
            detail = (
                f"load {event.job_id} up to token {end_token} reads slots {foreign}, "
                f"which do not hold the pages that it needs; {why_no_tail}"
            )
            self.broken(detail, tail_sequence, event.cause)

    def _is_left_out(self, slot: int) -> bool:
        return slot == NO_SLOT and self.layout.has_windows

    def _slots_of_page(self, page: int, end_token: int, keys: list[bytes], tail: IssuedTail | None) -> list[int]:
        """Return the slots that hold this page with all tokens that the load needs from it."""
        layout, of_page = self.layout, self.layout.tokens_of_page(page)
        end_token = min(end_token, of_page.stop)
        found = []
        if tail is not None:
            place = page - layout.pages_of(range(tail.first_token, tail.end_token)).start
            if 0 <= place < len(tail.slots) and end_token <= tail.end_token:
                found.append(tail.slots[place])
        # The chunk with the last needed token of the page, and those after it in the same block.
        chunks = layout.chunks_of(range(end_token - 1, of_page.stop))
        for chunk in range(chunks.start, min(chunks.stop, len(keys))):
            slots = self.chunks.slots_of(keys[chunk])
            place = page - layout.pages_of_chunk(chunk).start
            if slots is not None and place < len(slots):
                found.append(slots[place])
        return found


class SlotExclusive(Checker):
    """SLOT_EXCLUSIVE: a save writes only into free slots.

    Verifies: every save of chunks or of a tail has slots that exist in the pool, each once. These slots belong to no
    committed chunk, no saved tail and no other copy in flight. If a save was given up, and a rank may still write into
    its slots, no other save has these slots.
    Does not verify: that the workers write into these slots and no others.
    """

    rule = "SLOT_EXCLUSIVE"

    @on(e.SaveIssued, e.TailSaveIssued)
    def _issued(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        taken = sorted(set(self.chunks.taken))
        key_of = self.chunks.in_slots(taken) if taken else {}
        for slot in taken:
            holder, sequence = self._holder_of(slot, event, key_of.get(slot))
            self.broken(f"save {event.job_id} writes into slot {slot}, {holder}", sequence, event.cause)

    def _holder_of(self, slot: int, event: e.SaveIssued | e.TailSaveIssued, key: bytes | None) -> tuple[str, int]:
        """Return in words why the slot is not free, and the sequence number of the event that shows it; 0: no event."""
        model = self.model
        if not 0 <= slot < model.slots.num_slots:
            return f"but the pool has {model.slots.num_slots} slots", 0
        for job_id, job in model.copies:
            if job_id != event.job_id and slot in job.slots:
                return f"which {'load' if job.is_load else 'save'} {job_id} is still copying", job.sequence
        for job_id, job in model.copies.given_up.items():
            if slot in job.slots:
                return f"into which save {job_id} may still write, although it counts as failed", job.sequence
        if key is not None:
            return f"which holds chunk {key.hex()}", 0
        return "which holds a saved tail" if model.tails.of_slot(slot) is not None else "twice", 0
