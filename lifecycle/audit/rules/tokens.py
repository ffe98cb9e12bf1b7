"""Tokens: how many tokens are claimed, loaded, scheduled and left to compute."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.forgotten import LIFE
from kvledger.lifecycle.reader.records import NEVER, Answer, Life
from kvledger.lifecycle.states import BlocksRegion


class LastToken(Checker):
    """LAST_TOKEN: a load leaves at least the last token to compute, because the engine needs its logits.

    Verifies: an answer does not offer the last known token, even if the hit covers it. A load does not fill the last
    known token. At the first step after an allocation, at least one token is still to compute.
    Does not verify: that the engine computed the last token.
    """

    rule = "LAST_TOKEN"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._admitted: dict[str, int] = {}
        """Request id → sequence number of the last allocation, until a step schedules the request."""
        model.forgotten.at((*LIFE, e.RequestPreempted), self._admitted)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        if event.num_computed_tokens + event.num_external_tokens == event.num_tokens <= event.num_hit_tokens:
            detail = f"the answer covers all {event.num_tokens} tokens, but the last one must be computed"
            self.broken(detail, event.cause)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        if self.moment.life is not None:
            self._admitted[event.request_id] = self.moment.sequence

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        life, end_token = self.moment.life, event.first_token + event.num_tokens
        if life is not None and end_token > life.num_tokens - 1:
            detail = f"the load fills tokens up to {end_token} of {life.num_tokens}, but the last one must be computed"
            self.broken(detail, event.cause)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        for ordinal, num_computed_tokens, _, num_tokens in event.advanced:
            life = self.lives.of(ordinal)
            sequence = None if life is None else self._admitted.pop(life.request_id, None)
            if sequence is not None and life is not None and num_computed_tokens > num_tokens - 1:
                detail = f"the request starts with {num_computed_tokens} of {num_tokens} tokens computed"
                self.broken(detail, sequence, request_id=life.request_id)


class AllocMatchesLookup(Checker):
    """ALLOC_MATCHES_LOOKUP: the scheduler claims at most the offered tokens, in the life to which they were offered.

    Verifies: before an allocation that claims external tokens, an answer offered at least as many tokens to the same
    generation. No other allocation has claimed that answer, and no preemption or reset has cancelled it. A load reads
    exactly the claimed tokens, beginning with the first offered token. A load is asynchronous if and only if its answer
    was asynchronous: vLLM schedules the request at once after a synchronous answer, and waits for the load's end after
    an asynchronous one.
    Does not verify: whether the answer was right (LOOKUP_PURE); whether the tokens can still be loaded
    (LOADABLE_AFTER_COMMIT).
    """

    rule = "ALLOC_MATCHES_LOOKUP"

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        allocation = self.answers.allocation(event.request_id)
        if event.num_external_tokens and self.moment.life is not None and allocation is not None:
            self._check_allocation(event, allocation.answer, self.moment.life)

    def _check_allocation(self, event: e.BlocksAllocated, answer: Answer | None, life: Life) -> None:
        if answer is None:
            self.broken(f"{event.num_external_tokens} external tokens were claimed, but no answer offered them")
            return
        if answer.life != life.name:
            detail = (
                f"{event.num_external_tokens} external tokens were claimed in generation {life.generation} of life "
                f"{life.ordinal}, but the answer was for generation {answer.life[2]} of life {answer.life[1]}"
            )
            self.broken(detail, answer.sequence)
            return
        num_answered = answer.event.num_external_tokens
        if not min(0, num_answered) <= event.num_external_tokens <= num_answered:
            detail = f"{event.num_external_tokens} external tokens were claimed, but {num_answered} had been offered"
            self.broken(detail, answer.sequence)

    @on(e.LoadIssued)
    def _check_load(self, event: e.LoadIssued) -> None:
        allocation = self.answers.allocation(event.request_id)
        if allocation is None or allocation.num_external_tokens == 0:
            return  # EXTERNAL_ZERO_NO_LOAD reports a load without a claim
        answer = allocation.answer
        first_token = 0 if answer is None else answer.event.num_computed_tokens
        if (event.first_token, event.num_tokens) != (first_token, allocation.num_external_tokens):
            detail = (
                f"{event.num_tokens} tokens are loaded from token {event.first_token} on, "
                f"but {allocation.num_external_tokens} tokens from token {first_token} on were claimed"
            )
            self.broken(detail, allocation.sequence)
        if answer is not None and event.is_async is not answer.event.is_async:
            how = ("a synchronous load", "an asynchronous load")
            detail = f"{how[event.is_async]} was issued, but the answer was for {how[answer.event.is_async]}"
            self.broken(detail, answer.sequence, allocation.sequence)


class ExternalZeroNoLoad(Checker):
    """EXTERNAL_ZERO_NO_LOAD: an allocation that claims no external tokens causes no load.

    Every allocation, even one that claims no external tokens, ends the promise of the request's last answer.

    Verifies: every load follows an allocation of its request that claimed external tokens. Between the two, the request
    was not preempted, did not end, and did not continue with a session's next turn. Each allocation causes at most one
    load.
    Does not verify: that claimed tokens are loaded (a missing load shows as a divergence); that an answer is claimed
    only once (ALLOC_MATCHES_LOOKUP).
    """

    rule = "EXTERNAL_ZERO_NO_LOAD"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._used: dict[str, int] = {}
        """Request id → sequence number of the last allocation for which a load was issued."""
        model.forgotten.at((*LIFE, e.RequestPreempted), self._used)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        allocation = self.answers.allocation(event.request_id)
        sequence = 0 if allocation is None else allocation.sequence
        is_claimed = allocation is not None and allocation.num_external_tokens > 0
        if is_claimed and self._used.get(event.request_id) != sequence:
            self._used[event.request_id] = sequence
            return
        detail = f"load {event.job_id} of {event.num_tokens} tokens is issued, but no allocation claimed tokens"
        self.broken(detail, sequence)


class TokenConservation(Checker):
    """TOKEN_CONSERVATION: at admission every token is in vLLM's prefix cache, is loaded, or is still to compute.

    Verifies: of the counts in a log:

    - After an allocation that claimed external tokens, the request's first step begins at the first token that is
      neither local (in vLLM's prefix cache) nor external. If all known tokens are local or external, the step computes
      the last token again (`v1/core/sched/scheduler.py`, _update_waiting_for_remote_kv, 0.32). This is not checked if
      the request was rolled back before that step, or if a load into blocks of the request failed. That load may have
      been issued for another request that shares these blocks.
    - No token count in a step or in the answer to a lookup is negative.
    - `prefill.advanced` and `prefill.completed` have the numbers of computed tokens and of known tokens that a reader
      counts in the recorded steps. The event is `prefill.completed` if and only if no known token remains to compute.

    Does not verify: later steps of the request, because rejected drafts reduce its computed tokens without an event;
    admissions that claimed nothing, because the connector gets their number of local tokens rounded to whole blocks.
    """

    rule = "TOKEN_CONSERVATION"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._admissions: dict[str, tuple[int, int, int]] = {}
        """Request id → (sequence number of the allocation, local tokens, external tokens), until its next step."""
        model.forgotten.at((*LIFE, e.RequestPreempted, e.SessionContinued, e.RequestFinished), self._admissions)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        if event.num_computed_tokens < 0 or event.num_external_tokens < 0 or event.num_hit_tokens < 0:
            self.broken("the answer to a lookup has a negative count", event.cause)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        allocation = self.answers.allocation(event.request_id)
        answer = None if allocation is None else allocation.answer
        # ALLOC_MATCHES_LOOKUP reports a claim of more than was answered. Its sum means nothing.
        if answer is not None and 0 < event.num_external_tokens <= answer.event.num_external_tokens:
            admission = (self.moment.sequence, answer.event.num_computed_tokens, event.num_external_tokens)
            self._admissions[event.request_id] = admission

    @on(e.PrefillAdvanced, e.PrefillCompleted)
    def _progress(self, event: e.PrefillAdvanced | e.PrefillCompleted) -> None:
        life = self.moment.life
        if life is None:
            return
        counted = self.lives.num_computed_tokens(life)
        is_complete = event.num_computed_tokens >= event.num_tokens
        if event.num_computed_tokens != counted:
            detail = f"{event.id} has {event.num_computed_tokens} computed tokens, but the steps add up to {counted}"
        elif event.num_tokens != life.num_tokens:
            detail = f"{event.id} has {event.num_tokens} known tokens, but the steps have {life.num_tokens}"
        elif is_complete is not isinstance(event, e.PrefillCompleted):
            detail = (
                f"{event.id} is the wrong event: {event.num_computed_tokens} of {event.num_tokens} tokens are computed"
            )
        else:
            return
        self.broken(detail, event.cause)

    @on(e.LoadFailed, e.TokensRolledBack)
    def _forget(self, event: e.RequestEvent) -> None:
        self._admissions.pop(event.request_id, None)

    @on(e.LoadErrorsObserved)
    def _load_errors_observed(self, event: e.LoadErrorsObserved) -> None:
        """Forget requests with unfilled blocks. vLLM rolls them back, even while they wait for a load (0.32)."""
        unfilled = frozenset(event.block_ids)
        for request_id in tuple(self._admissions):
            if not unfilled.isdisjoint(self.tables.held_by(self.lives.get(request_id))):
                del self._admissions[request_id]

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        for ordinal, num_computed_tokens, num_scheduled_tokens, num_tokens in event.advanced:
            life = self.lives.of(ordinal)
            if life is None:
                continue
            request_id = life.request_id
            if num_computed_tokens < 0 or num_scheduled_tokens < 0 or num_tokens < 0:
                detail = (
                    f"a count is negative: {num_scheduled_tokens} tokens scheduled, {num_computed_tokens} computed, "
                    f"{num_tokens} known"
                )
                self.broken(detail, request_id=request_id)
            if request_id not in self._admissions:
                continue
            sequence, num_local_tokens, num_external_tokens = self._admissions.pop(request_id)
            if num_computed_tokens != min(num_local_tokens + num_external_tokens, num_tokens - 1):
                detail = (
                    f"{num_local_tokens} local and {num_external_tokens} external tokens were admitted, "
                    f"but the step starts after {num_computed_tokens} tokens"
                )
                self.broken(detail, sequence, request_id=request_id)


class ResumeCoversOutput(Checker):
    """RESUME_COVERS_OUTPUT: a preempted request is looked up with all of its tokens, outputs included.

    Verifies: every lookup after a preemption has at least as many tokens as the engine counted at the preemption, and
    at least as many tokens as the steps before the preemption recorded.
    Does not verify: that the engine's count was complete, if no step has recorded more tokens.
    """

    rule = "RESUME_COVERS_OUTPUT"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._known: dict[str, tuple[int, int]] = {}
        """Request id → (tokens known at its last preemption, sequence number of that preemption)."""
        model.forgotten.at((*LIFE, e.SessionContinued), self._known)

    @on(e.LookupRequested)
    def _requested(self, event: e.LookupRequested) -> None:
        known = self._known.get(event.request_id)
        if known is not None and event.num_tokens < known[0]:
            num_known, sequence = known
            detail = f"the lookup has {event.num_tokens} tokens, but the request had {num_known} when it was preempted"
            self.broken(detail, sequence)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        if self.moment.life is not None:
            self._known[event.request_id] = max(self.moment.life.num_tokens, event.num_tokens), self.moment.sequence


class StepSum(Checker):
    """STEP_SUM: the tokens of a step are the sum of the tokens of its requests.

    The sum counts the tokens of the requests that the step's event lists, and one token for each steady request that
    the event leaves out.

    Verifies: the sum of every step. A wrong sum, for example because a request is missing or counts twice, is found at
    that step. The numbers of steps are consecutive.
    Does not verify: which request is missing or counts twice; two errors in one step that cancel out; requests that
    are missing after a hook has failed, because the request of that hook may never have been recorded.
    """

    rule = "STEP_SUM"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._may_be_hidden = False

    def begin(self) -> None:
        """Read from the audit's model whether a hook failed before the audit's start."""
        self._may_be_hidden = self.lives.has_hook_failed

    @on(e.HookFailed)
    def _hook_failed(self, _event: e.HookFailed) -> None:
        self._may_be_hidden = True

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        num_tokens, counted = event.num_scheduled_tokens, self.lives.num_scheduled_tokens
        num_before = self.lives.num_steps - 1
        if event.step != num_before:
            self.broken(f"the step has number {event.step} instead of {num_before}")
        elif num_tokens != counted and not (self._may_be_hidden and num_tokens > counted):
            self.broken(f"the step has {num_tokens} tokens, but its requests add up to {counted}")


class SettledExact(Checker):
    """SETTLED_EXACT: the numbers of computed and settled tokens in the log agree with the recorded steps.

    If too many tokens count as settled, a token may be saved before its KV is written. If too few tokens count as
    settled, a chunk may stay unsaved.

    Verifies: counts in events, against the tokens that steps have scheduled:

    - In a step, the number of a request's settled tokens is the number of tokens computed before the step, minus the
      number of these tokens in flight. `window.left` has this difference for the last step before the event.
      This is checked if the log has the number of tokens in flight, which the engine counts. Without sliding windows, a
      step counts only settled tokens of chunks with known keys.
    - If `request.preempted` or `request.finished` has the number of tokens in flight, all known tokens that are
      computed count as settled. With speculative decoding, the last known token and the tokens in flight do not count.
    - If `request.preempted` or `request.finished` lacks the number of tokens in flight, it has at most as many settled
      tokens as the steps have computed, or as were cached or loaded at the last allocation, whichever is more.
    - Without speculative decoding, no step counts more tokens of a request as computed than the request's earlier steps
      have computed.
    - A session's next turn or a rollback keeps at most as many tokens as were computed before it.

    Does not verify: how many tokens are in flight and how many drafts were rejected, which only the engine knows; the
    first step after an allocation (TOKEN_CONSERVATION); a request's end that records no settled tokens, if a hook
    failed for the request, because kvledger then gives up the request's blocks.
    """

    rule = "SETTLED_EXACT"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._may_be_given_up: dict[str, bool] = {}
        """Request id → True if a hook has failed for the request."""
        self._admitted: dict[str, int] = {}
        """Request id → tokens that the last allocation got from vLLM's prefix cache and from a load, together."""
        model.forgotten.at(LIFE, self._may_be_given_up, self._admitted)
        model.forgotten.at((e.SessionContinued,), self._admitted)

    def begin(self) -> None:
        """Read from the audit's model the allocations before the audit's start, and whether a hook had failed."""
        for life in self.lives:
            if self.lives.has_hook_failed:
                self._may_be_given_up[life.request_id] = True
            self._admit(life.request_id)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        self._admit(event.request_id)

    def _admit(self, request_id: str) -> None:
        allocation = self.answers.allocation(request_id)
        if allocation is not None:
            num_local_tokens = 0 if allocation.answer is None else allocation.answer.event.num_computed_tokens
            self._admitted[request_id] = num_local_tokens + allocation.num_external_tokens

    @on(e.HookFailed)
    def _hook_failed(self, event: e.HookFailed) -> None:
        if event.request_id:
            self._may_be_given_up[event.request_id] = True

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        num_admitted_tokens = self._admitted.pop(event.request_id, 0)
        if self.moment.life is None:
            return
        if event.num_in_flight_tokens == e.NOT_RECORDED:
            self._check_most(event, self.moment.life, num_admitted_tokens)
        else:
            self._check(event, self.moment.num_computed_tokens)

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished) -> None:
        num_admitted_tokens = self._admitted.pop(event.request_id, 0)
        if self.moment.life is None:
            return
        if e.NOT_RECORDED in {event.num_in_flight_tokens, event.num_computed_tokens}:
            self._check_most(event, self.moment.life, num_admitted_tokens)
        elif event.num_settled_tokens or event.request_id not in self._may_be_given_up:
            # vLLM also counts what another connector begins to load, on which no step has computed.
            self._check(event, min(self.moment.num_computed_tokens, event.num_computed_tokens))

    def _check_most(self, event: e.RequestPreempted | e.RequestFinished, life: Life, num_admitted_tokens: int) -> None:
        """Report an event with more settled tokens than its request can have, if the log lacks the tokens in flight.

        Requests without blocks are skipped, because they save nothing. Lives with missing events are skipped, because
        the counts for these lives are not exact.
        """
        if life.is_partial or not self.moment.is_legal or self.moment.blocks_before is BlocksRegion.NONE:
            return
        num_computed_tokens = self.moment.num_computed_tokens
        if event.num_settled_tokens > max(num_computed_tokens, num_admitted_tokens):
            loaded = f" and {num_admitted_tokens} were cached or loaded" if num_admitted_tokens else ""
            detail = f"{event.id} has {event.num_settled_tokens} settled tokens, but steps computed "
            self.broken(f"{detail}{num_computed_tokens}{loaded}")

    def _check(self, event: e.RequestPreempted | e.RequestFinished, num_computed_tokens: int) -> None:
        num_in_flight_tokens = event.num_in_flight_tokens
        if self.configuration.settles_in_flight:
            expected, less = min(num_computed_tokens, event.num_tokens), ""
        else:
            # Drafts beyond the known tokens may be rejected, and the last known token is computed next.
            expected = max(0, min(num_computed_tokens, event.num_tokens - 1) - num_in_flight_tokens)
            less = f", {num_in_flight_tokens} of them in flight"
        if event.num_settled_tokens != expected:
            of = f"{num_computed_tokens} computed tokens{less}, {event.num_tokens} known"
            self.broken(f"{event.num_settled_tokens} tokens are recorded as settled instead of {expected}: {of}")

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if self.configuration.settles_in_flight:
            for moved, counted, num_computed_tokens in self.moment.moved_rows:
                if counted and not moved.quarantined:
                    detail = (
                        f"the step begins at {num_computed_tokens} tokens, but the steps before it ended at {counted}"
                    )
                    self.broken(detail, request_id=moved.request_id)
        for ordinal, _, num_settled_tokens, num_in_flight_tokens in event.settled:
            life = self.lives.of(ordinal)
            if life is None or num_in_flight_tokens == e.NOT_RECORDED:
                continue
            num_computed_tokens = self.lives.num_computed_before_step(life)
            expected = num_computed_tokens - num_in_flight_tokens
            if not any(self.configuration.windows):
                expected = min(expected, len(life.keys) * self.configuration.chunk_size)
            if num_settled_tokens != expected:
                detail = (
                    f"{num_settled_tokens} tokens are recorded as settled instead of {expected}: "
                    f"{num_computed_tokens} computed tokens, {num_in_flight_tokens} of them in flight"
                )
                self.broken(detail, request_id=life.request_id)

    @on(e.WindowLeft)
    def _window_left(self, event: e.WindowLeft) -> None:
        life = self.moment.life
        if life is None or not self.moment.is_legal or event.num_in_flight_tokens == e.NOT_RECORDED:
            return
        if life.row[0] == NEVER == life.decoding_since:
            return  # the audit began after the step that scheduled it
        num_computed_tokens = self.lives.num_computed_before_step(life)
        if event.num_settled_tokens != num_computed_tokens - event.num_in_flight_tokens:
            detail = (
                f"{event.id} has {event.num_settled_tokens} settled tokens, but {num_computed_tokens} were computed "
                f"before the last step, {event.num_in_flight_tokens} of them in flight"
            )
            self.broken(detail)

    @on(e.SessionContinued, e.TokensRolledBack)
    def _cut(self, event: e.SessionContinued | e.TokensRolledBack) -> None:
        if self.moment.life is not None and event.num_computed_tokens > self.moment.num_computed_tokens:
            num_before = self.moment.num_computed_tokens
            self.broken(f"{event.num_computed_tokens} computed tokens are kept, but only {num_before} were computed")
