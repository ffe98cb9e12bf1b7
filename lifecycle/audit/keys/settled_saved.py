"""SETTLED_SAVED: what has settled is saved, at the latest when its blocks are taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.lives import Life
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.states import BlocksRegion, RequestState


class _Taken(msgspec.Struct):
    """Blocks that were taken, and chunks in them of which the log does not tell yet what becomes of them."""

    sequence: int
    request_id: str
    chunks: list[int]


class SettledSaved:
    """When a request is preempted or ends, each of its settled chunks is in the pool, on its way there, or declined.

    Verifies: this for every preemption and every end, by what the log told to be settled, the last token left out that
    was never computed; of requests that are trusted, not from before a reset, and in no load.
    Does not verify: when before that a chunk is saved, which is the state handlers' business; tails; what a
    save brought that was under way during a reset (RESET_EPOCH); models with sliding windows, which leave chunks that
    nobody sees any more.
    """

    rule: ClassVar[str] = "SETTLED_SAVED"

    _model: Model

    def __init__(self) -> None:
        self._taken: _Taken | None = None
        """Until the next observation tells that all has been decided."""

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event; none where a group has a window."""
        self._model = model
        if model.geometry.windows.forget:
            return []
        return [
            (e.StepScheduled, self._decided),
            (e.RequestPreempted, self._decided),
            (e.RequestFinished, self._decided),
            (e.RequestPreempted, self._preempted),
            (e.RequestFinished, self._finished),
            (e.SaveIssued, self._issued),
            (e.SaveDeclined, self._declined),
            (e.RequestQuarantined, self._quarantined),
        ]

    def _decided(self, _event: e.Event, moment: Moment) -> list[Violation] | None:
        taken, self._taken = self._taken, None
        if taken is None or not taken.chunks:
            return None
        detail = f"its blocks were taken, and of the settled chunks {taken.chunks} were left out without a word"
        return [violation(self.rule, moment, detail, taken.sequence, request_id=taken.request_id)]

    def _preempted(self, event: e.RequestPreempted, moment: Moment) -> None:
        if moment.blocks_before is not BlocksRegion.LOADING and moment.state_before is not RequestState.NEW:
            self._take(event.num_intact_tokens, moment)

    def _finished(self, event: e.RequestFinished, moment: Moment) -> None:
        life, model = moment.life, self._model
        if life is not None and not model.jobs.is_loading(life.ordinal, life.generation, outside_steps=True):
            num_computed_tokens = model.lives.num_computed_tokens(life)
            self._take(min(event.num_intact_tokens, event.num_tokens - 1, num_computed_tokens), moment)

    def _take(self, num_settled_tokens: int, moment: Moment) -> None:
        life = moment.life
        if life is None or not moment.is_legal or life.quarantined or moment.was_stale:
            return
        chunks = self._unsaved(life, num_settled_tokens)
        if chunks:
            self._taken = _Taken(moment.sequence, life.request_id, list(chunks))

    def _unsaved(self, life: Life, num_settled_tokens: int) -> Sequence[int]:
        end_chunk = min(num_settled_tokens // self._model.geometry.chunk_size, len(life.keys))
        unsaved = self._model.chunks.unsaved(life.keys, 0, end_chunk)
        late = self._model.chunks.late
        return [chunk for chunk in unsaved if life.keys[chunk] not in late] if late else unsaved

    def _issued(self, event: e.SaveIssued, _moment: Moment) -> None:
        taken = self._taken
        if taken is not None and event.cause == taken.sequence:
            taken.chunks = [chunk for chunk in taken.chunks if chunk not in event.chunks]

    def _declined(self, event: e.SaveDeclined, _moment: Moment) -> None:
        taken = self._taken
        if taken is not None and event.cause == taken.sequence:
            taken.chunks = [chunk for chunk in taken.chunks if chunk < event.first_chunk]

    def _quarantined(self, event: e.RequestQuarantined, _moment: Moment) -> None:
        if self._taken is not None and event.request_id == self._taken.request_id:
            self._taken = None
