"""ROLLBACK_OBSERVED: a request whose load failed goes back behind what was to be loaded."""

from __future__ import annotations

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.states import BlocksRegion


@attrs.define
class _Load:
    sequence: int
    request_id: str
    end_token: int
    block_ids: tuple[int, ...]
    failed_at: int = 0
    reported_late_at: int = 0
    """Sequence of a failure that vLLM hears of only with the blocks; until then it may have scheduled more steps."""


class RollbackObserved(Checker):
    """No request goes on counting tokens as computed that a rank has reported it could not load.

    Verifies: at the first step after a load within a step failed (one that was not handed out: once vLLM had it),
    that the request was rolled back behind the load's end, preempted, looked up again or ended since the load was
    issued, or counts less by itself.
    Does not verify: asynchronous loads, whose requests have not begun; loads given up because no rank reported them;
    that vLLM hears of one that was not handed out.
    """

    rule = "ROLLBACK_OBSERVED"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._loads: dict[int, _Load] = {}

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if self._loads and any(load.failed_at for load in self._loads.values()):
            self._check_step(event)

    @on(e.LoadIssued)
    def _issued(self, event: e.LoadIssued) -> None:
        if not event.is_async:
            end_token = event.first_token + event.num_tokens
            self._loads[event.job_id] = _Load(self.moment.sequence, event.request_id, end_token, event.block_ids)

    @on(e.LoadCompleted)
    def _completed(self, event: e.LoadCompleted) -> None:
        self._loads.pop(event.job_id, None)

    @on(e.LoadFailed)
    def _failed(self, event: e.LoadFailed) -> None:
        if event.cause != self.jobs.failure_sequence:
            self._loads.pop(event.job_id, None)
        elif event.job_id in self._loads and self.jobs.is_withheld:
            self._loads[event.job_id].reported_late_at = self.moment.sequence
        elif event.job_id in self._loads:
            self._loads[event.job_id].failed_at = self.moment.sequence

    @on(e.LoadErrorsObserved)
    def _load_errors_observed(self, event: e.LoadErrorsObserved) -> None:
        for load in self._loads.values():
            if load.reported_late_at and not set(event.block_ids).isdisjoint(load.block_ids):
                load.failed_at = load.reported_late_at

    @on(e.TokensRolledBack)
    def _rolled_back(self, event: e.TokensRolledBack) -> None:
        self._forget(event.request_id, event.num_computed_tokens)

    @on(e.RequestPreempted, e.RequestFinished, e.LookupRequested, e.RequestArrived, e.RequestReleased)
    def _given_up(self, event: e.RequestEvent) -> None:
        if self._loads:
            self._forget(event.request_id, 0)

    def _forget(self, request_id: str, num_computed_tokens: int) -> None:
        for job_id in [
            job_id
            for job_id, load in self._loads.items()
            if load.request_id == request_id and num_computed_tokens < load.end_token
        ]:
            del self._loads[job_id]

    def _check_step(self, event: e.StepScheduled) -> None:
        known = {ordinal: num_computed_tokens for ordinal, num_computed_tokens, _, _ in event.advanced}
        for job_id, load in [(job_id, load) for job_id, load in self._loads.items() if load.failed_at]:
            del self._loads[job_id]
            life = self.lives.get(load.request_id)
            if life is None or life.blocks is BlocksRegion.NONE:
                continue
            # Drafts that are taken back have no event of their own: then the step itself says where it begins.
            num_computed_tokens = known.get(life.ordinal, self.lives.num_computed_tokens(life))
            if num_computed_tokens >= load.end_token:
                detail = (
                    f"load {job_id} of tokens to {load.end_token} failed, "
                    f"but the request goes on with {num_computed_tokens} tokens computed"
                )
                self.broken(detail, load.sequence, load.failed_at, request_id=load.request_id)
