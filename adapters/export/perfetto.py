"""A trace for Perfetto (ui.perfetto.dev), in the JSON of Chrome's Trace Event Format, written as the log is read.

Two processes an engine: `engine` (steps, what went wrong, cache, copies, counters), which Perfetto shows on top, and
`requests` with a track per incarnation. Nothing is kept but what is open. It must not know events of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

import msgspec

from kvledger.adapters.export.spans import (
    Call,
    Copy,
    Gauges,
    Incarnation,
    Instant,
    Lookup,
    Span,
    StateSpan,
    Step,
    Visitor,
)
from kvledger.adapters.logs.amounts import ranges

_ENGINE, _REQUESTS = 1, 2
_STEPS, _TROUBLE, _CACHE, _COPIES, _FIRST_EXTENSION = 11, 12, 13, 14, 20
_FIRST_REQUEST = 100
_ENGINE_BITS = 24
"""Process and thread ids of engine n begin at n << 24: Perfetto names threads by their id alone."""

_COUNTERS: tuple[tuple[str, str, Callable[[Gauges], int | None]], ...] = (
    ("blocks", "held by requests", attrgetter("num_blocks_held")),
    ("host slots", "free", attrgetter("num_slots_free")),
    ("host slots", "used", attrgetter("num_slots_used")),
    ("host bytes", "used", attrgetter("num_bytes_used")),
    ("chunks", "cached", attrgetter("num_chunks_cached")),
    ("jobs in flight", "loads", attrgetter("num_loads_in_flight")),
    ("jobs in flight", "saves", attrgetter("num_saves_in_flight")),
)
"""Name, series, and where its value stands."""

Write = Callable[[bytes], object]


class TraceFile:
    """The frame around the events: begin, any number of `EngineTrace`s, end."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._encode = msgspec.json.Encoder().encode
        self._separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
        self.num_events = 0

    def event(self, fields: Mapping[str, object]) -> None:
        """Write one trace event."""
        self._write(self._separator + self._encode(fields))
        self._separator = b",\n"
        self.num_events += 1

    def end(self, about: Mapping[str, object]) -> None:
        """Close the file; `about` says what the trace was made from."""
        if not self.num_events:
            self._write(self._separator)
        self._write(b'\n],"otherData":' + self._encode(about) + b"}\n")


