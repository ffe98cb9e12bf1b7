"""Makes the recorded calls again, one by one. The code under test may make other decisions than the recorded ones.

The recorded scheduler and workers reacted to the recorded decisions, so this module adapts the recording:
- If a lookup now gets a smaller answer, the scheduler loads fewer tokens.
- A report about a recorded job becomes a report about the new job that was issued for the same reason.
- A recorded job that is not issued now is not reported. A job that the recording lacks is reported as done.

This module depends on events and a recording only.
"""

from __future__ import annotations

from collections import defaultdict

from kvledger.adapters.lab.repro.calls import HookCall, hook_calls
from kvledger.adapters.lab.repro.outcome import Rerun
from kvledger.adapters.lab.repro.recording import Recording, changed, of_jobs
from kvledger.lifecycle import CopyMoments, Core
from kvledger.lifecycle import events as e


class Run:
    """One rerun of a recording."""

    def __init__(self, recording: Recording, core: Core) -> None:
        self._recording = recording
        self._outcome = Rerun(recording.configuration, core)
        self._waiting: dict[tuple[int, str], list[int]] = defaultdict(list)
        for job_id, job in sorted(recording.jobs.items()):
            self._waiting[job.cause, job.request_id].append(job_id)
        self._present: dict[int, int] = {}
        self._unrecorded: list[int] = []
        self._overdue: list[int] = []
        self._shortfall: dict[str, int] = {}
        self._deliveries: dict[int, int] = {}
        """Recorded delivery to the workers → the delivery of this rerun that replaces it; sequence numbers."""

    def run(self) -> Rerun:
        """Make all calls, then finish the audit."""
        calls, left_over = hook_calls(self._recording.observations)
        self._outcome.left_out += [f"event {sequence} ({event.id})" for sequence, event in left_over]
        hook, sequence = "the start", 1
        for call in calls:
            hook, sequence = call.hook, call.sequence
            if not self._make(call):
                break
        self._outcome.finish(hook, sequence)
        return self._outcome

    def _make(self, call: HookCall) -> bool:
        """Make a call and take the events that it wrote. Return whether the engine continues after the call."""
        raise NotImplementedError

    # --- different decisions ----------------------------------------------------------------------

    def _answered(self, request_id: str, sequence: int, num_external_tokens: int | None) -> None:
        """Record the answer that a lookup got in this rerun.

        Args:
            request_id: the request that was looked up.
            sequence: sequence number of the lookup in the recording.
            num_external_tokens: tokens in the answer; None: a deferral.
        """
        recorded = self._recording.answers.get(sequence, 0)
        if num_external_tokens != recorded:
            self._outcome.other_answers.append(
                f"{request_id} gets {num_external_tokens} tokens in the lookup of event {sequence}, not {recorded}"
            )
        self._shortfall[request_id] = max(0, (recorded or 0) - (num_external_tokens or 0))

    def _loadable(self, event: e.BlocksAllocated) -> int:
        """Return how many of the tokens that the recorded scheduler loaded can be loaded in this rerun."""
        return max(0, event.num_external_tokens - self._shortfall.pop(event.request_id, 0))

    def _issued(self, job: e.LoadIssued | e.SaveIssued | e.TailSaveIssued, recorded_cause: int) -> None:
        """Match a job of this rerun to a recorded job that was issued for the same reason.

        Args:
            job: the decision that issued the job.
            recorded_cause: sequence number, in the recording, of the observation because of which it was issued.
        """
        waiting = self._waiting.get((recorded_cause, job.request_id))
        if waiting:
            self._present[waiting.pop(0)] = job.job_id
        else:
            self._unrecorded.append(job.job_id)

    def _job(self, recorded_job_id: int) -> int | None:
        """Return the id that a recorded job has in this rerun; None if this rerun did not issue it."""
        if recorded_job_id not in self._recording.jobs:
            return recorded_job_id  # not issued in the recording, either
        return self._present.get(recorded_job_id)

    def _of_present_jobs(self, report: e.TransferReported) -> e.TransferReported | None:
        """Return the report with the ids that its jobs have in this rerun; None if this rerun issued none of them."""
        present = {job_id: self._job(job_id) for job_id in report.job_ids}
        left = of_jobs(report, {job_id: now for job_id, now in present.items() if now is not None})
        return None if left is None else changed(left, moments=self._present_moments(report))

    def _present_moments(self, report: e.TransferReported) -> tuple[int, ...]:
        """Return when the reported copy begins and ends in this rerun; empty if this is not known."""
        moments = CopyMoments.of_fields(report.moments)
        if moments is None:
            return ()
        began, ended = (moment._replace(delivered=self._deliveries.get(moment.delivered, 0)) for moment in moments)
        return CopyMoments(began, ended).as_fields() if began.delivered and ended.delivered else ()

    def _present_output(self, step: e.StepReported) -> e.StepReported | None:
        """Return the report about this rerun's step in place of the recorded step; None if there is no such step.

        A job that only this rerun issued counts as in flight. `_overdue_reports` reports it later.
        """
        delivered = self._deliveries.get(step.delivered)
        if delivered is None:
            return None
        under_way = [now for job_id in step.under_way if (now := self._job(job_id)) is not None]
        return changed(step, delivered=delivered, under_way=(*under_way, *self._overdue, *self._unrecorded))

    def _overdue_reports(self, time_ns: int) -> list[e.TransferReported]:
        """Return reports about jobs that only this rerun issued. They count as done one step after they were issued."""
        ranks = range(self._recording.configuration.num_ranks)
        reports = [e.TransferReported.by(ranks, job_id, time_ns) for job_id in self._overdue]
        self._overdue, self._unrecorded = self._unrecorded, []
        return reports
