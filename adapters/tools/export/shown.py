"""What a page shows of a log, gathered in bounded memory.

A page is read by a person: of thousands of requests the ones that something happened to are kept, and what is left out
is counted. It must not know how a page looks.
"""

from __future__ import annotations

import itertools
from collections import Counter

import attrs
import msgspec

from kvledger.adapters.tools.export.axis import Interval, joined
from kvledger.adapters.tools.export.spans import (
    CallSpan,
    CopySpan,
    Gauges,
    Instant,
    LifeSpan,
    Lookup,
    Sink,
    Span,
    StateSpan,
)
from kvledger.adapters.tools.reasons import RequestHistory, Sums

MAX_REQUESTS = 300
MAX_INSTANTS = 200
"""Of the engine, and of each request."""
_MAX_ORDINARY = 200
"""Lookups, and saves that went well, of one request."""
_MAX_SAMPLES = 4096
_MAX_BUSY = 4096
SLOTS = "host slots used"
SERIES = ("running", "preempted, recovering", "blocks held", SLOTS, "copies in flight")
"""What the curves of a page count."""


@attrs.define(eq=False)
class Request:
    """What is shown of one life of a request."""

    life: LifeSpan
    states: list[StateSpan] = attrs.field(factory=list)
    copies: list[CopySpan] = attrs.field(factory=list)
    lookups: list[Lookup] = attrs.field(factory=list)
    instants: list[Instant] = attrs.field(factory=list)
    num_saves: int = 0
    num_left_out: int = 0
    """Ordinary saves and lookups that are not drawn."""
    sums: Sums | None = None
    """Where its tokens came from; None where the log lacks what they follow from."""

    @property
    def num_troubles(self) -> int:
        """How often something went wrong."""
        return sum(instant.is_trouble for instant in self.instants) + self.life.summary.num_failures

    @property
    def last_ns(self) -> int:
        """The last moment that is drawn of it, in nanoseconds since the log was opened."""
        ends = [self.life.summary.arrived_ns, *(span.last_ns for span in (*self.states, *self.copies))]
        return max(ends)

    @property
    def badness(self) -> tuple[int, int, int, int]:
        """The key that sorts the worst first: by trouble, preemptions, time without its blocks or queued, arrival."""
        summary, spent = self.life.summary, self.life.summary.spent
        return (
            -self.num_troubles,
            -summary.num_preemptions,
            -(spent.queued_ns + spent.preempted_ns),
            self.life.ordinal or 0,
        )

    @property
    def interest(self) -> tuple[int, int, int]:
        """The more, the rather it is shown: trouble, preemptions, then a sample from all over the log."""
        # Of numbers written backwards the smallest belong to multiples of the highest power of two: evenly spread.
        backwards = int(f"{self.life.ordinal % 2**64:064b}"[::-1], 2)
        return self.num_troubles, self.life.summary.num_preemptions, -backwards


@attrs.define
class Calls:
    """Those of one extension and name."""

    longest: CallSpan
    num_calls: int = 0
    total_ns: int = 0