class EngineTrace(Visitor):
    """One log in a trace. `shift_ns` moves it against others, so that logs opened at different times line up."""

    def __init__(self, trace: TraceFile, *, engine: int = 0, label: str = "", shift_ns: int = 0) -> None:
        self._trace = trace
        self._base = engine << _ENGINE_BITS
        self._shift = shift_ns
        self._open_step = False
        self._gauges: Gauges | None = None
        self._values: dict[tuple[str, str], int] = {}
        """Of the counters, as written last."""
        self._arrows: dict[int | None, str] = {}
        """Ordinal of who was preempted and does not run again yet -> id of the arrow."""
        self._num_arrows = 0
        self._tracks: set[int] = set()
        """Ordinals of the requests that are shown now."""
        self._gone: dict[str, list[Instant]] = {}
        """Kind -> chunks that left the cache since the last observation."""
        self._calls: dict[str, Call | None] = {}
        """Extension -> its last call, in the order of their tracks."""
        suffix = f" {label}" if label else ""
        for number, name in ((_ENGINE, "engine"), (_REQUESTS, "requests")):
            self._metadata("process_name", number, 0, {"name": name + suffix})
            self._metadata("process_sort_index", number, 0, {"sort_index": self._base + number})
        for number, name in ((_STEPS, "steps"), (_TROUBLE, "what went wrong"), (_CACHE, "cache and log")):
            self._metadata("thread_name", _ENGINE, number, {"name": name})
            self._metadata("thread_sort_index", _ENGINE, number, {"sort_index": number})

    # --- spans --------------------------------------------------------------------------------

    def began(self, span: Span) -> None:
        """A request gets a track of its own, a state a slice on it, a copy an asynchronous slice of the engine."""
        match span:
            case Incarnation():
                self._tracks.add(span.ordinal)
                track = _FIRST_REQUEST + span.ordinal
                self._metadata("thread_name", _REQUESTS, track, {"name": span.request_id})
                self._metadata("thread_sort_index", _REQUESTS, track, {"sort_index": span.ordinal})
            case StateSpan():
                self._begin_state(span)
            case Copy():
                self._begin_copy(span)
            case Call():
                self._begin_call(span)

    def ended(self, span: Span) -> None:
        """The slice ends; of a request, there is no more to say."""
        match span:
            case Incarnation():
                self._arrows.pop(span.ordinal, None)
                self._tracks.discard(span.ordinal)
            case StateSpan():
                self._end_state(span)
            case Copy():
                self._end_copy(span)
            case Call():
                track = _FIRST_EXTENSION + list(self._calls).index(span.extension)
                self._event("E", "call", span.name, span.last_ns, _ENGINE, track)

    def _begin_state(self, span: StateSpan) -> None:
        """Where a preempted request runs again, the arrow from its preemption ends."""
        more: dict[str, object] = {}
        if span.state == "preempted":
            self._num_arrows += 1
            self._arrows[span.ordinal] = hex(self._base << 16 | self._num_arrows)
            more = {"bind_id": self._arrows[span.ordinal], "flow_out": True}
        elif span.state in {"running", "chunked_prefill"} and span.ordinal in self._arrows:
            more = {"bind_id": self._arrows.pop(span.ordinal), "flow_in": True}
        arguments = {
            "request_id": span.request_id,
            "ordinal": span.ordinal,
            "generation": span.generation,
            "cause": span.cause,
            "sequence": span.sequence,
            "num_computed_tokens": span.num_computed_tokens,
            "num_tokens": span.num_tokens,
        }
        self._event("B", "state", span.state, span.since_ns, _REQUESTS, _FIRST_REQUEST + span.ordinal, arguments, more)

    def _end_state(self, span: StateSpan) -> None:
        arguments: dict[str, object] = {"num_computed_tokens_at_end": span.num_computed_tokens_at_end}
        if span.until_ns is None:
            arguments["open"] = "the trace ends before this state does"
        else:
            arguments["left_by"] = span.left_by
        self._event("E", "state", span.state, span.last_ns, _REQUESTS, _FIRST_REQUEST + span.ordinal, arguments)

    def _begin_copy(self, copy: Copy) -> None:
        """A load of a preempted request carries the arrow on."""
        arguments: dict[str, object] = {
            "job_id": copy.job_id,
            "request_id": copy.request_id,
            "ordinal": copy.ordinal,
            "generation": copy.generation,
            "sequence": copy.sequence,
            "num_pages": copy.num_pages,
            "slots": ranges(copy.slots),
            "block_ids": ranges(copy.block_ids),
            "is_async": copy.is_async,
            "before_forward": copy.before_forward,
        }
        if copy.chunks:
            arguments["chunks"] = ranges(copy.chunks)
        if copy.first_token is not None:
            arguments |= {"first_token": copy.first_token, "num_tokens": copy.num_tokens}
        more: dict[str, object] = {"id2": {"local": hex(copy.job_id)}}
        if copy.kind == "load" and copy.ordinal in self._arrows:
            more |= {"bind_id": self._arrows[copy.ordinal], "flow_in": True, "flow_out": True}
        self._event("b", "copy", copy.kind, copy.since_ns, _ENGINE, _COPIES, arguments, more)

    def _end_copy(self, copy: Copy) -> None:
        arguments: dict[str, object] = {
            "outcome": copy.outcome,
            "num_bytes": copy.num_bytes,
            "worker_ms": copy.worker_ns / 1e6,
            "ranks_done": ranges(sorted(copy.ranks_done)),
        }
        if copy.ranks_failed:
            arguments["ranks_failed"] = ranges(sorted(copy.ranks_failed))
        if copy.error:
            arguments["error"] = copy.error
        more: dict[str, object] = {"id2": {"local": hex(copy.job_id)}}
        self._event("e", "copy", copy.kind, copy.last_ns, _ENGINE, _COPIES, arguments, more)

    def _begin_call(self, call: Call) -> None:
        """Behind the one before: slices of a track nest, and who measured it had another clock."""
        if call.extension not in self._calls:
            self._calls[call.extension] = None
            track = _FIRST_EXTENSION + len(self._calls) - 1
            self._metadata("thread_name", _ENGINE, track, {"name": f"calls, {call.extension}"})
            self._metadata("thread_sort_index", _ENGINE, track, {"sort_index": track})
        before, self._calls[call.extension] = self._calls[call.extension], call
        since_ns = call.since_ns if before is None else max(call.since_ns, before.last_ns)
        arguments: dict[str, object] = {"sequence": call.sequence}
        if call.request_id:
            arguments["request_id"] = call.request_id
        track = _FIRST_EXTENSION + list(self._calls).index(call.extension)
        self._event("B", "call", call.name, since_ns, _ENGINE, track, arguments)

    # --- instants -----------------------------------------------------------------------------

    def looked_up(self, lookup: Lookup) -> None:
        """An instant, where the answer is another one than before: a waiting request is asked about at every step."""
        track = self._track_of(lookup.ordinal)
        if lookup.is_repeated or track is None:
            return
        arguments: dict[str, object] = {
            "sequence": lookup.sequence,
            "num_computed_tokens": lookup.num_computed_tokens,
            "num_tokens": lookup.num_tokens,
        }
        if lookup.deferred_for_job:
            arguments["deferred_for_job"] = lookup.deferred_for_job
        else:
            arguments["num_hit_tokens"] = lookup.num_hit_tokens
            arguments["num_external_tokens"] = lookup.num_external_tokens
            arguments["miss_reason"] = lookup.miss_reason
            if lookup.miss_cause:
                arguments["miss_cause"] = lookup.miss_cause
        name = "lookup deferred" if lookup.deferred_for_job else "lookup"
        self._instant("lookup", name, lookup.time_ns, _REQUESTS, track, arguments)

    def happened(self, instant: Instant) -> None:
        """On the track of the request, and on the engine's where it is of no request or went wrong."""
        if instant.kind in {"chunk.evicted", "chunk.tainted"}:
            self._gone.setdefault(instant.kind, []).append(instant)
            return
        arguments = {"text": instant.text, "sequence": instant.sequence, **instant.fields}
        category = "trouble" if instant.is_trouble else "moment"
        name = str(instant.fields.get("rule", instant.kind))
        track = self._track_of(instant.ordinal)
        if instant.is_trouble or track is None:
            of_engine = _TROUBLE if instant.is_trouble else _CACHE
            self._instant(category, name, instant.time_ns, _ENGINE, of_engine, arguments)
        if track is not None:
            self._instant(category, name, instant.time_ns, _REQUESTS, track, arguments)

    def _track_of(self, ordinal: int | None) -> int | None:
        return None if ordinal is None or ordinal not in self._tracks else _FIRST_REQUEST + ordinal

    def _show_gone(self) -> None:
        """One instant for all that left at once: instants of the same time would be drawn inside one another."""
        for kind, instants in self._gone.items():
            arguments = {
                "num_chunks": len(instants),
                "sequences": ranges(instant.sequence for instant in instants),
                "keys": " ".join(str(instant.fields["key"]) for instant in instants),
                "for_request_ids": " ".join(dict.fromkeys(each.request_id for each in instants if each.request_id)),
            }
            self._instant("moment", kind, instants[0].time_ns, _ENGINE, _CACHE, arguments)
        self._gone.clear()

    # --- the engine ---------------------------------------------------------------------------

    def stepped(self, step: Step) -> None:
        """A slice to the next step: when a step's forward ended, the log does not say."""
        self.idle(step.time_ns)
        arguments = {
            "step": step.step,
            "sequence": step.sequence,
            "num_scheduled_tokens": step.num_scheduled_tokens,
            "num_events": step.num_events,
        }
        self._event("B", "step", "step", step.time_ns, _ENGINE, _STEPS, arguments)
        self._open_step = True
        self._count("scheduled tokens", "a step", step.time_ns, step.num_scheduled_tokens)

    def idle(self, time_ns: int) -> None:
        """The step's slice ends."""
        if self._open_step:
            self._event("E", "step", "step", time_ns, _ENGINE, _STEPS)
            self._open_step = False

    def counted(self, time_ns: int, gauges: Gauges) -> None:
        """Counters, and what left the cache."""
        self._show_gone()
        if gauges == self._gauges:
            return
        self._gauges = gauges
        for state, count in gauges.num_requests.items():
            self._count("requests", state, time_ns, count)
        for name, series, value_of in _COUNTERS:
            self._count(name, series, time_ns, value_of(gauges))

    def end(self, time_ns: int) -> None:
        """The log ends here."""
        self._show_gone()
        self.idle(time_ns)

    # --- events -------------------------------------------------------------------------------

    def _count(self, name: str, series: str, time_ns: int, value: int | None) -> None:
        """Where it has changed."""
        if value is not None and self._values.get((name, series)) != value:
            self._values[name, series] = value
            self._event("C", "counter", name, time_ns, _ENGINE, _STEPS, {series: value})

    def _instant(
        self, category: str, name: str, time_ns: int, process: int, thread: int, arguments: Mapping[str, object]
    ) -> None:
        self._event("i", category, name, time_ns, process, thread, arguments, {"s": "t"})

    def _event(
        self,
        phase: str,
        category: str,
        name: str,
        time_ns: int,
        process: int,
        thread: int,
        arguments: Mapping[str, object] | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:
        time_ns += self._shift
        fields: dict[str, object] = {
            "ph": phase,
            "cat": category,
            "name": name,
            "pid": self._base + process,
            "tid": self._base + thread,
            "ts": msgspec.Raw(b"%d.%03d" % divmod(time_ns, 1000)),
        }
        if more:
            fields |= more
        if arguments:
            fields["args"] = arguments
        self._trace.event(fields)

    def _metadata(self, name: str, process: int, thread: int, arguments: Mapping[str, object]) -> None:
        fields: dict[str, object] = {"ph": "M", "name": name, "pid": self._base + process}
        if thread:
            fields["tid"] = self._base + thread
        self._trace.event({**fields, "args": arguments})
