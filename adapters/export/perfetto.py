"""A trace for Perfetto (ui.perfetto.dev), in the JSON of Chrome's Trace Event Format, written as the log is read.

Two processes an engine: `engine` (steps, what went wrong, cache, copies, counters), which Perfetto shows on top, and
`requests` with a track per life. Nothing is kept but what is open. It must not know events of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

import msgspec

from kvledger.adapters.export.records import Copy, Gauges, Life, Listener, Lookup, Moment, StateSpan, Step
from kvledger.adapters.logs.amounts import ranges

_ENGINE, _REQUESTS = 1, 2
_STEPS, _TROUBLE, _CACHE, _COPIES = 11, 12, 13, 14
_FIRST_LIFE = 100
_ENGINE_BITS = 24
"""Process and thread ids of engine n begin at n << 24: Perfetto names threads by their id alone."""

_COUNTERS = (
    ("blocks", "held by requests"),
    ("host slots", "free"),
    ("host slots", "used"),
    ("host bytes", "used"),
    ("chunks", "cached"),
    ("jobs in flight", "loads"),
    ("jobs in flight", "saves"),
)
"""Name and series of what `_values_of` reads."""
_values_of: Callable[[Gauges], tuple[int | None, ...]] = attrgetter(
    "num_blocks_held",
    "num_slots_free",
    "num_slots_used",
    "num_bytes_used",
    "num_chunks_cached",
    "num_loads",
    "num_saves",
)

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


class EngineTrace(Listener):
    """One log in a trace. `shift_ns` moves it against others, so that logs opened at different times line up."""

    def __init__(self, trace: TraceFile, *, engine: int = 0, label: str = "", shift_ns: int = 0) -> None:
        self._trace = trace
        self._base = engine << _ENGINE_BITS
        self._shift = shift_ns
        self._open_step = False
        self._values: tuple[int | None, ...] = ()
        """Of the counters, as told last."""
        self._num_scheduled = -1
        self._flows: dict[int, str] = {}
        """Life that was preempted and does not run again yet -> id of the arrow."""
        self._num_flows = 0
        self._told: set[int] = set()
        self._gone: dict[str, list[Moment]] = {}
        """Kind -> chunks that left the cache in this moment."""
        suffix = f" {label}" if label else ""
        for number, name in ((_ENGINE, "engine"), (_REQUESTS, "requests")):
            self._metadata("process_name", number, 0, {"name": name + suffix})
            self._metadata("process_sort_index", number, 0, {"sort_index": self._base + number})
        for number, name in ((_STEPS, "steps"), (_TROUBLE, "what went wrong"), (_CACHE, "cache and log")):
            self._metadata("thread_name", _ENGINE, number, {"name": name})
            self._metadata("thread_sort_index", _ENGINE, number, {"sort_index": number})

    # --- requests -----------------------------------------------------------------------------

    def life_began(self, life: Life) -> None:
        """A track of its own."""
        thread = _FIRST_LIFE + life.ordinal
        self._told.add(life.ordinal)
        self._metadata("thread_name", _REQUESTS, thread, {"name": life.request_id})
        self._metadata("thread_sort_index", _REQUESTS, thread, {"sort_index": life.ordinal})

    def life_ended(self, life: Life) -> None:
        """Forget it."""
        self._flows.pop(life.ordinal, None)
        self._told.discard(life.ordinal)

    def state_began(self, span: StateSpan) -> None:
        """A slice begins; where a preempted request runs again, the arrow ends."""
        ordinal = span.life.ordinal
        more: dict[str, object] = {}
        if span.state == "preempted":
            self._num_flows += 1
            self._flows[ordinal] = hex(self._base << 16 | self._num_flows)
            more = {"bind_id": self._flows[ordinal], "flow_out": True}
        elif span.state in {"running", "chunked_prefill"} and ordinal in self._flows:
            more = {"bind_id": self._flows.pop(ordinal), "flow_in": True}
        arguments = {
            "request_id": span.life.request_id,
            "ordinal": ordinal,
            "generation": span.generation,
            "cause": span.cause,
            "sequence": span.sequence,
            "num_computed_tokens": span.num_computed_tokens,
            "num_tokens": span.num_tokens,
        }
        self._event("B", "state", span.state, span.since_ns, _REQUESTS, _FIRST_LIFE + ordinal, arguments, more)

    def state_ended(self, span: StateSpan) -> None:
        """The slice ends."""
        arguments: dict[str, object] = {"num_computed_tokens_at_end": span.num_computed_tokens_at_end}
        if span.until_ns is None:
            arguments["open"] = "the trace ends before this state does"
        else:
            arguments["left_by"] = span.left_by
        thread = _FIRST_LIFE + span.life.ordinal
        self._event("E", "state", span.state, span.last_ns, _REQUESTS, thread, arguments)

    def looked_up(self, lookup: Lookup) -> None:
        """An instant, where the answer is another one than before: a waiting request is asked about at every step."""
        if lookup.is_repeated or lookup.life is None or lookup.life.ordinal not in self._told:
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
        self._instant("lookup", name, lookup.time_ns, _REQUESTS, _FIRST_LIFE + lookup.life.ordinal, arguments)

    # --- copies -------------------------------------------------------------------------------

    def copy_began(self, copy: Copy) -> None:
        """An asynchronous slice begins; a load of a preempted request carries the arrow on."""
        arguments: dict[str, object] = {
            "job_id": copy.job_id,
            "request_id": copy.request_id,
            "ordinal": None if copy.life is None else copy.life.ordinal,
            "generation": copy.generation,
            "sequence": copy.sequence,
            "num_pages": copy.num_pages,
            "slots": ranges(copy.slots),
            "block_ids": ranges(copy.block_ids),
            "beside_the_steps": copy.is_async,
            "before_the_forward": copy.before_forward,
        }
        if copy.chunks:
            arguments["chunks"] = ranges(copy.chunks)
        if copy.first_token is not None:
            arguments |= {"first_token": copy.first_token, "num_tokens": copy.num_tokens}
        more: dict[str, object] = {"id2": {"local": hex(copy.job_id)}}
        if copy.kind == "load" and copy.life is not None and copy.life.ordinal in self._flows:
            more |= {"bind_id": self._flows[copy.life.ordinal], "flow_in": True, "flow_out": True}
        self._event("b", "copy", copy.kind, copy.issued_ns, _ENGINE, _COPIES, arguments, more)

    def copy_ended(self, copy: Copy) -> None:
        """The asynchronous slice ends."""
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

    # --- the engine ---------------------------------------------------------------------------

    def step_scheduled(self, step: Step) -> None:
        """A slice to the next step: when a step's forward ended, the log does not tell."""
        self.idle(step.time_ns)
        arguments = {
            "step": step.step,
            "sequence": step.sequence,
            "num_scheduled_tokens": step.num_scheduled_tokens,
            "num_events": step.num_events,
        }
        self._event("B", "step", "step", step.time_ns, _ENGINE, _STEPS, arguments)
        self._open_step = True
        if step.num_scheduled_tokens != self._num_scheduled:
            self._num_scheduled = step.num_scheduled_tokens
            self._count("scheduled tokens", "a step", step.time_ns, step.num_scheduled_tokens)

    def idle(self, time_ns: int) -> None:
        """The step's slice ends."""
        if self._open_step:
            self._event("E", "step", "step", time_ns, _ENGINE, _STEPS)
            self._open_step = False

    def happened(self, moment: Moment) -> None:
        """An instant on the track of the request, and on the engine's where it is of no request or went wrong."""
        if moment.kind in {"chunk.evicted", "chunk.tainted"}:
            self._gone.setdefault(moment.kind, []).append(moment)
            return
        arguments = {"text": moment.text, "sequence": moment.sequence, **moment.fields}
        category = "trouble" if moment.is_trouble else "moment"
        name = str(moment.fields.get("rule", moment.kind))
        has_track = moment.life is not None and moment.life.ordinal in self._told
        if moment.is_trouble or not has_track:
            thread = _TROUBLE if moment.is_trouble else _CACHE
            self._instant(category, name, moment.time_ns, _ENGINE, thread, arguments)
        if moment.life is not None and has_track:
            self._instant(category, name, moment.time_ns, _REQUESTS, _FIRST_LIFE + moment.life.ordinal, arguments)

    def counted(self, time_ns: int, gauges: Gauges) -> None:
        """Counters, where they have changed, and what left the cache."""
        self._tell_gone()
        values = (*gauges.num_requests.values(), *_values_of(gauges))
        if values == self._values:
            return
        names = (*(("requests", state) for state in gauges.num_requests), *_COUNTERS)
        for name, value, before in zip(names, values, self._values or (None,) * len(values), strict=True):
            if value != before and value is not None:
                self._count(*name, time_ns, value)
        self._values = values

    def end(self, time_ns: int) -> None:
        """The log ends here."""
        self._tell_gone()
        self.idle(time_ns)

    def _tell_gone(self) -> None:
        """One instant for all that left at once: instants of the same time would be drawn inside one another."""
        for kind, moments in self._gone.items():
            arguments = {
                "num_chunks": len(moments),
                "sequences": ranges(moment.sequence for moment in moments),
                "keys": " ".join(str(moment.fields["key"]) for moment in moments),
                "for_request_ids": " ".join(dict.fromkeys(m.request_id for m in moments if m.request_id)),
            }
            self._instant("moment", kind, moments[0].time_ns, _ENGINE, _CACHE, arguments)
        self._gone.clear()

    # --- events -------------------------------------------------------------------------------

    def _count(self, name: str, series: str, time_ns: int, value: int) -> None:
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
