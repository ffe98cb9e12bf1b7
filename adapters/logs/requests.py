"""One line per request: what became of it and what the cache did for it."""

from __future__ import annotations

import attrs

from kvledger.lifecycle import Projections
from kvledger.lifecycle import events as e


@attrs.define
class RequestSummary:
    """One incarnation of a request id, as far as the log shows. Times in nanoseconds since the log was opened."""

    request_id: str
    ordinal: int
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
    num_failures: int = 0
    """Failed jobs, broken rules and failed hooks."""


class Requests:
    """Gathers summaries in the order of arrival. Fed with each event before it is folded into `projections`."""

    def __init__(self, current: dict[str, RequestSummary] | None = None) -> None:
        """Gather from the beginning, or go on with those that were not released."""
        self.summaries: list[RequestSummary] = []
        self._current = {} if current is None else current

    def take(self, event: e.Event) -> None:
        """Take up one event."""
        if isinstance(event, e.RequestArrived):
            tokens = event.num_prompt_tokens
            summary = RequestSummary(event.request_id, event.ordinal, event.time_ns, tokens, tokens)
            self._current[event.request_id] = summary
            self.summaries.append(summary)
            return
        found = self._current.get(getattr(event, "request_id", ""))
        if found is not None:
            self._count(found, event)
            if isinstance(event, e.RequestReleased):
                del self._current[found.request_id]

    def forget_ended(self, event: e.Event) -> None:
        """Leave out the request that ends with this event: it was there before what was asked for."""
        if isinstance(event, e.RequestFinished):
            ended = self._current.pop(event.request_id, None)
            if ended is not None:
                self.summaries.remove(ended)

    def finish(self, projections: Projections) -> None:
        """Take what is known of the requests that are not released."""
        for record in projections.tracker:
            summary = self._current.get(record.request_id)
            if summary is not None and not summary.outcome:
                summary.outcome = record.state.value
                summary.num_tokens = max(record.num_tokens, projections.tracker.num_computed_tokens(record))

    @staticmethod
    def _count(summary: RequestSummary, event: e.Event) -> None:
        match event:
            case e.RequestFinished():
                summary.outcome = event.status
                summary.finished_ns = event.time_ns
                summary.num_tokens = event.num_tokens
            case e.RequestPreempted():
                summary.num_preemptions += 1
            case e.LookupRequested():
                summary.num_lookups += 1
            case e.LoadIssued():
                summary.num_tokens_loaded += event.num_tokens
            case e.SaveIssued():
                summary.num_chunks_saved += len(event.chunks)
            case e.LoadFailed() | e.SaveFailed() | e.InvariantViolated() | e.HookFailed():
                summary.num_failures += 1
            case _:
                pass
