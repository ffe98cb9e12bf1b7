"""What somebody else's code raises is caught, and what has to end the process is not."""

from __future__ import annotations

import asyncio
import enum
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvledger.lifecycle import Unstoppable, described, raise_if_unstoppable, without_secrets
from kvledger.lifecycle.handler_contract import DecisionRefused


class OfSomebody(BaseException):
    """No `Exception`, as some libraries have them."""


class Stop:
    """Ends a process in a method."""

    def handle(self, _signal: int, _frame: object) -> None:
        """As vLLM's worker does."""
        raise SystemExit

    __call__ = handle


def stop(_signal: int, _frame: object) -> None:
    """As vLLM's worker does."""
    raise SystemExit


def stop_in_a_call(number: int, frame: object) -> None:
    """Raise some frames further in."""
    stop(number, frame)


def stop_with(_reason: str, *_of_signal: object) -> None:
    """Raise in a handler that takes whatever it is given."""
    raise OfSomebody


def caught(call: Callable[[], object]) -> BaseException | None:
    """What was caught for good of what `call` raises."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 -- what is tested
        raise_if_unstoppable(error)
        return error
    return None


@pytest.mark.parametrize(
    "error", [ValueError(), SystemExit(0), SystemExit("text"), GeneratorExit(), asyncio.CancelledError(), OfSomebody()]
)
def test_what_code_raises_is_caught(error: BaseException) -> None:
    """Whatever its class."""

    def raises() -> None:
        raise error

    assert caught(raises) is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Unstoppable()])
def test_an_interrupt_passes(error: BaseException) -> None:
    """Ctrl+C ends a process, and kvledger's own exceptions reach their handler."""

    def raises() -> None:
        raise error

    with pytest.raises(type(error)):
        caught(raises)


@pytest.mark.parametrize(
    "handler", [stop, stop_in_a_call, Stop().handle, Stop(), partial(stop_with, "why"), lambda *_: stop_with("why")]
)
def test_what_a_signal_handler_raises_passes(handler: Any) -> None:
    """A worker of vLLM ends by it, and ignores the signal from then on: caught, it would never end."""
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises((SystemExit, OfSomebody)):
            caught(lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_code_that_looks_at_its_caller_is_no_signal_handler() -> None:
    """Incident: an extension that took its caller's frame, as loggers do, and called `sys.exit()` ended the engine."""

    def raises() -> None:
        caller = sys._getframe(1)
        raise SystemExit(caller.f_lineno)

    assert isinstance(caught(raises), SystemExit)


def test_code_that_is_called_with_a_frame_is_no_signal_handler() -> None:
    """Only the functions that are installed as handlers are, whatever others are called with."""
    assert isinstance(caught(lambda: stop(0, sys._getframe())), SystemExit)


def test_a_look_up_in_an_enumeration_is_no_signal_handler() -> None:
    """Python's marks for "default" and "ignore" are members of one, whose class can be called."""

    class Colour(enum.Enum):
        BLUE = 1

        @classmethod
        def _missing_(cls, _value: object) -> None:
            raise SystemExit(1)

    assert isinstance(caught(lambda: Colour("red")), SystemExit)


def test_an_error_that_cannot_be_printed_is_described_by_its_class() -> None:
    """Its `__str__` is somebody else's code, too."""

    class Mute(OfSomebody):
        def __str__(self) -> str:
            raise SystemExit(1)

    assert described(Mute()) == "Mute"
    assert described(ValueError("text")) == "ValueError: text"


def test_a_log_contains_the_beginning_of_kvledgers_own_messages_alone() -> None:
    """Others may quote prompts and salts, and any may be long."""
    assert without_secrets(ValueError("a prompt")) == "ValueError"
    assert without_secrets(DecisionRefused("the turn is over")) == "DecisionRefused: the turn is over"
    assert len(without_secrets(DecisionRefused("x" * 10_000), of_extension=True)) < 250
