"""ROLLBACK_OBSERVED: a request whose load failed goes back behind what was to be loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import JobsInFlight
from kvledger.lifecycle.audit.model.lives import Lives
from kvledger.lifecycle.audit.model.moment import Check, Moment
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


class RollbackObserved:
    """No request goes on counting tokens as computed that a rank has reported it could not load.

    Verifies: at the first step after a load within a step failed (one that was not handed out: after vLLM heard of it),
    that the request was rolled back behind the load's end, preempted, looked up again or ended since the load was
    issued, or counts less by itself.
    Does not verify: loads beside the steps, whose requests have not begun; loads given up because nobody spoke of them;
    that vLLM hears of one that was not handed out.
    """

    rule: ClassVar[str] = "ROLLBACK_OBSERVED"

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._jobs: JobsInFlight
        self._lives: Lives

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._jobs, self._lives = model.jobs, model.lives
        return [
            (e.StepScheduled, self._step_scheduled),
            (e.LoadIssued, self._issued),
            (e.LoadCompleted, self._completed),
            (e.LoadFailed, self._failed),
            (e.LoadErrorsObserved, self._load_errors_observed),
            (e.TokensRolledBack, self._rolled_back),
            (e.RequestPreempted, self._given_up),
            (e.RequestFinished, self._given_up),
            (e.LookupRequested, self._given_up),
            (e.RequestArrived, self._given_up),
            (e.RequestReleased, self._given_up),
        ]

    def _step_scheduled(self, event: e.StepScheduled, moment: Moment) -> Iterator[Violation] | None:
        if not self._loads or not any(load.failed_at for load in self._loads.values()):
            return None
        return self._check_step(event, moment)

    def _issued(self, event: e.LoadIssued, moment: Moment) -> None:
        if not event.is_async:
            end_token = event.first_token + event.num_tokens
            self._loads[event.job_id] = _Load(moment.sequence, event.request_id, end_token, event.block_ids)

    def _completed(self, event: e.LoadCompleted, _moment: Moment) -> None:
        self._loads.pop(event.job_id, None)

    def _failed(self, event: e.LoadFailed, moment: Moment) -> None:
        if event.cause != self._jobs.failure_sequence:
            self._loads.pop(event.job_id, None)
        elif event.job_id in self._loads and self._jobs.is_withheld:
            self._loads[event.job_id].reported_late_at = moment.sequence
        elif event.job_id in self._loads:
            self._loads[event.job_id].failed_at = moment.sequence

    def _load_errors_observed(self, event: e.LoadErrorsObserved, _moment: Moment) -> None:
        for load in self._loads.values():
            if load.reported_late_at and not set(event.block_ids).isdisjoint(load.block_ids):
                load.failed_at = load.reported_late_at

    def _rolled_back(self, event: e.TokensRolledBack, _moment: Moment) -> None:
        self._forget(event.request_id, event.num_computed_tokens)

    def _given_up(self, event: e.RequestEvent, _moment: Moment) -> None:
        if self._loads:
            self._forget(event.request_id, 0)

    def _forget(self, request_id: str, num_computed_tokens: int) -> None:
        for job_id in [
            job_id
            for job_id, load in self._loads.items()
            if load.request_id == request_id and num_computed_tokens < load.end_token
        ]:
            del self._loads[job_id]

    def _check_step(self, event: e.StepScheduled, moment: Moment) -> Iterator[Violation]:
        told = {ordinal: num_computed_tokens for ordinal, num_computed_tokens, _, _ in event.advanced}
        for job_id, load in [(job_id, load) for job_id, load in self._loads.items() if load.failed_at]:
            del self._loads[job_id]
            life = self._lives.get(load.request_id)
            if life is None or life.blocks is BlocksRegion.NONE:
                continue
            # Drafts that are taken back are not recorded, but told: then the step itself says where it begins.
            num_computed_tokens = told.get(life.ordinal, self._lives.num_computed_tokens(life))
            if num_computed_tokens >= load.end_token:
                detail = (
                    f"load {job_id} of tokens to {load.end_token} failed, "
                    f"but the request goes on with {num_computed_tokens} tokens computed"
                )
                yield violation(self.rule, moment, detail, load.sequence, load.failed_at, request_id=load.request_id)
