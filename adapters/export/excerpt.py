"""A part of a log: from one event to another, of all requests or of one.

Stands between the chronicle, which needs the whole log to know the state, and a listener that wants to hear of a part.
"""

from __future__ import annotations

from kvledger.adapters.export.records import Copy, Gauges, Life, Listener, Lookup, Moment, StateSpan, Step
from kvledger.adapters.logs.selection import Selection


class Excerpt(Listener):
    """Passes on what touches the selected part of the log and concerns its request.

    Spans keep their true beginning, also where it lies before; where they reach beyond the end, they are left open.
    Steps, counts and moments that concern no request pass for every choice of a request.
    """

    def __init__(self, listener: Listener, selection: Selection) -> None:
        self._listener = listener
        self._window = selection
        self._has_begun = selection.first_sequence == 1
        self._before: dict[Life | StateSpan | Copy, None] = {}
        """What began before and goes on, in that order."""

    def reach(self, sequence: int) -> None:
        """Say which event is next; what is open at the beginning of the part is told then."""
        if self._has_begun or sequence < self._window.first_sequence:
            return
        self._has_begun = True
        for begun in self._before:
            if isinstance(begun, Life):
                self._listener.life_began(begun)
            elif isinstance(begun, StateSpan):
                self._listener.state_began(begun)
            else:
                self._listener.copy_began(begun)
        self._before.clear()

    def life_began(self, life: Life) -> None:
        """Pass on or keep."""
        if self._wants(life.request_id):
            if self._has_begun:
                self._listener.life_began(life)
            else:
                self._before[life] = None

    def life_ended(self, life: Life) -> None:
        """Pass on if its beginning was."""
        if self._wants(life.request_id) and self._was_told(life):
            self._listener.life_ended(life)

    def state_began(self, span: StateSpan) -> None:
        """Pass on or keep."""
        if self._wants(span.life.request_id):
            if self._has_begun:
                self._listener.state_began(span)
            else:
                self._before[span] = None

    def state_ended(self, span: StateSpan) -> None:
        """Pass on if its beginning was."""
        if self._wants(span.life.request_id) and self._was_told(span):
            self._listener.state_ended(span)

    def copy_began(self, copy: Copy) -> None:
        """Pass on or keep."""
        if self._wants(copy.request_id):
            if self._has_begun:
                self._listener.copy_began(copy)
            else:
                self._before[copy] = None

    def copy_ended(self, copy: Copy) -> None:
        """Pass on if its beginning was."""
        if self._wants(copy.request_id) and self._was_told(copy):
            self._listener.copy_ended(copy)

    def looked_up(self, lookup: Lookup) -> None:
        """Pass on inside."""
        if self._has_begun and self._wants(lookup.request_id):
            self._listener.looked_up(lookup)

    def step_scheduled(self, step: Step) -> None:
        """Pass on inside."""
        if self._has_begun and step.sequence >= self._window.first_sequence:
            self._listener.step_scheduled(step)

    def happened(self, moment: Moment) -> None:
        """Pass on inside."""
        if self._has_begun and (not moment.request_id or self._wants(moment.request_id)):
            self._listener.happened(moment)

    def counted(self, time_ns: int, gauges: Gauges) -> None:
        """Pass on inside."""
        if self._has_begun:
            self._listener.counted(time_ns, gauges)

    def idle(self, time_ns: int) -> None:
        """Pass on inside."""
        if self._has_begun:
            self._listener.idle(time_ns)

    def _wants(self, request_id: str) -> bool:
        return self._window.request_id in {None, request_id}

    def _was_told(self, begun: Life | StateSpan | Copy) -> bool:
        if begun in self._before:
            del self._before[begun]
            return False
        return self._has_begun
