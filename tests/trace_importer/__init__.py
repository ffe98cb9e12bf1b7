"""Reads a trace as Perfetto's importer of Chrome's JSON does, but refuses what that one mends, drops or counts.

What it insists on is what the importer relies on: slices of a thread nest and end under their own name, asynchronous
slices meet their ends by process, category, name and id, arrows bind to a slice that just began, counters are numbers.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import attrs

_COMMON = {"ph", "name", "pid"}
_KEYS = {
    "M": _COMMON | {"tid", "args"},
    "B": _COMMON | {"tid", "ts", "cat", "args", "bind_id", "flow_in", "flow_out"},
    "E": _COMMON | {"tid", "ts", "cat", "args"},
    "b": _COMMON | {"tid", "ts", "cat", "args", "id2", "bind_id", "flow_in", "flow_out"},
    "e": _COMMON | {"tid", "ts", "cat", "args", "id2"},
    "i": _COMMON | {"tid", "ts", "cat", "args", "s"},
    "C": _COMMON | {"tid", "ts", "cat", "args"},
}


class NotImportable(AssertionError):
    """The trace is not one that Perfetto takes as it is."""


@attrs.define(eq=False)
class Slice:
    """A slice or, without length, an instant. Times in nanoseconds."""

    process: str
    track: str
    name: str
    category: str
    begin_ns: int
    args: dict[str, Any]
    end_ns: int | None = None


@attrs.define(eq=False)
class Flow:
    """An arrow over slices."""

    slices: list[Slice]
    is_ended: bool = False


@attrs.define(eq=False)
class Trace:
    """What Perfetto would show."""

    slices: list[Slice] = attrs.field(factory=list)
    instants: list[Slice] = attrs.field(factory=list)
    copies: list[Slice] = attrs.field(factory=list)
    flows: list[Flow] = attrs.field(factory=list)
    counters: dict[tuple[str, str], list[tuple[int, float]]] = attrs.field(factory=dict)
    """(process, name) -> (time, value)."""
    other_data: dict[str, Any] = attrs.field(factory=dict)

    def of_state(self, state: str) -> list[Slice]:
        """The stays of requests in a state."""
        return [found for found in self.slices if found.category == "state" and found.name == state]

    def last_value(self, name: str) -> float:
        """Where a counter of the only engine ends."""
        return self.counters["engine", name][-1][1]


def read_trace(path: Path) -> Trace:
    """Import a trace.

    Raises:
        NotImportable: it is not as it should be; the message names the event.
    """
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    document = json.loads(data, parse_constant=_no_constant, parse_float=_exact)
    _insist(set(document) == {"displayTimeUnit", "traceEvents", "otherData"}, "top level", sorted(document))
    importer = _Importer()
    for event in document["traceEvents"]:
        importer.take(event)
    importer.finish()
    importer.trace.other_data = document["otherData"]
    return importer.trace


class _Time(float):
    """A number of microseconds that remembers its digits."""

    text: str


def _exact(text: str) -> float:
    number = _Time(text)
    number.text = text
    return number


def _no_constant(text: str) -> object:
    raise NotImportable(f"{text} is no JSON")


def _insist(condition: object, what: str, event: object) -> None:
    if not condition:
        raise NotImportable(f"{what}: {event}")


class _Importer:
    def __init__(self) -> None:
        self.trace = Trace()
        self._processes: dict[int, str] = {}
        self._threads: dict[int, tuple[int, str]] = {}
        self._stacks: dict[int, list[Slice]] = {}
        self._last: dict[object, int] = {}
        self._open: dict[tuple[Any, ...], Slice] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._flows: dict[int, Flow] = {}

    def take(self, event: dict[str, Any]) -> None:
        phase = event.get("ph")
        _insist(phase in _KEYS, "unknown phase", event)
        _insist(set(event) <= _KEYS[str(phase)], f"unknown keys {set(event) - _KEYS[str(phase)]}", event)
        _insist(isinstance(event["name"], str) and event["name"], "no name", event)
        _insist(isinstance(event["pid"], int) and 0 < event["pid"] < 1 << 31, "process id", event)
        _insist(isinstance(event.get("args", {}), dict), "arguments", event)
        if phase == "M":
            self._metadata(event)
            return
        _insist(event["pid"] in self._processes, "an unnamed process", event)
        time_ns = self._time(event)
        getattr(self, f"_take_{phase}")(event, time_ns)

    def finish(self) -> None:
        for thread, stack in self._stacks.items():
            _insist(not stack, f"slices of {self._threads[thread]} that never end", stack)
        _insist(not self._open, "copies that never end", list(self._open))

    def _time(self, event: dict[str, Any]) -> int:
        time = event.get("ts")
        _insist(isinstance(time, _Time), "a time without three decimals", event)
        whole, _, decimals = time.text.partition(".")  # type: ignore[union-attr]
        _insist(len(decimals) == 3 and not whole.startswith("-"), "a time without three decimals", event)
        return int(whole) * 1000 + int(decimals)

    def _metadata(self, event: dict[str, Any]) -> None:
        process, name = event["pid"], event["name"]
        if name == "process_name":
            _insist(process not in self._processes, "a process with two names", event)
            self._processes[process] = event["args"]["name"]
        elif name == "thread_name":
            _insist(event["tid"] not in self._threads, "a thread with two names", event)
            self._threads[event["tid"]] = (process, event["args"]["name"])
        else:
            _insist(name in {"process_sort_index", "thread_sort_index"}, "unknown metadata", event)
            _insist(isinstance(event["args"]["sort_index"], int), "sort index", event)

    def _forward(self, track: object, time_ns: int, event: dict[str, Any]) -> None:
        _insist(time_ns >= self._last.get(track, 0), "time runs backwards on its track", event)
        self._last[track] = time_ns

    def _thread(self, event: dict[str, Any]) -> tuple[str, str]:
        process, name = self._threads.get(event["tid"], (0, ""))
        _insist(process == event["pid"], "a thread of another process, or without a name", event)
        return self._processes[process], name

    def _slice(self, event: dict[str, Any], time_ns: int, process: str, track: str) -> Slice:
        return Slice(process, track, event["name"], event["cat"], time_ns, dict(event.get("args", {})))

    def _take_B(self, event: dict[str, Any], time_ns: int) -> None:  # noqa: N802 -- the phase's name
        process, track = self._thread(event)
        self._forward(event["tid"], time_ns, event)
        begun = self._slice(event, time_ns, process, track)
        self._stacks.setdefault(event["tid"], []).append(begun)
        _insist(len(self._stacks[event["tid"]]) == 1, "slices inside one another", event)
        self.trace.slices.append(begun)
        self._bind(event, begun)

    def _take_E(self, event: dict[str, Any], time_ns: int) -> None:  # noqa: N802 -- the phase's name
        self._thread(event)
        self._forward(event["tid"], time_ns, event)
        stack = self._stacks.get(event["tid"])
        _insist(stack, "an end without a beginning", event)
        ended = stack.pop()  # type: ignore[union-attr]
        _insist((ended.name, ended.category) == (event["name"], event["cat"]), "another slice's end", event)
        _end(ended, event, time_ns)

    def _take_b(self, event: dict[str, Any], time_ns: int) -> None:
        key = self._async_key(event)
        _insist(key not in self._seen, "an id that is used twice", event)
        self._seen.add(key)
        begun = self._slice(event, time_ns, self._processes[event["pid"]], event["name"])
        self._open[key] = begun
        self.trace.copies.append(begun)
        self._bind(event, begun)

    def _take_e(self, event: dict[str, Any], time_ns: int) -> None:
        key = self._async_key(event)
        _insist(key in self._open, "an end without a beginning", event)
        _end(self._open.pop(key), event, time_ns)

    def _take_i(self, event: dict[str, Any], time_ns: int) -> None:
        process, track = self._thread(event)
        _insist(event["s"] == "t", "scope", event)
        self._forward(event["tid"], time_ns, event)
        self.trace.instants.append(self._slice(event, time_ns, process, track))

    def _take_C(self, event: dict[str, Any], time_ns: int) -> None:  # noqa: N802 -- the phase's name
        _insist(event["args"], "a counter without a value", event)
        self._thread(event)
        for series, value in event["args"].items():
            _insist(isinstance(value, int | float) and not isinstance(value, bool), "no number", event)
            _insist(math.isfinite(value) and value >= 0, "no count", event)
            key = (self._processes[event["pid"]], f"{event['name']} {series}")
            self._forward(key, time_ns, event)
            self.trace.counters.setdefault(key, []).append((time_ns, float(value)))

    def _async_key(self, event: dict[str, Any]) -> tuple[Any, ...]:
        identity = event["id2"]["local"]
        _insist(isinstance(identity, str) and int(identity, 16) >= 0, "no hexadecimal id", event)
        return event["pid"], event["cat"], event["name"], identity

    def _bind(self, event: dict[str, Any], begun: Slice) -> None:
        if "bind_id" not in event:
            _insist("flow_in" not in event and "flow_out" not in event, "an arrow without an id", event)
            return
        flow_id = int(event["bind_id"], 16)
        _insist(0 < flow_id < 1 << 64, "an arrow's id", event)
        flow = self._flows.get(flow_id)
        if not event.get("flow_in"):
            _insist(event.get("flow_out") and flow is None, "an arrow that begins twice or has no direction", event)
            flow = self._flows[flow_id] = Flow([])
            self.trace.flows.append(flow)
        _insist(flow is not None and not flow.is_ended, "an arrow from nowhere", event)
        if flow is not None:
            _insist(not flow.slices or flow.slices[-1].begin_ns <= begun.begin_ns, "an arrow back in time", event)
            flow.slices.append(begun)
            flow.is_ended = not event.get("flow_out")


def _end(ended: Slice, event: dict[str, Any], time_ns: int) -> None:
    _insist(time_ns >= ended.begin_ns, "an end before the beginning", event)
    arguments = event.get("args", {})
    _insist(not set(arguments) & set(ended.args), "an argument that is told twice", event)
    ended.args |= arguments
    ended.end_ns = time_ns
