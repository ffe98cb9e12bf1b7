"""Order inside the workers: when copies begin and end, and that none is forgotten."""

from __future__ import annotations

from typing import Final

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.copy_moments import CopyMoments, Hook, Moment
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.copies import Settled
from kvledger.lifecycle.reader.records import Copy

_STEPS_IN_FLIGHT: Final = 2
"""Maximum number of steps that vLLM has in flight, besides one for each rank of a pipeline (`config/vllm.py`,
max_concurrent_batches, 0.32). The outputs of these steps may be missing at the end of a log."""
_MAX_STEPS: Final = 64
"""Number of steps for which the order of copies is remembered. Reports of earlier steps come only if the device is far
behind."""
_NEVER: Final = (0, 0)
_Numbers = dict[int, tuple[int, int]]
"""Rank → (number in the step, job id)."""


class CopyInTime(Checker):
    """COPY_IN_TIME: a copy begins and ends at its place in a step, and no step leaves out one of its copies.

    A step begins with the saves of blocks that the step may overwrite, and waits for copies that must end first. Then
    the step's loads begin. The step's other saves begin after the forward.

    A copy counts as ended when it is done, or when the device is certain to run all later work after the copy.

    Verifies: of each reported copy, if the log has the moments at which it began and ended:

    - A copy began in the step that handed it out: in `handle_preemptions` if the copy is a save before the forward, in
      `start_load_kv` if it is a load, else in `wait_for_save`.
    - A copy that is not asynchronous ended in the hook in which it began.
    - If a step waits for a copy, the copy ended in that step's `handle_preemptions` or earlier.
    - A load, or a save after the forward, began after the end of the copies that had to precede it.

    When a rank sends the output of a step, it has reported all copies that it was asked about, and all copies of the
    step that are not asynchronous. A save after the forward may be missing until the output of the next step. Copies
    that `step.reported` lists as still in flight are exempt.

    Does not verify: copies that were never reported, if no rank reported a later step (LIVENESS, SETTLED_AT_CLOSE); how
    soon the end of an asynchronous copy is reported; that the device kept the order; whether vLLM called
    `start_load_kv` before the forward.
    """

    rule = "COPY_IN_TIME"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._preceding: dict[int, _Numbers] = {}
        """Sequence number of a step's `EffectsDelivered` → by rank, the last end of copies that must precede others."""
        self._following: dict[int, _Numbers] = {}
        """Sequence number of a step's `EffectsDelivered` → by rank, the first begin of these other copies."""
        self._missing: set[int] = set()
        """Jobs in flight that were reported as missing."""

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported) -> None:
        moments = CopyMoments.of_fields(event.moments)
        if moments is None or event.withheld:
            return
        ranks = (*event.ranks_done, *event.ranks_failed)
        for job_id in event.job_ids:
            job = self.copies.get(job_id)
            if job is not None and job.delivered_at:
                detail = _wrong_moment(job, moments) or self._wrong_order(job, moments, ranks)
                if detail:
                    what = f"job {job_id}, {_kind(job)}, of ranks {sorted(ranks)}: {detail}"
                    self.broken(what, job.sequence, job.delivered_at, request_id=job.request_id)

    def _wrong_order(self, job: Copy, moments: CopyMoments, ranks: tuple[int, ...]) -> str:
        began, ended = moments
        detail = ""
        for rank in ranks:
            if job.is_before_forward or (job.awaited_at and ended.delivered == job.awaited_at):
                detail = detail or self._ended(ended, rank, job.job_id)
            if not job.is_before_forward:
                detail = detail or self._began(began, rank, job.job_id)
        return detail

    def _ended(self, ended: Moment, rank: int, job_id: int) -> str:
        last = _of(self._preceding, ended.delivered)
        if last.get(rank, _NEVER)[0] < ended.number:
            last[rank] = ended.number, job_id
        number, other = self._following.get(ended.delivered, {}).get(rank, _NEVER)
        return f"it had to end before job {other} began, but ended later" if 0 < number < ended.number else ""

    def _began(self, began: Moment, rank: int, job_id: int) -> str:
        first = _of(self._following, began.delivered)
        if not 0 < first.get(rank, _NEVER)[0] < began.number:
            first[rank] = began.number, job_id
        number, other = self._preceding.get(began.delivered, {}).get(rank, _NEVER)
        return f"it had to begin after job {other} ended, but began earlier" if began.number < number else ""

    @on(e.StepReported)
    def _step_reported(self, event: e.StepReported) -> None:
        ranks = self.copies.every_rank.intersection(event.ranks)
        for job_id, job in self.copies:
            if not _is_due(job, event.delivered) or job_id in event.under_way:
                continue
            missing = sorted(ranks - job.ranks_done - job.ranks_failed)
            if missing and job_id not in self._missing:
                self._missing.add(job_id)
                step = "output that they sent after they were asked about it" if job.asked_at else "output of its step"
                detail = f"job {job_id}, {_kind(job)}, is not among the reports of ranks {missing} with the {step}"
                self.broken(detail, job.sequence, job.asked_at or job.delivered_at, request_id=job.request_id)

    @on(e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed)
    def _settled(self, event: Settled) -> None:
        self._missing.discard(event.job_id)


