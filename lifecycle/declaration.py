"""What the header of a log says about an extension: all of it that is data.

A reader that does not have the extension's code knows it from here, and so does what folds the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.untrusted import Undecodable, converted

SubRow = tuple[str, str, str]
"""(source, trigger, dest). An end is a phase or a sub-state ("preempted.starving"); a trigger is an event's id, with
its variant where it has several, or "extension/name" of the extension's own events."""
_STEP_HOOKS = ("tokens_scheduled", "tokens_settled", "transfer_settled")
_SAVING = (e.StepScheduled, e.TransferReported, e.RequestPreempted, e.RequestFinished, e.SessionContinued, e.WindowLeft)
"""Observations upon which something may be evicted."""


class ExtensionError(ValueError):
    """An extension that does not fit. The message names it, the reason and the remedy."""


@attrs.frozen
class Declaration:
    """An extension as the header of a log has it: all of it that is data."""

    name: str
    version: int
    made_by: str = ""
    """The class, as "module:Class"."""
    events: tuple[str, ...] = ()
    rows: tuple[SubRow, ...] = ()
    hooks: tuple[tuple[str, str], ...] = ()
    """(state, method) of its handlers."""
    replaces: tuple[str, ...] = ()
    """States in which its handlers are asked instead of the core's."""
    leaves_out: Mapping[str, str] = {}
    """Rules of the core that cannot be checked then -> why."""
    projections: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    keeps: bool = False
    """Whether it has a say in what is evicted last."""

    def unjudged(self, events: Iterable[type[e.Event]]) -> Iterator[tuple[type[e.Event], RequestState | None]]:
        """(class of observations, state or None for all): where nobody without its code can decide again."""
        of_method = {event_class.handler_method: event_class for event_class in events}
        for replaced in self.replaces:
            yield from ((event_class, RequestState(replaced)) for event_class in of_method.values())
        if self.replaces:
            yield from ((event_class, None) for event_class in _SAVING)
        for state, method in self.hooks:
            if method in _STEP_HOOKS:
                yield from ((event_class, None) for event_class in (e.StepScheduled, e.TransferReported))
            elif method in of_method:
                yield of_method[method], RequestState(state)
        if self.keeps:
            yield from ((event_class, None) for event_class in _SAVING)


def declared_in(header: Mapping[str, Any]) -> tuple[Declaration, ...]:
    """The extensions that a log was written with.

    Raises:
        ExtensionError: the header says something else there.
    """
    try:
        return converted(header.get("extensions", ()), tuple[Declaration, ...])
    except Undecodable as error:
        raise ExtensionError(f"the log's header does not say which extensions it has: {error}") from error