class Shown(Sink):
    """Keeps what a page needs of at most `MAX_REQUESTS` requests."""

    def __init__(self) -> None:
        self._requests: dict[int | None, Request] = {}
        self._ended: list[Request] = []
        self.outcomes: Counter[str] = Counter()
        """How the requests ended -> how many of them."""
        self.num_requests = 0
        self.samples: list[tuple[int, tuple[int, ...]]] = []
        """(time, what `SERIES` counts), or the most of it around that time."""
        self.calls: dict[str, Calls] = {}
        self.troubles: list[Instant] = []
        self.others: list[Instant] = []
        """What else happened to the engine: resets, notes."""
        self.num_instants_left_out = 0
        self.busy: list[Interval] = []
        """When there were requests to schedule; of very many such times those that are close are one."""
        self._is_busy = False

    @property
    def requests(self) -> list[Request]:
        """The ones to show, in the order of their arrival."""
        shown = sorted(self._requests.values(), key=lambda request: request.interest, reverse=True)[:MAX_REQUESTS]
        return sorted(shown, key=lambda request: request.life.ordinal)

    def began(self, span: Span) -> None:
        """Another request."""
        if isinstance(span, LifeSpan):
            self.num_requests += 1
            self._requests[span.ordinal] = Request(span)

    def ended(self, span: Span) -> None:
        """A bar; of a request, how it went."""
        match span:
            case LifeSpan():
                self.outcomes[span.summary.outcome] += 1
                self._ended.append(self._requests.get(span.ordinal) or Request(span))
                if len(self._ended) >= 2 * MAX_REQUESTS:
                    self._forget_ordinary()
            case StateSpan() if (request := self._requests.get(span.ordinal)) is not None:
                request.states.append(span)
            case CopySpan() if (request := self._requests.get(span.ordinal)) is not None:
                is_ordinary = span.kind == "save" and span.outcome == "completed"
                request.num_saves += is_ordinary
                if is_ordinary and request.num_saves > _MAX_ORDINARY:
                    request.num_left_out += 1
                else:  # without what would be most of a page's memory
                    request.copies.append(msgspec.structs.replace(span, slots=(), block_ids=()))
            case CallSpan():
                calls = self.calls.setdefault(f"{span.extension}: {span.name}", Calls(span))
                calls.num_calls += 1
                calls.total_ns += span.duration_ns
                calls.longest = max(calls.longest, span, key=lambda call: call.duration_ns)

    def looked_up(self, lookup: Lookup) -> None:
        """A mark, where the answer is a new one."""
        request = self._requests.get(lookup.ordinal)
        if request is None or lookup.is_repeated:
            return
        if len(request.lookups) < _MAX_ORDINARY:
            request.lookups.append(lookup)
        else:
            request.num_left_out += 1

    def happened(self, instant: Instant) -> None:
        """A mark, and a line in the list of what happened."""
        if instant.is_trouble or not instant.request_id:
            instants = self.troubles if instant.is_trouble else self.others
            if len(instants) < MAX_INSTANTS:
                instants.append(instant)
            else:
                self.num_instants_left_out += 1
        request = self._requests.get(instant.ordinal)
        if request is not None and instant.kind != "chunks.evicted" and len(request.instants) < MAX_INSTANTS:
            request.instants.append(instant)

    def explained(self, history: RequestHistory) -> None:
        """What became of the tokens of a request."""
        request = self._requests.get(history.ordinal)
        if request is not None:
            request.sums = history.sums

    def counted(self, time_ns: int, gauges: Gauges) -> None:
        """A point of the curves."""
        in_state = gauges.num_requests
        # Copies do not count: the report of the last save comes with the next step, however late that is.
        self._be_busy(time_ns, sum(in_state.values()) > in_state["finished"])
        values = (
            in_state["running"] + in_state["chunked_prefill"],
            in_state["preempted"] + in_state["recovering"],
            gauges.num_blocks_held,
            gauges.num_slots_used,
            gauges.num_loads_in_flight + gauges.num_saves_in_flight,
        )
        if self.samples and self.samples[-1][1] == values:
            return
        self.samples.append((time_ns, values))
        if len(self.samples) > 2 * _MAX_SAMPLES:
            pairs = zip(self.samples[::2], self.samples[1::2], strict=False)
            self.samples = [(at, tuple(map(max, first, second))) for (at, first), (_, second) in pairs]

    def _be_busy(self, time_ns: int, is_busy: bool) -> None:  # noqa: FBT001 -- what is counted
        if self._is_busy:
            self.busy[-1] = (self.busy[-1][0], time_ns)
        elif is_busy:
            self.busy.append((time_ns, time_ns))
        self._is_busy = is_busy
        if len(self.busy) > 2 * _MAX_BUSY:
            pauses = sorted(later[0] - earlier[1] for earlier, later in itertools.pairwise(self.busy))
            self.busy = joined(self.busy, pauses[_MAX_BUSY])

    def _forget_ordinary(self) -> None:
        """Of those that have ended; to the others something may still happen."""
        self._ended.sort(key=lambda request: request.interest, reverse=True)
        for request in self._ended[MAX_REQUESTS:]:
            self._requests.pop(request.life.ordinal, None)
        del self._ended[MAX_REQUESTS:]
