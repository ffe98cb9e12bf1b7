"""Collects, in bounded memory, what the HTML page shows about a log.

If there are thousands of requests, requests with trouble or preemptions are kept first, and the others are counted.
This module must not depend on the look of the page.
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
"""Maximum number of instants in `Shown.troubles`, in `Shown.others`, and of each request."""
_MAX_ORDINARY = 200
"""Maximum number of lookups of one request, and of its completed saves."""
_MAX_SAMPLES = 4096
_MAX_BUSY = 4096
SLOTS = "host slots used"
SERIES = ("running", "preempted, recovering", "blocks held", SLOTS, "copies in flight")
"""Names of the curves of a page."""


@attrs.define(eq=False)
class Request:
    """One life of a request, as the HTML page shows it."""

    life: LifeSpan
    states: list[StateSpan] = attrs.field(factory=list)
    copies: list[CopySpan] = attrs.field(factory=list)
    lookups: list[Lookup] = attrs.field(factory=list)
    instants: list[Instant] = attrs.field(factory=list)
    num_saves: int = 0
    num_left_out: int = 0
    """Ordinary saves and lookups that are not drawn."""
    sums: Sums | None = None
    """Token counts of the request; None if the log lacks the events that show them."""

    @property
    def num_troubles(self) -> int:
        """Number of failures, and of instants with trouble."""
        return sum(instant.is_trouble for instant in self.instants) + self.life.summary.num_failures

    @property
    def last_ns(self) -> int:
        """Latest drawn moment of the request, in nanoseconds since the log was opened."""
        ends = [self.life.summary.arrived_ns, *(span.last_ns for span in (*self.states, *self.copies))]
        return max(ends)

    @property
    def badness(self) -> tuple[int, int, int, int]:
        """Sort key: most trouble first, then most preemptions, longest time preempted or queued, earliest arrival."""
        summary, spent = self.life.summary, self.life.summary.spent
        return (
            -self.num_troubles,
            -summary.num_preemptions,
            -(spent.queued_ns + spent.preempted_ns),
            self.life.ordinal or 0,
        )

    @property
    def interest(self) -> tuple[int, int, int]:
        """Sort key; requests with the largest keys are shown. It ranks by trouble, then by preemptions.

        Among equal requests, it chooses a sample that is spread over the whole log.
        """
        # With the bits reversed, the smallest ordinals are multiples of large powers of two, which are evenly spread.
        backwards = int(f"{self.life.ordinal % 2**64:064b}"[::-1], 2)
        return self.num_troubles, self.life.summary.num_preemptions, -backwards


@attrs.define
class Calls:
    """Calls with the same extension and name."""

    longest: CallSpan
    num_calls: int = 0
    total_ns: int = 0


class Shown(Sink):
    """Keeps what the HTML page shows about a log, for at most `MAX_REQUESTS` requests."""

    def __init__(self) -> None:
        self._requests: dict[int | None, Request] = {}
        self._ended: list[Request] = []
        self.outcomes: Counter[str] = Counter()
        """Outcome → number of requests."""
        self.num_requests = 0
        self.samples: list[tuple[int, tuple[int, ...]]] = []
        """(time, values of `SERIES`). If there are very many, each pair of neighbours becomes one that has the
        higher values."""
        self.calls: dict[str, Calls] = {}
        self.troubles: list[Instant] = []
        self.others: list[Instant] = []
        """Instants without a request that are no failures, such as resets and notes."""
        self.num_instants_left_out = 0
        self.busy: list[Interval] = []
        """Intervals with requests to schedule. If there are very many, neighbouring intervals are joined."""
        self._is_busy = False

    @property
    def requests(self) -> list[Request]:
        """The requests to show, in the order of arrival."""
        shown = sorted(self._requests.values(), key=lambda request: request.interest, reverse=True)[:MAX_REQUESTS]
        return sorted(shown, key=lambda request: request.life.ordinal)

    def began(self, span: Span) -> None:
        """Add a request."""
        if isinstance(span, LifeSpan):
            self.num_requests += 1
            self._requests[span.ordinal] = Request(span)

    def ended(self, span: Span) -> None:
        """Keep a state, copy or call that has ended, or count the outcome of a request."""
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
                else:  # keep the span without its largest fields
                    request.copies.append(msgspec.structs.replace(span, slots=(), block_ids=()))
            case CallSpan():
                calls = self.calls.setdefault(f"{span.extension}: {span.name}", Calls(span))
                calls.num_calls += 1
                calls.total_ns += span.duration_ns
                calls.longest = max(calls.longest, span, key=lambda call: call.duration_ns)

    def looked_up(self, lookup: Lookup) -> None:
        """Keep the lookup, to draw a mark, if its answer differs from the previous answer."""
        request = self._requests.get(lookup.ordinal)
        if request is None or lookup.is_repeated:
            return
        if len(request.lookups) < _MAX_ORDINARY:
            request.lookups.append(lookup)
        else:
            request.num_left_out += 1

    def happened(self, instant: Instant) -> None:
        """Keep the instant, to mark it on its request. Trouble, and instants without a request, are also listed."""
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
        """Keep the token counts of a request."""
        request = self._requests.get(history.ordinal)
        if request is not None:
            request.sums = history.sums

    def counted(self, time_ns: int, gauges: Gauges) -> None:
        """Add a point to the curves."""
        in_state = gauges.num_requests
        # Copies do not count as busy: the report of the last save comes with the next step, however late.
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

    def _be_busy(self, time_ns: int, is_busy: bool) -> None:  # noqa: FBT001 -- a measured value
        if self._is_busy:
            self.busy[-1] = (self.busy[-1][0], time_ns)
        elif is_busy:
            self.busy.append((time_ns, time_ns))
        self._is_busy = is_busy
        if len(self.busy) > 2 * _MAX_BUSY:
            pauses = sorted(later[0] - earlier[1] for earlier, later in itertools.pairwise(self.busy))
            self.busy = joined(self.busy, pauses[_MAX_BUSY])

    def _forget_ordinary(self) -> None:
        """Forget ended requests of little interest. The interest of requests that have not ended may still change."""
        self._ended.sort(key=lambda request: request.interest, reverse=True)
        for request in self._ended[MAX_REQUESTS:]:
            self._requests.pop(request.life.ordinal, None)
        del self._ended[MAX_REQUESTS:]
