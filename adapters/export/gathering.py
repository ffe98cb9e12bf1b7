"""What a page shows of a log, gathered while it is told, in bounded memory.

A page is read by a person: of thousands of requests the ones that something happened to are kept, and what is left out
is counted. It must not know how a page looks.
"""

from __future__ import annotations

from collections import Counter

import attrs

from kvledger.adapters.export.spans import Call, Copy, Gauges, Incarnation, Instant, Lookup, Span, StateSpan, Visitor

MAX_REQUESTS = 300
"""Drawn at most."""
MAX_INSTANTS = 200
"""Listed at most."""
_MAX_SAVES = 200
"""Of one request that are drawn at most, as long as they went well."""
_MAX_LOOKUPS = 200
_MAX_SAMPLES = 4096


@attrs.define(eq=False)
class Told:
    """What is known of one incarnation of a request."""

    incarnation: Incarnation
    states: list[StateSpan] = attrs.field(factory=list)
    copies: list[Copy] = attrs.field(factory=list)
    lookups: list[Lookup] = attrs.field(factory=list)
    instants: list[Instant] = attrs.field(factory=list)
    num_saves: int = 0
    has_ended: bool = False
    num_left_out: int = 0
    """Ordinary saves and lookups that are not drawn."""

    @property
    def interest(self) -> tuple[int, int, int, int]:
        """The more, the rather it is shown: trouble, failures, preemptions, then who came first."""
        num_troubles = sum(instant.is_trouble for instant in self.instants)
        return num_troubles, self.incarnation.num_failures, self.incarnation.num_preemptions, -self.incarnation.ordinal


@attrs.define
class Calls:
    """Those of one name."""

    longest: Call
    num_calls: int = 0
    total_ns: int = 0


@attrs.frozen
class Sample:
    """Counts at one moment, or the most of them around it."""

    time_ns: int
    values: tuple[int, ...]


SLOTS = "host slots used"
SERIES = ("running", "preempted, recovering", "blocks held", SLOTS, "copies in flight")
"""What the curves of a page count."""


class Gathering(Visitor):
    """Keeps what a page of at most `max_requests` requests needs."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._told: dict[int, Told] = {}
        self._num_ended = 0
        """Of those."""
        self.outcomes: Counter[str] = Counter()
        """How the requests ended -> how many of them."""
        self.num_requests = 0
        self.samples: list[Sample] = []
        self.calls: dict[tuple[str, str], Calls] = {}
        """Extension and name -> how long calls took."""
        self.troubles: list[Instant] = []
        self.num_troubles = 0
        self.others: list[Instant] = []
        """Instants of the engine: resets, notes, missing events."""
        self.first_ns: int | None = None
        """The earliest time told of, where a log is told from its middle."""

    @property
    def requests(self) -> list[Told]:
        """The ones to show, in the order of their arrival."""
        shown = sorted(self._told.values(), key=lambda told: told.interest, reverse=True)[: self._max_requests]
        return sorted(shown, key=lambda told: told.incarnation.ordinal)

    @property
    def num_left_out(self) -> int:
        """Requests that are not shown."""
        return self.num_requests - min(len(self._told), self._max_requests)

    def began(self, span: Span) -> None:
        """Another request."""
        if isinstance(span, Incarnation):
            self.num_requests += 1
            self._told[span.ordinal] = Told(span)

    def ended(self, span: Span) -> None:
        """A bar; of a request, how it went."""
        match span:
            case Incarnation():
                self._end_incarnation(span)
            case StateSpan() if (told := self._told.get(span.ordinal)) is not None:
                told.states.append(span)
            case Copy() if (told := self._of(span.ordinal)) is not None:
                self._take_copy(told, span)
            case Call():
                self._take_call(span)

    def _of(self, ordinal: int | None) -> Told | None:
        return None if ordinal is None else self._told.get(ordinal)

    def _end_incarnation(self, incarnation: Incarnation) -> None:
        """What nothing happened to is left out when there are too many."""
        self.outcomes[incarnation.outcome] += 1
        told = self._told.get(incarnation.ordinal)
        if told is not None:
            told.has_ended = True
            self._num_ended += 1
            if self._num_ended >= 2 * self._max_requests:
                self._prune()

    def _take_copy(self, told: Told, copy: Copy) -> None:
        is_ordinary = copy.kind == "save" and copy.outcome == "completed"
        told.num_saves += is_ordinary
        if is_ordinary and told.num_saves > _MAX_SAVES:
            told.num_left_out += 1
        else:
            told.copies.append(attrs.evolve(copy, slots=(), block_ids=()))  # which would be most of a page's memory

    def _take_call(self, call: Call) -> None:
        calls = self.calls.setdefault((call.extension, call.name), Calls(call))
        calls.num_calls += 1
        calls.total_ns += call.duration_ns
        calls.longest = max(calls.longest, call, key=lambda each: each.duration_ns)

    def looked_up(self, lookup: Lookup) -> None:
        """A mark, where the answer is a new one."""
        told = self._of(lookup.ordinal)
        if told is None or lookup.is_repeated:
            return
        if len(told.lookups) >= _MAX_LOOKUPS:
            told.num_left_out += 1
        else:
            told.lookups.append(lookup)

    def happened(self, instant: Instant) -> None:
        """A mark, and a line in the list of what went wrong."""
        if instant.is_trouble:
            self.num_troubles += 1
            if len(self.troubles) < MAX_INSTANTS:
                self.troubles.append(instant)
        elif not instant.request_id and len(self.others) < MAX_INSTANTS:
            self.others.append(instant)
        told = self._of(instant.ordinal)
        if told is not None and instant.kind != "chunk.evicted" and len(told.instants) < MAX_INSTANTS:
            told.instants.append(instant)

    def counted(self, time_ns: int, gauges: Gauges) -> None:
        """A point of the curves."""
        if self.first_ns is None:
            self.first_ns = time_ns
        in_state = gauges.num_requests
        values = (
            in_state["running"] + in_state["chunked_prefill"],
            in_state["preempted"] + in_state["recovering"],
            gauges.num_blocks_held,
            gauges.num_slots_used,
            gauges.num_loads_in_flight + gauges.num_saves_in_flight,
        )
        if self.samples and self.samples[-1].values == values:
            return
        self.samples.append(Sample(time_ns, values))
        if len(self.samples) > 2 * _MAX_SAMPLES:
            pairs = zip(self.samples[::2], self.samples[1::2], strict=False)
            self.samples = [
                Sample(first.time_ns, tuple(map(max, first.values, second.values))) for first, second in pairs
            ]

    def _prune(self) -> None:
        """Forget the least interesting half of those that have ended; something may still happen to the others."""
        ended = sorted((told for told in self._told.values() if told.has_ended), key=lambda told: told.interest)
        for told in ended[: -self._max_requests]:
            del self._told[told.incarnation.ordinal]
        self._num_ended = self._max_requests
