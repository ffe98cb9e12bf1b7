"""One line per request: what became of it and what the cache did for it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Life, Model, Spent, Visitor, Visits


class RequestSummary(msgspec.Struct, forbid_unknown_fields=True):
    """One life of a request id, as far as the log shows. Times in nanoseconds since the log was opened."""

    request_id: str
    ordinal: int
    first_sequence: int
    last_sequence: int
    """The life's events are between `first_sequence` and `last_sequence`, both included."""
    arrived_ns: int
    num_prompt_tokens: int
    num_tokens: int
    outcome: str = ""
    """vLLM's status of the request when it finished; before that, the request's last state in the log."""
    finished_ns: int | None = None
    num_preemptions: int = 0
    num_lookups: int = 0
    num_tokens_loaded: int = 0
    num_chunks_saved: int = 0
    """Chunks of completed saves."""
    num_failures: int = 0
    """Failed copies, refused loads, broken rules and failed hooks."""
    is_quarantined: bool = False
    spent: Spent = Spent()
    """Time until the request finished, or until the end of the log."""

    def fields(self) -> dict[str, object]:
        """Return field name → value, including the fields of `spent`."""
        fields = msgspec.structs.asdict(self)
        del fields["spent"]
        return {**fields, **msgspec.structs.asdict(self.spent)}

    @property
    def has_failed(self) -> bool:
        """Whether the request ended with an error, is quarantined, or has failures. A client's abort is no failure."""
        return self.num_failures > 0 or self.is_quarantined or self.outcome == "FINISHED_ERROR"


_COUNTED = frozenset(
    {
        *(e.RequestFinished, e.LookupRequested, e.LoadCompleted, e.SaveCompleted, e.LoadFailed, e.SaveFailed),
        *(e.LoadRefused, e.InvariantViolated, e.HookFailed),
    }
)
"""Events that a summary counts."""


class State(msgspec.Struct, forbid_unknown_fields=True):
    """Summaries of the requests that have not ended."""

    summaries: dict[int, RequestSummary] = {}
    """Ordinal → summary, in the order of arrival."""


class Requests(Visitor[Model]):
    """Summarizes the requests that arrive. Calls `on_end` with each summary when the request ends.

    A request ends when it is released, or when its id is used again. The other requests end with the log.
    """

    needs = ("lives", "copies")
    state: State

    def __init__(self, model: Model, on_end: Callable[[RequestSummary], None]) -> None:
        super().__init__(model)
        self.state = State()
        self._on_end = on_end

    def visits(self) -> Visits:
        """Return which methods to call for events that name a request, and for reports."""
        naming = [each for each in e.STANDARD_EVENTS.values() if "request_id" in e.field_names(each)]
        return [
            (e.RequestArrived, self._arrived),
            (e.TransferReported, self._reported),
            *((event_class, self._seen) for event_class in naming if event_class is not e.RequestArrived),
        ]

    def ended(self, life: Life) -> None:
        """Pass the summary of this life to `on_end`."""
        self._hand_out(life)

    def finish(self) -> None:
        """Pass the summaries of requests that have not ended to `on_end`."""
        for life in self.model.lives:
            self._hand_out(life)

    def _hand_out(self, life: Life) -> None:
        summary = self.state.summaries.pop(life.ordinal, None)
        if summary is None:
            return
        summary.num_preemptions, summary.is_quarantined = life.num_preemptions, life.quarantined
        summary.num_tokens, summary.spent = life.num_tokens, self.model.lives.spent(life)
        if not summary.outcome:
            summary.outcome = life.state.value
            summary.num_tokens = max(life.num_tokens, self.model.lives.num_computed_tokens(life))
        self._on_end(summary)

    def _reported(self, _event: e.TransferReported) -> None:
        for reported in self.model.copies.reported:
            if reported.job is not None and (found := self.state.summaries.get(reported.job.ordinal)) is not None:
                found.last_sequence = self.moment.sequence

    def _arrived(self, event: e.RequestArrived) -> None:
        sequence, tokens = self.moment.sequence, event.num_prompt_tokens
        summary = RequestSummary(event.request_id, event.ordinal, sequence, sequence, event.time_ns, tokens, tokens)
        self.state.summaries[event.ordinal] = summary

    def _seen(self, event: e.Event) -> None:
        ordinal: int = getattr(event, "ordinal", e.NO_LIFE)
        if ordinal == e.NO_LIFE:
            life = self.model.lives.get(getattr(event, "request_id", ""))
            ordinal = e.NO_LIFE if life is None else life.ordinal
        if (found := self.state.summaries.get(ordinal)) is not None:
            found.last_sequence = self.moment.sequence
            if type(event) in _COUNTED:
                self._count(found, event)

    def _count(self, summary: RequestSummary, event: e.Event) -> None:
        match event:
            case e.RequestFinished():
                summary.outcome, summary.finished_ns = event.status, event.time_ns
            case e.LookupRequested():
                summary.num_lookups += 1
            case e.LoadCompleted() | e.SaveCompleted():
                copy = self.model.copies.current
                if copy is not None and copy.is_load:
                    summary.num_tokens_loaded += copy.num_tokens
                elif copy is not None:
                    summary.num_chunks_saved += len(copy.chunks)
            case e.LoadFailed() | e.SaveFailed() | e.LoadRefused() | e.InvariantViolated() | e.HookFailed():
                summary.num_failures += 1
            case _:
                pass
