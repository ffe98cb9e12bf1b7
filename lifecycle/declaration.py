"""The data of an extension that a log's header contains.

Folds use it, and so do readers without the extension's code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.untrusted import Undecodable, converted

SubRow = tuple[str, str, str]
"""(source, trigger, dest). Source and dest are a phase or a sub-state ("preempted.starving"). The trigger is an event's
id, with its variant if it has several, or "extension/name" for the extension's own events."""
_STEP_HOOKS = ("tokens_scheduled", "tokens_settled", "transfer_settled")
_SAVING = (e.StepScheduled, e.TransferReported, e.RequestPreempted, e.RequestFinished, e.SessionContinued, e.WindowLeft)
"""Observations on which chunks may be evicted."""


class ExtensionError(ValueError):
    """An extension that does not fit. The message names the extension, the reason and the remedy."""


@attrs.frozen
class Declaration:
    """An extension as the header of a log describes it."""

    name: str
    version: int
    made_by: str = ""
    """The class, as "module:Class"."""
    events: tuple[str, ...] = ()
    rows: tuple[SubRow, ...] = ()
    hooks: tuple[tuple[str, str], ...] = ()
    """(state, method) of its handlers."""
    replaces: tuple[str, ...] = ()
    """States in which its handlers replace the core's."""
    leaves_out: Mapping[str, str] = {}
    """Rule of the core that cannot be checked with it → reason."""
    projections: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    keeps: bool = False
    """Whether it can choose chunks to be evicted last."""

    def unjudged(self, events: Iterable[type[e.Event]]) -> Iterator[tuple[type[e.Event], RequestState | None]]:
        """Yield (class of observations, state or None for all) on which its code may have decided."""
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
    """Return the extensions that a log was written with.

    Raises:
        ExtensionError: the header contains something else.
    """
    try:
        return converted(header.get("extensions", ()), tuple[Declaration, ...])
    except Undecodable as error:
        raise ExtensionError(f"the log's header has no readable list of extensions: {error}") from error
