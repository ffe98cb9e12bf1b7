"""Writes a trace for Perfetto (ui.perfetto.dev) while the log is read, as JSON in Chrome's Trace Event Format.

In the trace, each engine has two processes. `engine` (steps, trouble, cache, copies, counters) is shown on top.
`requests` has one track per life. Only open spans are kept in memory. This module must not depend on the meaning of
events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import cast

import msgspec

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
    Step,
)
from kvledger.adapters.tools.logs.describe import plain_fields
from kvledger.adapters.units import ranges

_ENGINE, _REQUESTS = 1, 2
_STEPS, _TROUBLE, _CACHE, _COPIES, _FIRST_EXTENSION = 11, 12, 13, 14, 20
_FIRST_REQUEST = 100
_ENGINE_BITS = 24
"""Process and thread ids of engine n begin at n << 24, because Perfetto names threads by their id alone."""

_COUNTERS: tuple[tuple[str, str, Callable[[Gauges], int | None]], ...] = (
    ("blocks", "held by requests", attrgetter("num_blocks_held")),
    ("host slots", "free", attrgetter("num_slots_free")),
    ("host slots", "used", attrgetter("num_slots_used")),
    ("host bytes", "used", attrgetter("num_bytes_used")),
    ("chunks", "cached", attrgetter("num_chunks_cached")),
    ("jobs in flight", "loads", attrgetter("num_loads_in_flight")),
    ("jobs in flight", "saves", attrgetter("num_saves_in_flight")),
)
"""(counter, series, function that returns the value)."""

Write = Callable[[bytes], object]


class TraceFile:
    """The trace file, to which any number of `EngineTrace`s write events."""

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
        """Complete the file. `about` describes the source of the trace."""
        if not self.num_events:
            self._write(self._separator)
        self._write(b'\n],"otherData":' + self._encode(about) + b"}\n")


class EngineTrace(Sink):
    """Writes one log into a trace. `shift_ns` is added to all times, to align logs with different opening times."""

    def __init__(self, trace: TraceFile, *, engine: int = 0, label: str = "", shift_ns: int = 0) -> None:
        self._trace = trace
        self._base = engine << _ENGINE_BITS
        self._shift = shift_ns
        self._open_step = False
        self._gauges: Gauges | None = None
        self._values: dict[tuple[str, str], int] = {}
        """(counter, series) → value that was written last."""
        self._arrows: dict[int | None, str] = {}
        """Ordinal of a preempted request that does not run again yet → id of its arrow."""
        self._num_arrows = 0
        self._tracks: set[int] = set()
        """Ordinals of the requests that have a track."""
        self._gone: dict[str, list[Instant]] = {}
        """Kind → instants at which chunks left the cache, since the last observation."""
        self._calls: dict[str, tuple[int, int]] = {}
        """Extension → (track of its calls, end of the last call)."""
        suffix = f" {label}" if label else ""
        for number, name in ((_ENGINE, "engine"), (_REQUESTS, "requests")):
            self._metadata("process_name", number, 0, {"name": name + suffix})
            self._metadata("process_sort_index", number, 0, {"sort_index": self._base + number})
        for track, name in ((_STEPS, "steps"), (_TROUBLE, "trouble"), (_CACHE, "cache and log")):
            self._name_track(track, name)

    # --- spans --------------------------------------------------------------------------------

    def began(self, span: Span) -> None:
        """Begin a track for a life, a slice on that track for a state, or a slice of the engine for a copy or call."""
        match span:
            case LifeSpan():
                self._tracks.add(span.ordinal)
                self._name_track(_FIRST_REQUEST + span.ordinal, span.request_id)
            case StateSpan():
                self._begin_state(span)
            case CopySpan():
                self._begin_copy(span)
            case CallSpan():
                self._begin_call(span)

    def ended(self, span: Span) -> None:
        """End the slice of a state, a copy or a call. For a life, forget its track."""
        match span:
            case LifeSpan():
                self._arrows.pop(span.ordinal, None)
                self._tracks.discard(span.ordinal)
            case StateSpan():
                self._end_state(span)
            case CopySpan():
                self._end_copy(span)
            case CallSpan():
                track, _ = self._calls[span.extension]
                self._calls[span.extension] = track, span.last_ns
                self._event("E", "call", span.name, span.last_ns, track)

    def _begin_state(self, span: StateSpan) -> None:
        """Begin a slice. An arrow leads from a preemption to the state in which the request runs again."""
        more: dict[str, object] = {}
        if span.state == "preempted":
            self._num_arrows += 1
            self._arrows[span.ordinal] = hex(self._base << 16 | self._num_arrows)
            more = {"bind_id": self._arrows[span.ordinal], "flow_out": True}
        elif span.state in {"running", "chunked_prefill"} and span.ordinal in self._arrows:
            more = {"bind_id": self._arrows.pop(span.ordinal), "flow_in": True}
        arguments = _fields(span, "request_id", "ordinal", "generation", "cause", "sequence")
        arguments |= _fields(span, "num_computed_tokens", "num_tokens")
        self._event("B", "state", span.state, span.since_ns, _FIRST_REQUEST + span.ordinal, arguments, more)

    def _end_state(self, span: StateSpan) -> None:
        is_open = span.until_ns is None
        arguments = _fields(span, "num_computed_tokens_at_end", *([] if is_open else ["left_by"]))
        if is_open:
            arguments["open"] = "the trace ends before this state"
        self._event("E", "state", span.state, span.last_ns, _FIRST_REQUEST + span.ordinal, arguments)

    def _begin_copy(self, copy: CopySpan) -> None:
        """Begin a slice. The arrow of a preempted request passes through the slice of the request's load."""
        arguments = _fields(copy, "job_id", "request_id", "ordinal", "generation", "sequence", "num_pages")
        arguments |= {"slots": ranges(copy.slots), "block_ids": ranges(copy.block_ids)}
        arguments |= _fields(copy, "is_async", "before_forward")
        if copy.chunks:
            arguments["chunks"] = ranges(copy.chunks)
        if copy.first_token is not None:
            arguments |= _fields(copy, "first_token", "num_tokens")
        more: dict[str, object] = {"id2": {"local": hex(copy.job_id)}}
        if copy.kind == "load" and copy.ordinal in self._arrows:
            more |= {"bind_id": self._arrows[copy.ordinal], "flow_in": True, "flow_out": True}
        self._event("b", "copy", copy.kind, copy.since_ns, _COPIES, arguments, more)

    def _end_copy(self, copy: CopySpan) -> None:
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
        self._event("e", "copy", copy.kind, copy.last_ns, _COPIES, arguments, more)

    def _begin_call(self, call: CallSpan) -> None:
        """Begin a slice, but not before the track's previous slice ends. Calls may overlap if clocks differ."""
        if call.extension not in self._calls:
            self._calls[call.extension] = _FIRST_EXTENSION + len(self._calls), 0
            self._name_track(self._calls[call.extension][0], f"calls, {call.extension}")
        track, before_ns = self._calls[call.extension]
        arguments = _fields(call, "sequence", *(["request_id"] if call.request_id else []))
        self._event("B", "call", call.name, max(call.since_ns, before_ns), track, arguments)

    # --- instants -----------------------------------------------------------------------------

    def looked_up(self, lookup: Lookup) -> None:
        """Write an instant if the answer differs from the previous one. vLLM looks up waiting requests in each step."""
        track = self._track_of(lookup.ordinal)
        if lookup.is_repeated or track is None:
            return
        arguments = {"sequence": lookup.sequence} | plain_fields(lookup.answer)
        self._instant("lookup", lookup.answer.id, lookup.time_ns, track, arguments)

    def happened(self, instant: Instant) -> None:
        """Write the instant on its request's track.

        Trouble is also written on a track of the engine, and so are instants without a request.
        """
        if instant.kind in {"chunks.evicted", "chunks.tainted"}:
            self._gone.setdefault(instant.kind, []).append(instant)
            return
        arguments = {"text": instant.text, "sequence": instant.sequence, **instant.fields}
        category = "trouble" if instant.is_trouble else "instant"
        name = str(instant.fields.get("rule", instant.kind))
        track = self._track_of(instant.ordinal)
        if instant.is_trouble or track is None:
            of_engine = _TROUBLE if instant.is_trouble else _CACHE
            self._instant(category, name, instant.time_ns, of_engine, arguments)
        if track is not None:
            self._instant(category, name, instant.time_ns, track, arguments)

    def _track_of(self, ordinal: int | None) -> int | None:
        return None if ordinal is None or ordinal not in self._tracks else _FIRST_REQUEST + ordinal

    def _show_gone(self) -> None:
        """Write one instant for all evicted chunks and one for all tainted ones. Perfetto would nest one per event."""
        for kind, instants in self._gone.items():
            keys = [str(key) for instant in instants for key in cast("list[str]", instant.fields["keys"])]
            arguments = {
                "num_chunks": len(keys),
                "sequences": ranges(instant.sequence for instant in instants),
                "keys": " ".join(keys),
                "for_request_ids": " ".join(dict.fromkeys(each.request_id for each in instants if each.request_id)),
            }
            self._instant("instant", kind, instants[0].time_ns, _CACHE, arguments)
        self._gone.clear()

    # --- the engine ---------------------------------------------------------------------------

    def stepped(self, step: Step) -> None:
        """Begin a slice that lasts to the next step, because the log does not have the end of a forward pass."""
        self.idle(step.time_ns)
        arguments = _fields(step, "step", "sequence", "num_scheduled_tokens", "num_events")
        self._event("B", "step", "step", step.time_ns, _STEPS, arguments)
        self._open_step = True
        self._count("scheduled tokens", "a step", step.time_ns, step.num_scheduled_tokens)

    def idle(self, time_ns: int) -> None:
        """End the slice of the current step."""
        if self._open_step:
            self._event("E", "step", "step", time_ns, _STEPS)
            self._open_step = False

    def counted(self, time_ns: int, gauges: Gauges) -> None:
        """Write the counters, and the chunks that left the cache."""
        self._show_gone()
        if gauges == self._gauges:
            return
        self._gauges = gauges
        for state, count in gauges.num_requests.items():
            self._count("requests", state, time_ns, count)
        for name, series, value_of in _COUNTERS:
            self._count(name, series, time_ns, value_of(gauges))

    def end(self, time_ns: int) -> None:
        """End the trace of this log."""
        self._show_gone()
        self.idle(time_ns)

    # --- events -------------------------------------------------------------------------------

    def _count(self, name: str, series: str, time_ns: int, value: int | None) -> None:
        """Write the value if it has changed."""
        if value is not None and self._values.get((name, series)) != value:
            self._values[name, series] = value
            self._event("C", "counter", name, time_ns, _STEPS, {series: value})

    def _instant(self, category: str, name: str, time_ns: int, track: int, arguments: Mapping[str, object]) -> None:
        self._event("i", category, name, time_ns, track, arguments, {"s": "t"})

    def _event(
        self,
        phase: str,
        category: str,
        name: str,
        time_ns: int,
        track: int,
        arguments: Mapping[str, object] | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:
        fields: dict[str, object] = {
            "ph": phase,
            "cat": category,
            "name": name,
            "pid": self._base + _process_of(track),
            "tid": self._base + track,
            "ts": msgspec.Raw(b"%d.%03d" % divmod(time_ns + self._shift, 1000)),
        }
        if more:
            fields |= more
        if arguments:
            fields["args"] = arguments
        self._trace.event(fields)

    def _name_track(self, track: int, name: str) -> None:
        """Set the name of a track, and its place in its process."""
        order = track - _FIRST_REQUEST if track >= _FIRST_REQUEST else track
        self._metadata("thread_name", _process_of(track), track, {"name": name})
        self._metadata("thread_sort_index", _process_of(track), track, {"sort_index": order})

    def _metadata(self, name: str, process: int, track: int, arguments: Mapping[str, object]) -> None:
        fields: dict[str, object] = {"ph": "M", "name": name, "pid": self._base + process}
        if track:
            fields["tid"] = self._base + track
        self._trace.event({**fields, "args": arguments})


def _process_of(track: int) -> int:
    return _REQUESTS if track >= _FIRST_REQUEST else _ENGINE


def _fields(record: object, *names: str) -> dict[str, object]:
    return {name: getattr(record, name) for name in names}
