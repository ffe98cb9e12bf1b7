"""Which events of a log a command's result covers, and the reason if the result covers none.

A command must not say "sound", or that nothing was found, about events that it could not check. This module must not
depend on a rule or a command.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.lifecycle import Projections, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.storage.events import HowEnded


@attrs.frozen
class Coverage:
    """The events of a log that a result covers. Both sequence numbers are 0 if the result covers no event."""

    first_sequence: int = 0
    last_sequence: int = 0
    why_nothing: str = ""
    """Reason why no event is covered; empty if events are covered."""
    is_whole: bool = True
    """Whether every event that was ever in the log is covered."""

    @property
    def text(self) -> str:
        """The covered events, in words."""
        first, last = self.first_sequence, self.last_sequence
        return f"event {first}" if first == last else f"events {first}–{last}"


class RequestPresence:
    """Finds out whether the selected request was alive in the selected part. Pass every event to `take`, in order.

    A request is alive from its first event to its release. It can be alive in a part in which no event names it,
    because most steps do not name the requests that they run.
    """

    def __init__(self, selection: Selection, before: Projections | None = None) -> None:
        self._selection = selection
        self._is_alive = before is not None and before.tracker.get(selection.request_id or "") is not None
        self.is_found = selection.request_id is None

    def take(self, events: Iterable[SequencedEvent]) -> None:
        """Take the next events."""
        if self.is_found:
            return
        for sequence, event in events:
            is_own = getattr(event, "request_id", None) == self._selection.request_id
            if (self._is_alive or is_own) and self._selection.holds(sequence):
                self.is_found = True
                return
            if is_own:
                self._is_alive = not isinstance(event, e.RequestReleased)


class ExtensionEvents:
    """Counts the events that extensions recorded, and collects the events that stopped an extension.

    Pass every event to `take`, in order.
    """

    def __init__(self) -> None:
        self.num_events = 0
        """Events that extensions recorded."""
        self.stops: dict[int, e.ExtensionStopped] = {}
        """Sequence number → event that stopped an extension."""

    def take(self, events: Iterable[SequencedEvent]) -> None:
        """Take the next events."""
        for sequence, event in events:
            if isinstance(event, e.ExtensionEvent):
                self.num_events += 1
            elif isinstance(event, e.ExtensionStopped):
                self.stops[sequence] = event


def readable(log: StoredLog, selection: Selection) -> Coverage:
    """Return the coverage of a log that was read: the selected events before which the state is known.

    If no header is readable, all events that were read count as covered, although their state is not known. Such a log
    is reported as damaged anyway.
    """
    if not log.header and log.num_events:
        return Coverage(log.first_sequence, log.last_sequence, is_whole=False)
    if log.begins_late and not log.start_sequence:
        log.start()
    return _covered(log, selection, max(1, log.first_sequence), log.last_sequence)


def checked(log: StoredLog, selection: Selection, last_foldable: int | None, *, is_present: bool) -> Coverage:
    """Return the coverage of a verified log: the selected events for which rules and decisions were checked.

    Args:
        log: the log. Its events were read after `log.start()` was called.
        selection: the selected part.
        last_foldable: sequence number of the last event that can be folded; None: all events can be folded.
        is_present: whether the selected request was alive in the selected part; True if no request is selected.
    """
    last = log.trusted_sequence if last_foldable is None else min(last_foldable, log.trusted_sequence)
    found = _covered(log, selection, log.start_sequence + 1, last)
    if not found.why_nothing and not is_present:
        return Coverage(
            why_nothing=f"{selection.request_id} has no event in {found.text}, the part that can be checked"
        )
    return found


def _covered(log: StoredLog, selection: Selection, first: int, last: int) -> Coverage:
    why_nothing = _why_not_known(log)
    if why_nothing:
        return Coverage(why_nothing=why_nothing)
    wanted_last = last if selection.last_sequence is None else min(last, selection.last_sequence)
    covered = Coverage(max(first, selection.first_sequence, log.first_sequence), wanted_last)
    if covered.first_sequence <= covered.last_sequence:
        is_all = covered.first_sequence == 1 and covered.last_sequence == log.last_sequence
        return attrs.evolve(covered, is_whole=is_all and selection.is_everything and not log.skipped)
    if selection.first_sequence > log.last_sequence:
        return Coverage(why_nothing=f"the log ends with event {log.last_sequence}, before the selected part")
    if last < max(first, selection.first_sequence):
        return Coverage(
            why_nothing=f"events after event {last} are missing or cannot be folded, so the state in the selected part "
            "is not known"
        )
    return Coverage(
        why_nothing=f"the selected part ends with event {selection.last_sequence}, but the state is known only from "
        f"event {max(first, log.first_sequence)} on"
    )


def _why_not_known(log: StoredLog) -> str:
    """Return the reason why the state is unknown at every event; empty if it is known somewhere."""
    if not log.header:
        return "no copy of the log's header, which has the configuration, is intact"
    if not log.num_events:
        if log.damage:
            return "no event of the log is intact"
        is_open = log.ending.how is HowEnded.OPEN
        return "the log holds no event" + (" yet" if is_open else "")
    if log.begins_late and not log.start_sequence:
        return (
            f"the log begins with event {log.first_sequence}, and no usable snapshot holds the state before it; give "
            "the whole log"
        )
    return ""
