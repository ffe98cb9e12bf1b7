"""LOADABLE_AFTER_COMMIT: what is loaded was completely saved, and has not been given up since."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.committed_chunks import CHUNK_EVENTS, CommittedChunks
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent


class LoadableAfterCommit:
    """Every slot of a load belongs to a chunk of the request whose latest of commit, evict, taint and reset is commit.

    Verifies: this with a chunk index of its own, made from save, evict, taint and reset events alone.
    Does not verify: the bytes in a slot, and which page of a chunk goes to which block.
    """

    rule: ClassVar[str] = "LOADABLE_AFTER_COMMIT"
    looks_at: ClassVar[frozenset[type[e.Event]]] = CHUNK_EVENTS | {e.LoadIssued}

    def __init__(self) -> None:
        self._committed = CommittedChunks()

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Compare a load with what is committed."""
        if isinstance(step.event, e.LoadIssued):
            yield from self._check_load(step.event, step, projections)
        else:
            self._committed.fold(step.event, projections)

    def _check_load(self, event: e.LoadIssued, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        chunk_size = projections.configuration.chunk_size
        first_chunk = event.first_token // chunk_size
        end_chunk = -(-(event.first_token + event.num_tokens) // chunk_size)
        keys = projections.chunk_keys.of(event.request_id)[first_chunk:end_chunk]
        slots: set[int] = set()
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
            detail = f"load {event.job_id} needs chunk {first_chunk + len(keys)}, whose key was never observed"
            yield violation(self.rule, step, projections, detail, event.cause)
        elif foreign := [slot for slot in event.slots if slot not in slots]:
            detail = f"load {event.job_id} reads slots {foreign}, which hold no committed chunk of the request"
            yield violation(self.rule, step, projections, detail, event.cause)
