"""SETTLED_SAVED: what has settled is saved, at the latest when its blocks are taken."""

from __future__ import annotations

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import EventChecks, on
from kvledger.lifecycle.states import BlocksRegion, RequestState


class _Taken(msgspec.Struct):
    """Blocks that were taken, and chunks in them of which the log does not tell yet what becomes of them."""

    sequence: int
    request_id: str
    chunks: list[int]


class SettledSaved(Checker):
    """When a request is preempted or ends, each of its settled chunks is in the pool, on its way there, or declined.

    Verifies: this for every preemption and every end, by what the log says is settled, the last token left out that
    was never computed; of requests that are trusted, not from before a reset, and in no load.
    Does not verify: when before that a chunk is saved, which is the state handlers' business; tails; what a
    save brought that was under way during a reset (RESET_EPOCH); models with sliding windows, which leave chunks that
    nobody sees any more.
    """

    rule = "SETTLED_SAVED"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._taken: _Taken | None = None
        """Until the next observation tells that all has been decided."""

    def checks(self) -> EventChecks:
        """None where a group has a window."""
        return [] if self.geometry.windows.forget else super().checks()

    @on(e.StepScheduled, e.RequestPreempted, e.RequestFinished)
    def _decided(self, _event: e.Event) -> None:
        taken, self._taken = self._taken, None
        if taken is not None and taken.chunks:
            detail = f"its blocks were taken, and of the settled chunks {taken.chunks} were left out without a word"
            self.broken(detail, taken.sequence, request_id=taken.request_id)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        if self.moment.blocks_before is not BlocksRegion.LOADING and self.moment.state_before is not RequestState.NEW:
            self._take(event.num_intact_tokens)

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished) -> None:
        life = self.moment.life
        if life is not None and not self.jobs.is_loading(life.ordinal, life.generation, outside_steps=True):
            num_computed_tokens = self.lives.num_computed_tokens(life)
            self._take(min(event.num_intact_tokens, event.num_tokens - 1, num_computed_tokens))

    def _take(self, num_settled_tokens: int) -> None:
        life = self.moment.life
        if life is None or not self.moment.is_legal or life.quarantined or self.moment.was_stale:
            return
        end_chunk = min(num_settled_tokens // self.geometry.chunk_size, len(life.keys))
        unsaved = self.chunks.unsaved(life.keys, 0, end_chunk)
        chunks = [chunk for chunk in unsaved if life.keys[chunk] not in self.chunks.late]
        if chunks:
            self._taken = _Taken(self.moment.sequence, life.request_id, chunks)

    @on(e.SaveIssued)
    def _issued(self, event: e.SaveIssued) -> None:
        taken = self._taken
        if taken is not None and event.cause == taken.sequence:
            taken.chunks = [chunk for chunk in taken.chunks if chunk not in event.chunks]

    @on(e.SaveDeclined)
    def _declined(self, event: e.SaveDeclined) -> None:
        taken = self._taken
        if taken is not None and event.cause == taken.sequence:
            taken.chunks = [chunk for chunk in taken.chunks if chunk < event.first_chunk]

    @on(e.RequestQuarantined)
    def _quarantined(self, event: e.RequestQuarantined) -> None:
        if self._taken is not None and event.request_id == self._taken.request_id:
            self._taken = None
