"""LOOKUP_PURE: an answer depends on what is cached and on this call, never on how often was asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.indices import Indices
from kvledger.lifecycle.audit.saved_tails import SavedTails
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent


class _Circumstances(msgspec.Struct, frozen=True, gc=False):
    """Everything an answer may depend on; equal circumstances must give equal answers."""

    generation: int
    num_computed_tokens: int
    num_tokens: int
    num_keys: int
    num_added: int
    num_removed: int
    end_of_tail: int
    quarantined: bool
    num_jobs: int
    next_job_id: int


class LookupPure:
    """k lookups equal one, and each answer is computed against the `num_computed_tokens` of its own call.

    Verifies: answer = max(0, min(usable part of the recorded hit, num_tokens - 1) - num_computed_tokens), and 0
    for a local hit that ends inside a block; the answer repeats the question; two lookups of a request between
    which nothing it depends on changed give the same hit and the same answer.
    Does not verify: whether the last token is left to compute (LAST_TOKEN), nor whether the recorded hit is there
    (RESET_EPOCH and LOADABLE_AFTER_COMMIT see what is promised and not there; deciding again sees every other
    difference).
    """

    rule: ClassVar[str] = "LOOKUP_PURE"

    def __init__(self) -> None:
        self._asked: tuple[int, e.LookupRequested] | None = None
        self._tails = SavedTails()
        self._answered: dict[str, tuple[int, _Circumstances, tuple[int, int]]] = {}

    def checks(self, indices: Indices) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._tails = indices.tails
        return [
            (e.LookupRequested, self._requested),
            (e.LookupAnswered, self._check_question),
            (e.LookupAnswered, self._check_answer),
            (e.ChunkKeysObserved, self._forget),
            (e.RequestArrived, self._forget),
            (e.RequestReleased, self._forget),
        ]

    def _requested(self, event: e.LookupRequested, step: ReplayedEvent, _projections: Projections) -> None:
        self._asked = (step.sequence, event)

    def _forget(self, event: e.RequestEvent, _step: ReplayedEvent, _projections: Projections) -> None:
        self._answered.pop(event.request_id, None)

    def _check_question(
        self, event: e.LookupAnswered, step: ReplayedEvent, projections: Projections
    ) -> list[Violation] | None:
        if self._asked is None or self._asked[0] != event.cause or self._asked[1].request_id != event.request_id:
            return None
        asked = self._asked[1].num_computed_tokens
        if asked == event.num_computed_tokens:
            return None
        detail = f"asked with {asked} computed tokens, answered for {event.num_computed_tokens}"
        return [violation(self.rule, step, projections, detail, event.cause)]

    def _check_answer(
        self, event: e.LookupAnswered, step: ReplayedEvent, projections: Projections
    ) -> list[Violation] | None:
        record = step.record
        if record is None:
            return None
        found: list[Violation] | None = None
        gets_nothing = record.quarantined or record.computes_first
        usable = 0 if gets_nothing else projections.policy.usable_tokens(event.num_hit_tokens, record)
        expected = max(0, min(usable, event.num_tokens - 1) - event.num_computed_tokens)
        if event.num_computed_tokens % projections.configuration.block_size:
            expected = 0
        # Where groups see only a window, a load may have to end earlier; GROUP_AGREEMENT looks at where.
        is_less = projections.geometry.windows.forget and 0 <= event.num_external_tokens < expected
        # A hit of every known token that is answered as it is leaves nothing to compute: LAST_TOKEN says so.
        is_whole = usable >= event.num_tokens == event.num_computed_tokens + event.num_external_tokens
        if event.num_external_tokens != expected and not is_less and not is_whole:
            detail = (
                f"answered {event.num_external_tokens}, but a usable hit of {usable} of {event.num_tokens} tokens "
                f"with {event.num_computed_tokens} computed gives {expected}"
            )
            found = [violation(self.rule, step, projections, detail, event.cause)]
        tail = self._tails.saved(event.request_id)
        forget = projections.geometry.windows.forget
        now = _Circumstances(
            record.generation,
            event.num_computed_tokens,
            event.num_tokens,
            len(projections.chunk_keys.of(event.request_id)),
            projections.chunks.num_added,
            projections.chunks.num_removed,
            0 if tail is None else tail.end_token,
            record.quarantined,
            len(projections.transfers) if forget else 0,
            projections.transfers.next_job_id if forget else 0,
        )
        answer = (event.num_hit_tokens, event.num_external_tokens)
        before = self._answered.get(event.request_id)
        if before is not None and before[1] == now and before[2] != answer:
            detail = (
                f"a hit of {answer[0]} and an answer of {answer[1]}, though an equal lookup had given "
                f"{before[2][0]} and {before[2][1]} and nothing changed since"
            )
            found = [*(found or ()), violation(self.rule, step, projections, detail, before[0], event.cause)]
        self._answered[event.request_id] = (step.sequence, now, answer)
        return found
