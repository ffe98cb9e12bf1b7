"""Nothing of ours may raise into vLLM: a failing hook is logged, its request recomputes, serving goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvledger.lifecycle import logged_request_id, raise_if_unstoppable

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class ReportsFailures(Protocol):
    """An object whose hooks are guarded."""

    def hook_failed(self, hook: str, request_id: str, error: BaseException) -> None:
        """Record that a hook raised."""


_Self = TypeVar("_Self", bound=ReportsFailures)
_Hook = Callable[Concatenate[_Self, _Parameters], _Result]


def guarded(
    *, default: _Result, hook_name: str = ""
) -> Callable[[_Hook[_Self, _Parameters, _Result]], _Hook[_Self, _Parameters, _Result]]:
    """Let a hook answer `default` where it would raise, after a call of `hook_failed`."""

    def decorate(hook: _Hook[_Self, _Parameters, _Result]) -> _Hook[_Self, _Parameters, _Result]:
        name = hook_name or getattr(hook, "__name__", "hook").lstrip("_")

        @functools.wraps(hook)
        def call(self: _Self, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            try:
                return hook(self, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001 -- whatever it is, the engine lives
                raise_if_unstoppable(error)
                self.hook_failed(name, _request_id(args), error)
                return default

        return call

    return decorate


def _request_id(arguments: Sequence[object]) -> str:
    """The log's id of the request that a hook is called with; empty if it is called with none."""
    try:
        return logged_request_id(str(getattr(arguments[0], "request_id", ""))) if arguments else ""
    except BaseException as error:  # noqa: BLE001 -- read from a live object of vLLM, as what just failed
        raise_if_unstoppable(error)
        return ""
