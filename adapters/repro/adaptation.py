"""Keeps a recorded story told where the code under test decides otherwise than the recorded code did.

The scheduler and the workers that were recorded reacted to the decisions of their time. Where today's answer is
smaller, the scheduler takes up less; reports go to the jobs that were issued for the same reason now; jobs that were
not issued are not reported, and jobs that are new are reported as done. It knows events and a recording only.
"""

from __future__ import annotations

from collections import defaultdict

from kvledger.adapters.repro.recording import Recording
from kvledger.lifecycle import events as e

_Job = e.LoadIssued | e.SaveIssued | e.TailSaveIssued


class Adaptation:
    """Translates what was recorded into what happens now."""

    def __init__(self, recording: Recording) -> None:
        self._recorded_answers = recording.answers
        self._waiting: dict[tuple[int, str], list[int]] = defaultdict(list)
        for job_id, reason in sorted(recording.jobs.items()):
            self._waiting[reason].append(job_id)
        self._recorded_jobs = frozenset(recording.jobs)
        self._present: dict[int, int] = {}
        self._unrecorded: list[int] = []
        self._shortfall: dict[str, int] = {}

    def answered(self, request_id: str, sequence: int, num_external_tokens: int) -> None:
        """The code under test answered the lookup that was recorded with this sequence number."""
        recorded = self._recorded_answers.get(sequence) or 0
        self._shortfall[request_id] = max(0, recorded - num_external_tokens)

    def taken_up(self, request_id: str, num_external_tokens: int) -> int:
        """How many of the recorded external tokens the scheduler can take up."""
        return max(0, num_external_tokens - self._shortfall.pop(request_id, 0))

    def issued(self, job: _Job, recorded_cause: int) -> None:
        """A job was issued, after the observation that was recorded with this sequence number."""
        waiting = self._waiting.get((recorded_cause, job.request_id))
        if waiting:
            self._present[waiting.pop(0)] = job.job_id
        else:
            self._unrecorded.append(job.job_id)

    def job(self, recorded_job_id: int) -> int | None:
        """The job that is now what that one was; None where there is none."""
        if recorded_job_id not in self._recorded_jobs:
            return recorded_job_id  # nobody had issued it then, either
        return self._present.get(recorded_job_id)

    def take_unrecorded_jobs(self) -> list[int]:
        """Jobs that were not issued then, since the last call."""
        taken, self._unrecorded = self._unrecorded, []
        return taken
