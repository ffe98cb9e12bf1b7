"""LOADABLE_AFTER_COMMIT: what is loaded was completely saved, and has not been given up since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.committed_chunks import CommittedChunks
from kvledger.lifecycle.audit.indices import Indices
from kvledger.lifecycle.audit.jobs_in_flight import JobsInFlight
from kvledger.lifecycle.audit.saved_tails import SavedTails
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.host_slots import NO_SLOT
from kvledger.lifecycle.replay import Check, ReplayedEvent


class LoadableAfterCommit:
    """Every slot of a load belongs to a committed chunk of the request or to the saved tail of its present life.

    A chunk is committed where the latest of commit, evict, taint and reset is commit.

    Verifies: this with indices of its own of chunks and tails, made from events alone; a tail is read only by a load
    that ends inside it, after its save completed and before anything dropped it.
    Does not verify: the bytes in a slot, and which page of a chunk or tail goes to which block.
    """

    rule: ClassVar[str] = "LOADABLE_AFTER_COMMIT"

    def __init__(self) -> None:
        self._committed = CommittedChunks(JobsInFlight(0), Geometry(1, 1))
        self._tails = SavedTails()

    def checks(self, indices: Indices) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._committed, self._tails = indices.committed, indices.tails
        return [(e.LoadIssued, self._check_load)]

    def _check_load(self, event: e.LoadIssued, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        chunk_size = projections.configuration.chunk_size
        first_chunk = event.first_token // chunk_size
        end_token = event.first_token + event.num_tokens
        end_chunk = -(-end_token // chunk_size)
        slots: set[int] = set()
        tail = self._tails.saved(event.request_id)
        if tail is not None and tail.first_token < end_token <= tail.end_token:
            end_chunk = tail.first_token // chunk_size
            slots.update(tail.slots)
            # Another request may have saved the whole chunk meanwhile; its beginning is as good.
            for key in projections.chunk_keys.of(event.request_id)[end_chunk : end_chunk + 1]:
                slots.update(self._committed.slots_of(key) or ())
        why_no_tail, tail_sequence = self._tails.why_none(event.request_id)
        keys = projections.chunk_keys.of(event.request_id)[first_chunk:end_chunk]
        for chunk, key in enumerate(keys, first_chunk):
            slots_of_chunk = self._committed.slots_of(key)
            if slots_of_chunk is None:
                departed = projections.chunks.departed(key)
                why = "was never completely saved" if departed is None else f"is gone ({departed.reason})"
                sequence = 0 if departed is None else departed.sequence
                detail = f"load {event.job_id} needs chunk {chunk}, which {why}"
                yield violation(self.rule, step, projections, detail, sequence, event.cause)
            else:
                slots.update(slots_of_chunk)
        if len(keys) < end_chunk - first_chunk:
            missing = first_chunk + len(keys)
            detail = f"load {event.job_id} needs chunk {missing}, whose key was never observed, and {why_no_tail}"
            yield violation(self.rule, step, projections, detail, tail_sequence, event.cause)
        elif foreign := [slot for slot in event.slots if slot not in slots and slot != NO_SLOT]:
            detail = (
                f"load {event.job_id} of tokens to {end_token} reads slots {foreign}, "
                f"which hold none of their committed chunks; {why_no_tail}"
            )
            yield violation(self.rule, step, projections, detail, tail_sequence, event.cause)
