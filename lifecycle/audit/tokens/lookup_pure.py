"""LOOKUP_PURE: an answer depends on what is cached and on this call, never on how often was asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.lives import Life
from kvledger.lifecycle.audit.model.moment import Check, Moment


class _Circumstances(msgspec.Struct, frozen=True, gc=False):
    """Everything an answer may depend on; equal circumstances must give equal answers."""

    generation: int
    num_computed_tokens: int
    num_tokens: int
    num_keys: int
    last_key: bytes
    """It hashes all before it, so an equal last key means equal keys."""
    num_added: int
    num_removed: int
    end_of_tail: int
    quarantined: bool
    num_jobs: int
    last_job_id: int


class LookupPure:
    """k lookups equal one, and each answer is computed against the `num_computed_tokens` of its own call.

    Verifies: answer = max(0, min(usable part of the recorded hit, num_tokens - 1) - num_computed_tokens), and 0
    for a local hit that ends inside a block; an answer of 0 is not asynchronous; the answer repeats the question; two
    lookups of a request between which nothing it depends on changed give the same hit and the same answer.
    Does not verify: whether the last token is left to compute (LAST_TOKEN), nor whether the recorded hit is there
    (RESET_EPOCH and LOADABLE_AFTER_COMMIT see what is promised and not there; deciding again sees every other
    difference).
    """

    rule: ClassVar[str] = "LOOKUP_PURE"

    def __init__(self) -> None:
        self._asked: tuple[int, e.LookupRequested | None] = (0, None)
        self._model: Model
        self._forgets = False
        self._answered: dict[str, tuple[int, _Circumstances, tuple[int, int]]] = {}

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        model.forgotten.at(LIFE, self._answered)
        self._model = model
        self._forgets = model.geometry.windows.forget
        return [
            (e.LookupRequested, self._requested),
            (e.LookupAnswered, self._check),
            (e.LookupDeferred, self._deferred),
        ]

    def _requested(self, event: e.LookupRequested, moment: Moment) -> None:
        self._asked = (moment.sequence, event)

    def _check(self, event: e.LookupAnswered, moment: Moment) -> list[Violation] | None:
        found: list[Violation] | None = None
        asked_at, asked = self._asked
        if asked is not None and asked_at == event.cause and asked.request_id == event.request_id:
            found = self._compare(asked, event, moment)
        if event.is_async and not event.num_external_tokens:
            found = [*(found or ()), violation(self.rule, moment, "asynchronous, with nothing to load", event.cause)]
        life = moment.life
        if life is not None:
            # What nothing is known of is answered with nothing: no sum to be made.
            if event.num_hit_tokens or event.num_external_tokens or event.num_computed_tokens < 0:
                found = self._check_sum(event, life, found, moment)
            found = self._check_again(event, life, found, moment)
        return found

    def _deferred(self, event: e.LookupDeferred, moment: Moment) -> list[Violation] | None:
        asked_at, asked = self._asked
        if asked is None or asked_at != event.cause or asked.request_id != event.request_id:
            return None
        return self._compare(asked, event, moment)

    def _compare(
        self, asked: e.LookupRequested, event: e.LookupAnswered | e.LookupDeferred, moment: Moment
    ) -> list[Violation] | None:
        if asked.num_computed_tokens == event.num_computed_tokens and asked.num_tokens == event.num_tokens:
            return None
        detail = (
            f"asked with {asked.num_computed_tokens} of {asked.num_tokens} tokens computed, "
            f"{event.id} for {event.num_computed_tokens} of {event.num_tokens}"
        )
        return [violation(self.rule, moment, detail, event.cause)]

    def _check_again(
        self,
        event: e.LookupAnswered,
        life: Life,
        found: list[Violation] | None,
        moment: Moment,
    ) -> list[Violation] | None:
        request_id, chunks, keys = event.request_id, self._model.chunks, life.keys
        tail = self._model.tails.saved(life)
        num_jobs = last_job_id = 0
        if self._forgets:  # what an answer counts may then depend on what is being loaded
            num_jobs, last_job_id = len(self._model.jobs), self._model.jobs.last_id
        now = _Circumstances(
            life.generation,
            event.num_computed_tokens,
            event.num_tokens,
            len(keys),
            keys[-1] if keys else b"",
            chunks.num_added,
            chunks.num_removed,
            0 if tail is None else tail.end_token,
            life.quarantined,
            num_jobs,
            last_job_id,
        )
        answer = (event.num_hit_tokens, event.num_external_tokens)
        before = self._answered.get(request_id)
        if before is not None and before[2] != answer and before[1] == now:
            detail = (
                f"a hit of {answer[0]} and an answer of {answer[1]}, though an equal lookup had given "
                f"{before[2][0]} and {before[2][1]} and nothing changed since"
            )
            found = [*(found or ()), violation(self.rule, moment, detail, before[0], event.cause)]
        self._answered[request_id] = (moment.sequence, now, answer)
        return found

    def _check_sum(
        self,
        event: e.LookupAnswered,
        life: Life,
        found: list[Violation] | None,
        moment: Moment,
    ) -> list[Violation] | None:
        num_tokens, num_computed_tokens = event.num_tokens, event.num_computed_tokens
        gets_nothing = life.quarantined or life.computes_first
        usable = 0 if gets_nothing else self._model.usable_tokens(life, event.num_hit_tokens)
        expected = max(0, min(usable, num_tokens - 1) - num_computed_tokens)
        if num_computed_tokens % self._model.configuration.block_size:
            expected = 0
        if event.num_external_tokens == expected:
            return found
        # Where groups see only a window, a load may have to end earlier; GROUP_AGREEMENT looks at where.
        is_less = self._forgets and 0 <= event.num_external_tokens < expected
        # A hit of every known token that is answered as it is leaves nothing to compute: LAST_TOKEN says so.
        is_whole = usable >= num_tokens == num_computed_tokens + event.num_external_tokens
        if is_less or is_whole:
            return found
        detail = (
            f"answered {event.num_external_tokens}, but a usable hit of {usable} of {num_tokens} tokens "
            f"with {num_computed_tokens} computed gives {expected}"
        )
        return [*(found or ()), violation(self.rule, moment, detail, event.cause)]
