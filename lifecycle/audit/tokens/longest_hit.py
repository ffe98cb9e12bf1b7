"""LONGEST_HIT: a lookup is answered with the whole prefix that is there, and why it ends where it ends."""

from __future__ import annotations

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.lives import Life
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.windows import NO_SLOT


class _Seen(msgspec.Struct, frozen=True, gc=False):
    """How many chunks were there, and what that was true for."""

    num_chunks: int
    last_key: bytes
    """Of all that were known then. It hashes all before it, so an equal last key means equal keys."""
    num_keys: int
    num_added: int
    num_removed: int


class LongestHit(Checker):
    """A recorded hit reaches as far as committed chunks of the request do without a gap, and its own saved tail behind.

    Verifies: this for every answer, before any limit. Where it ends for want of a chunk, that the reason is the true
    one, and the event that took the chunk away; where less is used, that the request is quarantined, computes first, is
    limited by `max_hit_share`, or has a window that sees what is not stored.
    Does not verify: a hit of more than is there (LOADABLE_AFTER_COMMIT, RESET_EPOCH); what is answered of it
    (LOOKUP_PURE, GROUP_AGREEMENT); why a chunk is gone that left longer ago than is
    remembered.
    """

    rule = "LONGEST_HIT"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._seen: dict[str, _Seen] = {}
        model.forgotten.at(LIFE, self._seen)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        life = self.lives.get(event.request_id)
        if life is None:
            return
        hit, reason, sequence = self._expected(event, life, self._num_chunks(life))
        if event.num_hit_tokens > hit or reason == "window":
            return  # more than is there: LOADABLE_AFTER_COMMIT, RESET_EPOCH and GROUP_AGREEMENT look at that
        if hit != event.num_hit_tokens:
            self.broken(f"a hit of {event.num_hit_tokens} tokens was found, but {hit} are there", sequence, event.cause)
        elif reason != event.miss_reason or sequence != event.miss_cause:
            recorded = f"the hit ends for the reason {event.miss_reason} of event {event.miss_cause}"
            self.broken(f"{recorded}, but the log tells {reason} of event {sequence}", sequence, event.cause)

    def _num_chunks(self, life: Life) -> int:
        """Committed chunks from the first one on; most answers are to somebody who asks again."""
        chunks, keys = self.chunks, life.keys
        if not keys:
            return 0
        seen, first = self._seen.get(life.request_id), 0
        if (
            seen is not None
            and seen.num_removed == chunks.num_removed
            and seen.num_keys <= len(keys)
            and seen.last_key == keys[seen.num_keys - 1]
        ):
            if seen.num_added == chunks.num_added and seen.num_keys == len(keys):
                return seen.num_chunks
            first = seen.num_chunks
        num_chunks = chunks.num_committed_from(keys, first)
        self._seen[life.request_id] = _Seen(num_chunks, keys[-1], len(keys), chunks.num_added, chunks.num_removed)
        return num_chunks

    def _expected(self, event: e.LookupAnswered, life: Life, num_chunks: int) -> tuple[int, str, int]:
        """(hit in tokens, reason, sequence of the event that it names), as the log tells it."""
        model = self.model
        hit = num_chunks * model.geometry.chunk_size
        reason, sequence = self._why_chunks_end(life, num_chunks)
        tail = model.tails.saved(life)
        if tail is not None and tail.first_token == hit:
            hit = tail.end_token
            if hit >= event.num_tokens - 1:
                reason, sequence = "complete", 0
        usable = model.usable_tokens(life, hit)
        if usable < hit:
            reason, sequence = "limited", 0
        if life.computes_first:
            usable, reason, sequence = 0, "load_failed", 0
        if life.quarantined:
            usable, reason, sequence = 0, "quarantined", 0
        if model.geometry.windows.forget:
            end_token = min(usable, event.num_tokens - 1)
            if self._boundary(life, end_token) != end_token:
                reason, sequence = "window", 0
        return hit, reason, sequence

    def _why_chunks_end(self, life: Life, num_chunks: int) -> tuple[str, int]:
        if num_chunks >= len(life.keys):
            return "complete", 0
        missing = life.keys[num_chunks]
        if missing in self.chunks.saving:
            return "saving", 0
        departed = self.chunks.departed(missing)
        return ("never_saved", 0) if departed is None else (departed.reason, departed.sequence)

    def _boundary(self, life: Life, num_tokens: int) -> int:
        """The longest prefix behind which all is stored that windows see."""
        model, geometry = self.model, self.geometry
        tail = model.tails.saved(life)

        def is_stored(page: int, end_token: int) -> bool:
            chunk, place = geometry.place_of(page, -(-end_token // geometry.chunk_size))
            slots = model.chunks.slots_of(life.keys[chunk]) if chunk < len(life.keys) else None
            if slots is not None and slots[place] != NO_SLOT:
                return True
            if tail is None or end_token > tail.end_token:
                return False
            place = page - geometry.pages_spanning(tail.first_token, 1).start
            return 0 <= place < len(tail.slots) and tail.slots[place] != NO_SLOT

        return geometry.windows.last_boundary(num_tokens, geometry.chunk_size, is_stored)
