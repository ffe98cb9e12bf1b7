"""The totals of a log, counted while the log is read. The connector counts the same totals while the engine runs."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.adapters.figures import ADDS, About, Figures, State, Took, add_row
from kvledger.lifecycle import events as e
from kvledger.lifecycle import on
from kvledger.lifecycle.reader import Life, Model, Visitor

_NEED_MORE = (
    *(e.RequestArrived, e.LookupRequested, e.RequestPreempted, e.RequestFinished, e.BlocksAllocated),
    *(e.LoadIssued, e.SaveCompleted, e.TransferReported),
)
_SAY_ALL = tuple(event_class for event_class in ADDS if event_class not in _NEED_MORE)
"""Classes of events that contain everything they add to the totals."""


class LogTotals(Visitor[Model]):
    """Adds each event to the totals. For some events, it looks up the request, answer or copy in the model.

    An observation is not counted if the request's state does not allow it.

    Args:
        model: the reader's model.
        state: the totals so far; default: zero.
        is_complete: False if `state` lacks events before the first event that is read.
        on_took: called with each duration that is added to the totals, and with a request id. This is the id of the
            recovered request if the duration is that of a recovery, and empty if it is that of a report.
    """

    needs = ("lives", "copies", "answers")

    def __init__(
        self,
        model: Model,
        state: State | None = None,
        *,
        is_complete: bool = True,
        on_took: Callable[[Took, str], None] | None = None,
    ) -> None:
        super().__init__(model)
        self.state: State = State() if state is None else state
        self._is_complete = is_complete
        self._on_took = on_took

    @property
    def figures(self) -> Figures:
        """The totals so far."""
        return self.state.figures

    @property
    def complete_figures(self) -> Figures | None:
        """The totals so far; None if they lack events, see `is_complete`."""
        return self.state.figures if self._is_complete else None

    def lost(self, _first_sequence: int, _last_sequence: int) -> None:
        """Forget recoveries in progress, which may have ended in the missing events."""
        self.state.returning.clear()
        self.state.preempted_ns.clear()

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        self._add(event, About(_counted(self.moment.earlier)))

    @on(e.LookupRequested, e.RequestPreempted, e.RequestFinished)
    def _observed(self, event: e.RequestEvent) -> None:
        self._add(event, About(_counted(self.moment.life)))

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        self._add(event, About(answer=self._claimed(event.request_id)))

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        self._add(event, About(_counted(self.model.lives.of(event.ordinal))))

    @on(e.SaveCompleted)
    def _save_completed(self, event: e.SaveCompleted) -> None:
        self._add(event, About(copy=self.model.copies.current))

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported) -> None:
        self._add(event, About(copy=next(filter(None, map(self.model.copies.get, event.job_ids)), None)))

    @on(*_SAY_ALL)
    def _says_all(self, event: e.Event) -> None:
        self._add(event, About())

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        for row in event.advanced:
            life = _counted(self.model.lives.of(row[0]))
            if life is not None:
                claimed = self._claimed(life.request_id) if life.num_preemptions else None
                self._tell(add_row(self.state, event, row, life, claimed), life.request_id)

    def _claimed(self, request_id: str) -> e.LookupAnswered | None:
        """Return the answer that vLLM claimed when it last allocated blocks for the request."""
        allocation = self.model.answers.allocation(request_id)
        return None if allocation is None or allocation.answer is None else allocation.answer.event

    def _add(self, event: e.Event, about: About) -> None:
        is_observation = isinstance(event, e.RequestEvent) and not event.is_decision
        if not (is_observation and self.moment.is_refused):
            self._tell(ADDS[type(event)](self.state, event, about))

    def _tell(self, took: Took | None, request_id: str = "") -> None:
        if took is not None and self._on_took is not None:
            self._on_took(took, request_id)


def _counted(life: Life | None) -> Life | None:
    """Return the life; None if its arrival is not in the log. The package `reasons` leaves such a life out, too."""
    return life if life is not None and life.has_known_beginning else None
