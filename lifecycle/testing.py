# ruff: noqa: S101 - this is a test suite, shipped so that a handler written elsewhere can inherit it
"""The conformance kit of state handlers: inherit `HandlerContract` in a test module, say how yours is made.

    class TestMyHandler(HandlerContract):
        def make_handler(self): return MyHandler()

Verified: in every state, upon every observation, it decides without raising, what it may decide, the same each time and
whatever it was asked before; what it decided is read back from a log. Not verified: whether a decision is a good one;
that is what the audit of its logs tells.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventDecoder, EventEncoder, vocabulary_header
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.handlers.base import StateHandler
from kvledger.lifecycle.ledger import Ledger
from kvledger.lifecycle.replay import Replay
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.steps import Scheduled, StepEncoder
from kvledger.lifecycle.turn import Turn

__all__ = ["HandlerContract"]

_KEYS = (b"first", b"second", b"third")
_PROMPT = 12
"""Tokens of a request: three blocks of four, and three chunks."""


class HandlerContract(abc.ABC):
    """What every state handler must do, in a core where it has replaced the one of its state."""

    configurations: ClassVar[tuple[LedgerConfiguration, ...]] = (
        LedgerConfiguration(block_size=4, chunk_size=4, num_slots=8),
        LedgerConfiguration(block_size=4, chunk_size=8, num_slots=2, num_ranks=2, save_tails=False),
        LedgerConfiguration(block_size=4, chunk_size=4, num_slots=8, async_saves=True, async_load_tokens=0),
        LedgerConfiguration(block_size=4, chunk_size=4, num_slots=8, windows=(0, 4)),
    )
    """What it is asked under, one after the other; blocks of four tokens."""

    @abc.abstractmethod
    def make_handler(self) -> StateHandler:
        """A new one."""

    def make_core(self, handler: StateHandler) -> Core:
        """The core in which it is asked."""
        return Core.standard().replacing(handler)

    def test_a_core_takes_it(self) -> None:
        """It names a state, and has no public method that nobody would call."""
        self.make_core(self.make_handler())

    def test_it_decides_what_it_may_in_every_state_upon_every_observation(self) -> None:
        """It never raises, and no decision of it is refused."""
        core = self.make_core(_Stage(self.make_handler).handler)
        for play in self._plays(core):
            for event in play.events:
                if isinstance(event, e.InvariantViolated):
                    assert event.rule not in {Rule.HANDLER_RAISED, Rule.HANDLER_CONTRACT}, f"{play.name}: {event}"

    def test_it_has_no_memory(self) -> None:
        """One that was asked all along decides like one that is asked for the first time."""
        kept, renewed = _Stage(self.make_handler), _Stage(self.make_handler)
        fresh_plays = self._plays(self.make_core(renewed.handler), renewed.renew)
        for fresh, again in zip(fresh_plays, self._plays(self.make_core(kept.handler)), strict=True):
            for one, other in zip(fresh.events, again.events, strict=False):
                assert one == other, f"{fresh.name}: {other} where {one} was decided before"
            assert len(fresh.events) == len(again.events), fresh.name

    def test_its_log_is_read_back_and_decided_again(self) -> None:
        """From the observations alone, with the same result."""
        stage = _Stage(self.make_handler)
        core = self.make_core(stage.handler)
        decoder = EventDecoder(core, vocabulary_header(core))
        for play in self._plays(core, stage.renew):
            read = decoder.decode(EventEncoder().encode(play.events))
            assert read == play.events, play.name
            stage.renew()
            replay = Replay(core, play.configuration)
            replay.run(enumerate(read, 1))
            assert not replay.divergences, f"{play.name}: {replay.divergences[0]}"

    def _plays(self, core: Core, renew: Callable[[], None] = lambda: None) -> Iterator[_Play]:
        for configuration in self.configurations:
            for state in RequestState:
                for observed in _OBSERVED:
                    renew()
                    play = _Play(core, configuration)
                    play.run(state, observed)
                    yield play


class _Nowhere:
    """A sink that nothing is ever committed to."""

    next_sequence = 1

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        raise NotImplementedError


class _Play:
    """One request is brought into a state, one thing happens to it, and it ends."""

    def __init__(self, core: Core, configuration: LedgerConfiguration) -> None:
        self.configuration = configuration
        self.events: list[e.Event] = []
        self.name = ""
        self.ledger = Ledger(core, configuration, _Nowhere())
        self._steps = StepEncoder(self.ledger.projections)
        self.block_ids = tuple(range(1, 1 + 4 * len(configuration.windows)))

    def run(self, state: RequestState, observed: Callable[[_Play], Iterable[e.Event]]) -> None:
        """Something like it was saved before."""
        self._reach("before", RequestState.FINISHED)
        self.report()
        self._reach("a", state)
        for event in observed(self):
            self.name = f"{event.id} in state {state} under {self.configuration}"
            self.observe(event)
        self.report()
        self.observe(e.RequestFinished("a", "stopped", _PROMPT, _PROMPT + 1, self.now))
        self.report()

    @property
    def now(self) -> int:
        """A clock that ticks with each event."""
        return len(self.events)

    def observe(self, event: e.Event) -> list[e.Event]:
        """Record it."""
        decisions = self.ledger.observe(event)
        self.events += [event, *decisions]
        return decisions

    def step(self, *counts: tuple[int, int, int]) -> e.StepScheduled:
        """A step that schedules `a` like this, or nobody."""
        return self._steps.encode([Scheduled("a", *each) for each in counts], self.now)

    def job_ids(self) -> list[int]:
        """Of the jobs in flight, and of one that never was."""
        return [*(job.job_id for job in self.ledger.projections.transfers), 1000]

    def report(self) -> None:
        """All ranks have done what is in flight."""
        for job_id in self.job_ids()[:-1]:
            self.observe(e.TransferReported.by(range(self.configuration.num_ranks), job_id, self.now))

    def _reach(self, request_id: str, state: RequestState) -> None:
        self.observe(e.RequestArrived(request_id, self.ledger.next_ordinal, _PROMPT, self.now))
        self.observe(e.ChunkKeysObserved(request_id, 0, _KEYS[: _PROMPT // self.configuration.chunk_size]))
        if state is RequestState.NEW:
            return
        self.observe(e.LookupRequested(request_id, 0, _PROMPT, self.now))
        self.observe(e.BlocksAllocated(request_id, self.block_ids, 0, self.now))
        num_tokens = _PROMPT - 3 if state is RequestState.CHUNKED_PREFILL else _PROMPT
        self.observe(self._steps.encode([Scheduled(request_id, 0, num_tokens, _PROMPT)], self.now))
        if state in {RequestState.PREEMPTED, RequestState.RECOVERING}:
            self.observe(e.RequestPreempted(request_id, _PROMPT, self.now))
        if state is RequestState.RECOVERING:
            self.report()
            self.observe(e.LookupRequested(request_id, 0, _PROMPT + 1, self.now))
            num_external_tokens = getattr(self.events[-1], "num_external_tokens", 0)
            self.observe(e.BlocksAllocated(request_id, self.block_ids, num_external_tokens, self.now))
        if state is RequestState.FINISHED:
            self.observe(e.RequestFinished(request_id, "stopped", _PROMPT, _PROMPT + 1, self.now))


def _looked_up(play: _Play, num_computed_tokens: int) -> Iterator[e.Event]:
    for _ in range(3):  # any number of equal lookups is answered as one
        yield e.LookupRequested("a", num_computed_tokens, _PROMPT + 1, play.now)


def _admitted(play: _Play, share: int) -> Iterator[e.Event]:
    yield e.LookupRequested("a", 0, _PROMPT + 1, play.now)
    answer = play.events[-1]
    taken = getattr(answer, "num_external_tokens", 0) // share
    yield e.BlocksAllocated("a", play.block_ids, taken, play.now)
    yield play.step((taken, _PROMPT + 1 - taken, _PROMPT + 1))


def _decoded(play: _Play) -> Iterator[e.Event]:
    for num_computed_tokens in range(_PROMPT, _PROMPT + 6):
        yield play.step((num_computed_tokens, 1, num_computed_tokens + 1))


def _reported(play: _Play, error: str) -> Iterator[e.Event]:
    for job_id in play.job_ids():
        yield e.TransferReported.by(range(play.configuration.num_ranks), job_id, play.now, error=error)
    yield play.step()


_OBSERVED: tuple[Callable[[_Play], Iterable[e.Event]], ...] = (
    lambda play: [e.RequestArrived("a", play.ledger.next_ordinal, _PROMPT, play.now)],
    lambda _play: [e.ChunkKeysObserved("a", 1, (b"other",))],
    lambda play: _looked_up(play, 0),
    lambda play: _looked_up(play, 4),
    lambda play: _looked_up(play, 5),
    lambda play: _admitted(play, 1),
    lambda play: _admitted(play, 2),
    lambda play: [e.BlocksAllocated("a", play.block_ids, 8, play.now)],
    lambda play: [e.BlockTableObserved("a", play.block_ids[::-1], play.now)],
    lambda play: [e.RequestPreempted("a", 8, play.now), play.step()],
    lambda play: [e.RequestPreempted("a", 0, play.now), play.step()],
    lambda play: [e.SessionContinued("a", 6, 16, 16, play.now)],
    lambda play: [e.SessionContinued("a", 0, 16, 16, play.now)],
    lambda play: [e.TokensRolledBack("a", 4, play.now)],
    lambda play: [e.TokensRolledBack("a", 0, play.now)],
    lambda play: [e.RequestFinished("a", "aborted", 0, _PROMPT, play.now), play.step()],
    lambda play: [play.step()],
    lambda play: [play.step((4, 4, _PROMPT))],
    _decoded,
    lambda play: _reported(play, ""),
    lambda play: _reported(play, "broken"),
    lambda play: [e.LoadErrorsObserved(play.block_ids[:2], play.now)],
    lambda play: [e.CacheReset(play.now), play.step()],
    lambda play: [e.HookFailed("a hook", "a", "it failed", play.now)],
    lambda play: [e.HookFailed("a hook", "", "it failed", play.now)],
    lambda play: [e.DecisionWithheld("a", Rule.VLLM_CONTRACT, "it would break it", play.now)],
    lambda play: [e.WindowLeft("a", 8, play.now)],
)
"""What may happen to a request, legal in its state or not."""


class _Stage:
    """`handler` stands in a core for one that is made anew at will, and is judged like anybody's."""

    def __init__(self, make_handler: Callable[[], StateHandler]) -> None:
        self._make_handler = make_handler
        self._current = make_handler()
        own = type(self._current)
        names = [name for name in dir(own) if not name.startswith("_") and callable(getattr(own, name))]
        hooks = {
            name: self._hook(name) for name in names if getattr(own, name) is not getattr(StateHandler, name, None)
        }
        self.handler: StateHandler = type(own.__name__, (StateHandler,), {"state": self._current.state, **hooks})()

    def renew(self) -> None:
        """From now on, one that was never asked decides."""
        self._current = self._make_handler()

    def _hook(self, name: str) -> Callable[..., object]:
        def hook(_handler: StateHandler, turn: Turn, *arguments: object) -> object:
            result: object = getattr(self._current, name)(turn, *arguments)
            return result

        hook.__module__ = "anybodys"
        return hook
