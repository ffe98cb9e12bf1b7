"""Slots: out of which ones and into which ones is copied."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.records import IssuedTail


class LoadableAfterCommit(Checker):
    """LOADABLE_AFTER_COMMIT: what is loaded was completely saved, lies where it is read, and was not given up since.

    Each slot of a load holds the page it is read for: of a committed chunk of the request, or of its saved tail.

    A chunk is committed where the latest of commit, evict, taint and reset is commit.

    Verifies: this page by page, in the order of the load, against chunks and tails that the audit follows by itself; of
    a chunk or tail that ends inside a block, that it reaches to the load's end; a tail is read only by a load
    that ends inside it, after its save completed and before anything dropped it; there is a slot for each block.
    Blocks are compared with the request's table by LOAD_DST_EXCLUSIVE, pages left out by GROUP_AGREEMENT.
    Does not verify: the bytes in a slot.
    """

    rule = "LOADABLE_AFTER_COMMIT"

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        layout, chunks, life = self.layout, self.chunks, self.lives.get(event.request_id)
        end_token = event.first_token + event.num_tokens
        pages = layout.pages_of(range(event.first_token, end_token))
        if len(event.slots) != len(event.block_ids):
            detail = (
                f"load {event.job_id} of tokens to {end_token} is of {len(pages)} pages, but names {len(event.slots)} "
                f"slots and {len(event.block_ids)} blocks"
            )
            self.broken(detail, event.cause)
            return
        if len(event.slots) != len(pages):
            return  # blocks of other tokens, or too few: LOAD_DST_EXCLUSIVE names it
        keys = [] if life is None else life.keys
        tail = self.tails.saved(life)
        if tail is not None and not tail.first_token < end_token <= tail.end_token:
            tail = None
        why_no_tail, tail_sequence = self.tails.why_none(life)
        # What lies before the tail, or all of it, must be whole chunks: each is looked at once.
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
                f"load {event.job_id} of tokens to {end_token} reads slots {foreign}, "
                f"which do not hold the pages they are read for; {why_no_tail}"
            )
            self.broken(detail, tail_sequence, event.cause)

    def _is_left_out(self, slot: int) -> bool:
        return slot == NO_SLOT and self.layout.has_windows

    def _slots_of_page(self, page: int, end_token: int, keys: list[bytes], tail: IssuedTail | None) -> list[int]:
        """Where the page lies with all tokens that the load needs of it."""
        layout, of_page = self.layout, self.layout.tokens_of_page(page)
        end_token = min(end_token, of_page.stop)
        found = []
        if tail is not None:
            place = page - layout.pages_of(range(tail.first_token, tail.end_token)).start
            if 0 <= place < len(tail.slots) and end_token <= tail.end_token:
                found.append(tail.slots[place])
        # The chunk that holds the last token that is needed of the page, and those behind it in the same block.
        chunks = layout.chunks_of(range(end_token - 1, of_page.stop))
        for chunk in range(chunks.start, min(chunks.stop, len(keys))):
            slots = self.chunks.slots_of(keys[chunk])
            place = page - layout.pages_of_chunk(chunk).start
            if slots is not None and place < len(slots):
                found.append(slots[place])
        return found


class SlotExclusive(Checker):
    """SLOT_EXCLUSIVE: what a save writes into is nobody else's.

    A save is given slots of the pool, each once, that hold nothing and that no other copy reads or writes.

    Verifies: this for the slots of every save, of chunks and of tails: against committed chunks, saved tails, copies in
    flight, and saves that were given up while a rank may still be writing.
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
        """Who needs it, in words, and the event that shows it (0: none)."""
        model = self.model
        if not 0 <= slot < model.slots.num_slots:
            return f"but the pool has {model.slots.num_slots}", 0
        for job_id, job in model.copies:
            if job_id != event.job_id and slot in job.slots:
                return f"which {'load' if job.is_load else 'save'} {job_id} is still copying", job.sequence
        for job_id, job in model.copies.given_up.items():
            if slot in job.slots:
                return f"into which save {job_id}, which was given up, may still write", job.sequence
        if key is not None:
            return f"which holds chunk {key.hex()}", 0
        return "which holds a saved tail" if model.tails.of_slot(slot) is not None else "twice", 0
