"""Our own handlers keep the contract that ships for everybody's; a handler that breaks it is caught by it."""

from __future__ import annotations

import pytest

from kvledger.lifecycle import RequestState, StateHandler, Turn
from kvledger.lifecycle import events as e
from kvledger.lifecycle.handlers import STANDARD_HANDLERS, Preempted, Running
from kvledger.lifecycle.testing import HandlerContract


@pytest.fixture(
    params=[
        pytest.param(
            handler,
            id=str(handler.state),
            marks=() if handler.state in {RequestState.RUNNING, RequestState.PREEMPTED} else pytest.mark.long,
        )
        for handler in STANDARD_HANDLERS
    ]
)
def own(request: pytest.FixtureRequest) -> StateHandler:
    """Each of our own."""
    handler: StateHandler = request.param
    return handler


class TestOwnHandlers(HandlerContract):
    """The handlers of this package, judged like anybody's."""

    @pytest.fixture(autouse=True)
    def _own(self, own: StateHandler) -> None:
        self._handler = type(own)

    def make_handler(self) -> StateHandler:
        """A new one."""
        return self._handler()


class Remembers(Preempted):
    """Answers what it answered before."""

    def __init__(self) -> None:
        self.answered: set[str] = set()

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        """Only the first lookup of an id is answered."""
        if event.request_id not in self.answered:
            self.answered.add(event.request_id)
            super().lookup_requested(turn, event)


class Raises(Running):
    """Cannot do without tokens."""

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """Divide by them."""
        turn.decide(e.RequestQuarantined(*turn.record.life, str(1 // event.num_settled_tokens), turn.cause))


class SavesTheSameSlot(Running):
    """Decides a job that nobody can carry out."""

    def tokens_settled(self, turn: Turn, _first_chunk: int, _num_settled_tokens: int) -> None:
        """Always into slot 0."""
        job_id = turn.projections.jobs.next_job_id
        turn.decide(e.SaveIssued(*turn.record.life, job_id, (0,), (0,), (1,), False, False, turn.cause))


@pytest.mark.parametrize(
    ("handler", "test", "named"),
    [
        (Remembers, HandlerContract.test_it_has_no_memory, "a used handler decided"),
        (
            Raises,
            HandlerContract.test_it_decides_what_it_may_in_every_state_upon_every_observation,
            "ZeroDivisionError",
        ),
        (
            SavesTheSameSlot,
            HandlerContract.test_it_decides_what_it_may_in_every_state_upon_every_observation,
            "a slot is in use",
        ),
    ],
)
def test_a_handler_that_breaks_the_contract_is_caught(handler: type[StateHandler], test: object, named: str) -> None:
    """By the test that says so, with the state, the observation and the reason."""

    class Contract(HandlerContract):
        def make_handler(self) -> StateHandler:
            return handler()

    with pytest.raises(AssertionError, match=named):
        test(Contract())  # type: ignore[operator]