def _of(by_step: dict[int, _Numbers], delivered: int) -> _Numbers:
    found = by_step.setdefault(delivered, {})
    if len(by_step) > _MAX_STEPS:
        del by_step[next(iter(by_step))]
    return found


def _is_due(job: Copy, delivered: int) -> bool:
    """Whether ranks must have reported the job when they send the output of the step with this `EffectsDelivered`."""
    if 0 < job.asked_at <= delivered:
        return True
    if job.is_async or not job.delivered_at:
        return False
    # With a drafter, vLLM may get the output of a step before its saves after the forward.
    is_reported_with_step = job.is_load or job.is_before_forward
    return job.delivered_at <= delivered if is_reported_with_step else job.delivered_at < delivered


def _kind(job: Copy) -> str:
    name = "load" if job.is_load else "save"
    return f"asynchronous {name}" if job.is_async else name + " before the forward" * job.is_before_forward


def _hook_of(job: Copy) -> Hook:
    """Return the hook in which the copy must begin."""
    if job.is_load:
        return Hook.START_LOAD_KV
    return Hook.HANDLE_PREEMPTIONS if job.is_before_forward else Hook.WAIT_FOR_SAVE


def _wrong_moment(job: Copy, moments: CopyMoments) -> str:
    """Return, in words, what is wrong with the moments of one copy; empty if nothing is wrong."""
    began, ended = moments
    if began.delivered != job.delivered_at:
        return f"it began in the step of event {began.delivered}, but was handed out with event {job.delivered_at}"
    hook = _hook_of(job)
    if began.hook != hook:
        return f"it began in {began.hook_name} of its step, not in {hook.name.lower()}"
    if not job.is_async and (ended.delivered, ended.hook) != (began.delivered, hook):
        return f"its step did not wait for it: it ended in {_place(ended, began.delivered)}"
    if job.awaited_at and (ended.delivered, ended.hook) > (job.awaited_at, Hook.HANDLE_PREEMPTIONS):
        where = _place(ended, job.awaited_at)
        return f"the step of event {job.awaited_at} had to wait for it before the forward, but it ended in {where}"
    return ""


def _place(moment: Moment, delivered: int) -> str:
    return f"{moment.hook_name} of {'that step' if moment.delivered == delivered else f'event {moment.delivered}'}"


class SettledAtClose(Checker):
    """SETTLED_AT_CLOSE: when the log is closed, every copy that a step waited for is reported.

    Verifies: at the note "connector shut down", each rank has reported each copy that is not asynchronous. Copies of
    the last steps are exempt, because vLLM may not have processed the outputs of these steps. The rule is checked only
    if the log records such outputs (`step.reported`).
    Does not verify: asynchronous copies, which a shutdown may interrupt; logs without the note "connector shut down";
    copies in flight of a released request (RELEASE_ALL).
    """

    rule = "SETTLED_AT_CLOSE"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._has_outputs = False
        self._under_way: frozenset[int] = frozenset()

    @on(e.StepReported)
    def _step_reported(self, event: e.StepReported) -> None:
        self._has_outputs = True
        self._under_way = frozenset(event.under_way)

    @on(e.LogNote)
    def _noted(self, event: e.LogNote) -> None:
        if event.text != e.SHUT_DOWN or not self._has_outputs:
            return
        last_step = self.lives.num_steps - _STEPS_IN_FLIGHT - len(self.copies.every_rank)
        for job_id, job in self.copies:
            if job.is_async or not job.delivered_at or job.delivered_step >= last_step or job_id in self._under_way:
                continue
            missing = sorted(self.copies.every_rank - job.ranks_done - job.ranks_failed)
            if missing:
                detail = f"the log is closed, and ranks {missing} never reported job {job_id}, {_kind(job)}"
                self.broken(detail, job.sequence, job.delivered_at, request_id=job.request_id)
