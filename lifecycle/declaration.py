"""What a log's header contains about an extension.

Folds use this data, and so do readers without the extension's code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.untrusted import Undecodable, converted

SubRow = tuple[str, str, str]
"""(source, trigger, dest). Source and dest are each a phase, or a sub-state such as "preempted.starving". The trigger
is an event's id, `id/variant` if the event has variants, or "extension/name" for the extension's own event."""
_STEP_HOOKS = ("tokens_scheduled", "tokens_settled", "transfer_settled")
_SAVING = (e.StepScheduled, e.TransferReported, e.RequestPreempted, e.RequestFinished, e.SessionContinued, e.WindowLeft)
"""Observations after which kvledger may evict chunks."""


class ExtensionError(ValueError):
    """An extension that cannot be used. The message names the extension, the reason and the remedy."""


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
    """(state, method) of each handler method of the extension."""
    replaces: tuple[str, ...] = ()
    """States in which the extension's handlers replace the core's handlers."""
    leaves_out: Mapping[str, str] = {}
    """Rule of the core that cannot be checked with the extension → reason."""
    projections: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    keeps: bool = False
    """Whether the extension can choose chunks that are evicted last."""

    def unjudged(self, events: Iterable[type[e.Event]]) -> Iterator[tuple[type[e.Event], RequestState | None]]:
        """Yield (class, state): in this state, the extension may have decided on this class of observations.

        None stands for all states.
        """
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
        ExtensionError: the list of extensions in the header cannot be read.
    """
    try:
        return converted(header.get("extensions", ()), tuple[Declaration, ...])
    except Undecodable as error:
        raise ExtensionError(f"the log's header has no readable list of extensions: {error}") from error
