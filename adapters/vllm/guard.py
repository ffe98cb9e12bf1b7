"""Nothing of ours may raise into vLLM: what a hook answers if it fails stands in a table, and serving goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import attrs

from kvledger.lifecycle import logged_request_id, raise_if_unstoppable


class ReportsFailures(Protocol):
    """An object whose hooks are guarded."""

    def hook_failed(self, hook: str, request_id: str, error: BaseException) -> None:
        """Record that a hook raised."""


_Owner = TypeVar("_Owner", bound=ReportsFailures)


@attrs.frozen
class Fallback:
    """What a hook answers if it raises, and what happens all the same."""

    answer: Any = None
    steps: tuple[str, ...] = ()
    """Methods that are called after the failure is recorded, in this order, each with the arguments of the hook.

    A step is called whether or not the steps before it have raised. If it returns something, that is the answer.
    """
    fails_as: str = ""
    """Name of the failure in the log, if that is not the hook's. A step fails under the name of the hook."""


def guarded(hooks: Mapping[str, Fallback]) -> Callable[[type[_Owner]], type[_Owner]]:
    """Let the hooks of a class never raise. `hooks`: name of the method → what happens instead."""

    def decorate(owner: type[_Owner]) -> type[_Owner]:
        for name, fallback in hooks.items():
            setattr(owner, name, _guarded(getattr(owner, name), name.lstrip("_"), fallback))
        return owner

    return decorate


def _guarded(hook: Callable[..., Any], name: str, fallback: Fallback) -> Callable[..., Any]:
    @functools.wraps(hook)
    def call(self: ReportsFailures, /, *arguments: Any, **named: Any) -> Any:
        try:
            return hook(self, *arguments, **named)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the engine lives
            raise_if_unstoppable(error)
            self.hook_failed(fallback.fails_as or name, _request_id(arguments), error)
            return _fall_back(self, name, fallback, arguments)

    return call


def _fall_back(owner: ReportsFailures, hook: str, fallback: Fallback, arguments: Sequence[object]) -> Any:
    answer = fallback.answer
    for step in fallback.steps:
        try:
            found = getattr(owner, step)(*arguments)
        except BaseException as error:  # noqa: BLE001 -- see above
            raise_if_unstoppable(error)
            owner.hook_failed(hook, _request_id(arguments), error)
        else:
            answer = answer if found is None else found
    return answer


def _request_id(arguments: Sequence[object]) -> str:
    """The log's id of the request that a hook is called with; empty if it is called with none."""
    try:
        return logged_request_id(str(getattr(arguments[0], "request_id", ""))) if arguments else ""
    except BaseException as error:  # noqa: BLE001 -- read from a live object of vLLM, as what just failed
        raise_if_unstoppable(error)
        return ""
