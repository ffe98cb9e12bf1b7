"""State handlers: one file per state, and the registry that lets a user replace or add one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvledger.lifecycle.handlers.base import StateHandler
from kvledger.lifecycle.handlers.chunked_prefill import ChunkedPrefill
from kvledger.lifecycle.handlers.finished import Finished
from kvledger.lifecycle.handlers.new import New
from kvledger.lifecycle.handlers.preempted import Preempted
from kvledger.lifecycle.handlers.recovering import Recovering
from kvledger.lifecycle.handlers.running import Running
from kvledger.lifecycle.states import RequestState

__all__ = ["HandlerRegistry", "StateHandler"]


class HandlerRegistry:
    """The handlers of every state, in the order in which they are asked."""

    def __init__(self, handlers: Iterable[StateHandler] | None = None) -> None:
        self._handlers: dict[RequestState, list[StateHandler]] = {state: [] for state in RequestState}
        defaults = (New(), ChunkedPrefill(), Running(), Preempted(), Recovering(), Finished())
        for handler in defaults if handlers is None else handlers:
            self.add(handler)

    def replace(self, handler: StateHandler) -> None:
        """Let `handler` be the only one of its state."""
        self._handlers[self._state_of(handler)] = [handler]

    def add(self, handler: StateHandler) -> None:
        """Ask `handler` after those that its state has already."""
        self._handlers[self._state_of(handler)].append(handler)

    def of(self, state: RequestState) -> Iterator[StateHandler]:
        """The handlers of a state."""
        return iter(self._handlers[state])

    def fingerprint(self) -> str:
        """The handlers' classes by state, written into every log's header."""
        return " ".join(
            f"{state.value}={'+'.join(type(handler).__qualname__ for handler in handlers)}"
            for state, handlers in self._handlers.items()
        )

    @staticmethod
    def _state_of(handler: StateHandler) -> RequestState:
        state = getattr(handler, "state", None)
        if not isinstance(state, RequestState):
            message = (
                f"handler {type(handler).__qualname__} has state {state!r}; set its class attribute `state` to one of "
                f"{', '.join(RequestState)}"
            )
            raise TypeError(message)
        return state
