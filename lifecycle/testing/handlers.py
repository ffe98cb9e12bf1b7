# ruff: noqa: S101 - this is a test suite, shipped so that a handler written elsewhere can inherit it
"""Contract tests for state handlers: inherit `HandlerContract` in a test module and create your handler in it.

    class TestMyHandler(HandlerContract):
        def make_handler(self): return MyHandler()

Verified, in every state and for every observation:

- The handler does not raise, and makes only allowed decisions.
- It makes the same decisions whatever it was called with before.
- Its decisions can be read back from a log.

Not verified: whether the decisions are good. To find that out, audit logs with decisions of the handler.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventDecoder, encode_events, vocabulary_header
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core, own_hooks
from kvledger.lifecycle.handlers import HOOKS, StateHandler
from kvledger.lifecycle.replay import Replay
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.testing.plays import CONFIGURATIONS, plays
from kvledger.lifecycle.turn import Turn


class HandlerContract(abc.ABC):
    """Tests that every state handler must pass. The tested handler replaces the built-in handler of its state."""

    configurations: ClassVar[tuple[LedgerConfiguration, ...]] = CONFIGURATIONS
    """Configurations under which each test runs. In all of them, a block has four tokens."""

    @abc.abstractmethod
    def make_handler(self) -> StateHandler:
        """Return a new instance of your handler."""

    def make_core(self, handler: StateHandler) -> Core:
        """Return the core in which the handler runs."""
        return Core.standard().replacing(handler)

    def test_a_core_takes_it(self) -> None:
        """The handler names a state, and has no public method that kvledger would never call."""
        self.make_core(self.make_handler())

    def test_it_decides_what_it_may_in_every_state_upon_every_observation(self) -> None:
        """The handler never raises, and none of its decisions is refused."""
        core = self.make_core(_Stage(self.make_handler).handler)
        for play in plays(core, self.configurations):
            for event in play.events:
                if isinstance(event, e.InvariantViolated):
                    assert event.rule not in {Rule.HANDLER_RAISED, Rule.HANDLER_CONTRACT}, f"{play.name}: {event}"

    def test_it_has_no_memory(self) -> None:
        """A handler that has decided before makes the same decisions as a new instance."""
        kept, renewed = _Stage(self.make_handler), _Stage(self.make_handler)
        fresh_plays = plays(self.make_core(renewed.handler), self.configurations, renewed.renew)
        for fresh, again in zip(fresh_plays, plays(self.make_core(kept.handler), self.configurations), strict=True):
            for one, other in zip(fresh.events, again.events, strict=False):
                assert one == other, f"{fresh.name}: a used handler decided {other}, a new one {one}"
            assert len(fresh.events) == len(again.events), fresh.name

    def test_its_log_is_read_back_and_decided_again(self) -> None:
        """A log with the handler's decisions can be decoded, and a replay makes the same decisions."""
        stage = _Stage(self.make_handler)
        core = self.make_core(stage.handler)
        decoder = EventDecoder(core, vocabulary_header(core))
        for play in plays(core, self.configurations, stage.renew):
            read = decoder.decode(encode_events(play.events))
            assert read == play.events, play.name
            stage.renew()
            replay = Replay(core, play.configuration)
            replay.run(enumerate(read, 1))
            assert not replay.divergences, f"{play.name}: {replay.divergences[0]}"


class _Stage:
    """Wraps the handler, so that a test can replace it by a new instance. The wrapper counts as foreign code."""

    def __init__(self, make_handler: Callable[[], StateHandler]) -> None:
        self._make_handler = make_handler
        self._current = make_handler()
        own = type(self._current)
        names = [name for name in dir(own) if not name.startswith("_") and callable(getattr(own, name))]
        hooks = {
            name: self._hook(name)
            for name in names
            if getattr(own, name) is not getattr(StateHandler, name, None) and not self._is_only_inherited(name)
        }
        self.handler: StateHandler = type(own.__name__, (StateHandler,), {"state": self._current.state, **hooks})()

    def _is_only_inherited(self, name: str) -> bool:
        """Whether the method is only inherited from a built-in handler and is never called in this state."""
        core, handler = Core.standard(), self._current
        return name in HOOKS and handler.state not in core.asked_in(name) and name not in own_hooks(handler)

    def renew(self) -> None:
        """Continue with a new instance of the handler."""
        self._current = self._make_handler()

    def _hook(self, name: str) -> Callable[..., object]:
        def hook(_handler: StateHandler, turn: Turn, *arguments: object) -> object:
            result: object = getattr(self._current, name)(turn, *arguments)
            return result

        hook.__module__ = "anybodys"
        return hook
