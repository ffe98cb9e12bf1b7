"""LOOKUP_PURE: an answer depends on what is cached and on this call, never on how often was asked."""

from __future__ import annotations

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.lives import Life
from kvledger.lifecycle.audit.model.moment import on


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


class LookupPure(Checker):
    """k lookups equal one, and each answer is computed against the `num_computed_tokens` of its own call.

    Verifies: answer = max(0, min(usable part of the recorded hit, num_tokens - 1) - num_computed_tokens), and 0
    for a local hit that ends inside a block; an answer of 0 is not asynchronous; the answer repeats the question; two
    lookups of a request between which nothing it depends on changed give the same hit and the same answer.
    Does not verify: whether the last token is left to compute (LAST_TOKEN), nor whether the recorded hit is there
    (RESET_EPOCH and LOADABLE_AFTER_COMMIT see what is promised and not there; deciding again sees every other
    difference).
    """

    rule = "LOOKUP_PURE"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._asked: tuple[int, e.LookupRequested | None] = (0, None)
        self._answered: dict[str, tuple[int, _Circumstances, tuple[int, int]]] = {}
        model.forgotten.at(LIFE, self._answered)
        self._forgets = model.geometry.windows.forget

    @on(e.LookupRequested)
    def _requested(self, event: e.LookupRequested) -> None:
        self._asked = (self.moment.sequence, event)

    @on(e.LookupAnswered)
    def _check(self, event: e.LookupAnswered) -> None:
        asked_at, asked = self._asked
        if asked is not None and asked_at == event.cause and asked.request_id == event.request_id:
            self._compare(asked, event)
        if event.is_async and not event.num_external_tokens:
            self.broken("asynchronous, with nothing to load", event.cause)
        life = self.moment.life
        if life is not None:
            # What nothing is known of is answered with nothing: no sum to be made.
            if event.num_hit_tokens or event.num_external_tokens or event.num_computed_tokens < 0:
                self._check_sum(event, life)
            self._check_again(event, life)

    @on(e.LookupDeferred)
    def _deferred(self, event: e.LookupDeferred) -> None:
        asked_at, asked = self._asked
        if asked is not None and asked_at == event.cause and asked.request_id == event.request_id:
            self._compare(asked, event)

    def _compare(self, asked: e.LookupRequested, event: e.LookupAnswered | e.LookupDeferred) -> None:
        if asked.num_computed_tokens != event.num_computed_tokens or asked.num_tokens != event.num_tokens:
            detail = (
                f"asked with {asked.num_computed_tokens} of {asked.num_tokens} tokens computed, "
                f"{event.id} for {event.num_computed_tokens} of {event.num_tokens}"
            )
            self.broken(detail, event.cause)

    def _check_again(self, event: e.LookupAnswered, life: Life) -> None:
        request_id, chunks, keys = event.request_id, self.chunks, life.keys
        tail = self.tails.saved(life)
        num_jobs = last_job_id = 0
        if self._forgets:  # what an answer counts may then depend on what is being loaded
            num_jobs, last_job_id = len(self.jobs), self.jobs.last_id
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
            self.broken(detail, before[0], event.cause)
        self._answered[request_id] = (self.moment.sequence, now, answer)

    def _check_sum(self, event: e.LookupAnswered, life: Life) -> None:
        num_tokens, num_computed_tokens = event.num_tokens, event.num_computed_tokens
        gets_nothing = life.quarantined or life.computes_first
        usable = 0 if gets_nothing else self.model.usable_tokens(life, event.num_hit_tokens)
        expected = max(0, min(usable, num_tokens - 1) - num_computed_tokens)
        if num_computed_tokens % self.configuration.block_size:
            expected = 0
        if event.num_external_tokens == expected:
            return
        # Where groups see only a window, a load may have to end earlier; GROUP_AGREEMENT looks at where.
        is_less = self._forgets and 0 <= event.num_external_tokens < expected
        # A hit of every known token that is answered as it is leaves nothing to compute: LAST_TOKEN says so.
        is_whole = usable >= num_tokens == num_computed_tokens + event.num_external_tokens
        if not is_less and not is_whole:
            detail = (
                f"answered {event.num_external_tokens}, but a usable hit of {usable} of {num_tokens} tokens "
                f"with {num_computed_tokens} computed gives {expected}"
            )
            self.broken(detail, event.cause)
