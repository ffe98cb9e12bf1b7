"""One line per request: what became of it and what the cache did for it."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from kvledger.lifecycle import Projections
from kvledger.lifecycle import events as e

Job = e.LoadIssued | e.SaveIssued | e.TailSaveIssued
_SETTLED = (e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed)


@attrs.define
class RequestSummary:
    """One incarnation of a request id, as far as the log shows. Times in nanoseconds since the log was opened."""

    request_id: str
    ordinal: int
    first_sequence: int
    last_sequence: int
    """Its own events lie between these two, both included."""
    arrived_ns: int
    num_prompt_tokens: int
    num_tokens: int
    outcome: str = ""
    """vLLM's status at the end, or the state in which the log leaves it."""
    finished_ns: int | None = None
    num_preemptions: int = 0
    num_lookups: int = 0
    num_tokens_loaded: int = 0
    num_chunks_saved: int = 0
    """By complete jobs, like the tokens."""
    num_failures: int = 0
    """Failed jobs, loads that were refused, broken rules and failed hooks."""
    is_quarantined: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether something went wrong with it: it failed, or something of it did. An abort is its client's choice."""
        return self.num_failures > 0 or self.is_quarantined or self.outcome == "FINISHED_ERROR"


class Requests:
    """Summarizes requests; give it each event in order."""

    def __init__(
        self,
        on_end: Callable[[RequestSummary], None],
        current: dict[str, RequestSummary] | None = None,
        jobs: dict[int, Job] | None = None,
    ) -> None:
        """Begin with nothing, or with the requests that were there and the jobs under way; `on_end` is given the rest.

        A request is over when it is released, or when its id is used again.
        """
        self._on_end = on_end
        self.current = {} if current is None else current
        """By id, in the order of arrival: those that are not over."""
        self._jobs = {} if jobs is None else jobs

    def take(self, sequence: int, event: e.Event) -> None:
        """Take up one event."""
        if isinstance(event, e.RequestArrived):
            self._end(event.request_id)
            tokens = event.num_prompt_tokens
            summary = RequestSummary(event.request_id, event.ordinal, sequence, sequence, event.time_ns, tokens, tokens)
            self.current[event.request_id] = summary
            return
        about = map(self._jobs.get, event.job_ids) if isinstance(event, e.TransferReported) else (event,)
        job = self._jobs.pop(event.job_id, None) if isinstance(event, _SETTLED) else None
        for summary in filter(None, map(self._life_of, about)):
            summary.last_sequence = sequence
            self._count(summary, event, job)
            if isinstance(event, e.RequestReleased):
                self._end(event.request_id)

    def _life_of(self, event: e.Event | None) -> RequestSummary | None:
        """The life that the event is about, if it is not over; its id may have been used again since."""
        summary = self.current.get(getattr(event, "request_id", ""))
        is_of_another = (
            summary is not None and isinstance(event, e.RequestDecision) and event.ordinal != summary.ordinal
        )
        return None if is_of_another else summary

    def finish(self, projections: Projections) -> None:
        """Add what is known of those that are not over."""
        for record in projections.tracker:
            summary = self.current.get(record.request_id)
            if summary is not None and not summary.outcome:
                summary.outcome = record.state.value
                summary.num_tokens = max(record.num_tokens, projections.tracker.num_computed_tokens(record))

    def _end(self, request_id: str) -> None:
        summary = self.current.pop(request_id, None)
        if summary is not None:
            self._on_end(summary)

    def _count(self, summary: RequestSummary, event: e.Event, job: Job | None) -> None:
        """`job`: the one that the event settles."""
        match event:
            case e.RequestFinished():
                summary.outcome = event.status
                summary.finished_ns = event.time_ns
                summary.num_tokens = event.num_tokens
            case e.RequestPreempted():
                summary.num_preemptions += 1
            case e.LookupRequested():
                summary.num_lookups += 1
            case e.LoadIssued() | e.SaveIssued() | e.TailSaveIssued():
                self._jobs[event.job_id] = event
            case e.LoadCompleted() | e.SaveCompleted():
                summary.num_tokens_loaded += job.num_tokens if isinstance(job, e.LoadIssued) else 0
                summary.num_chunks_saved += len(job.chunks) if isinstance(job, e.SaveIssued) else 0
            case e.LoadFailed() | e.SaveFailed() | e.InvariantViolated() | e.HookFailed() | e.LoadRefused():
                summary.num_failures += 1
            case e.RequestQuarantined():
                summary.is_quarantined = True
            case _:
                pass
