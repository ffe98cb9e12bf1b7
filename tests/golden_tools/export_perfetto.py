"""What `kvledger export --perfetto` writes of the story `export.txt`: slices, instants and counters by track."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from golden_tools.export_story import COPIES, END, INSTANTS, LOOKUPS, STATES, STEPS, STORY, Instant, Lookup, State
from golden_tools.golden import Golden, printed

_FIRST_REQUEST = 100
"""Number of the track of the life with ordinal 0."""


def _begins(each: State) -> str:
    counts = f"{each.num_computed} of {each.num_tokens} tokens"
    return f"{each.since} begins {each.state}: generation {each.generation}, {each.cause} {each.sequence}, {counts}"


def _ends(each: State) -> str:
    until, how = (END, "open") if each.until is None else (each.until, each.left_by)
    return f"{until} ends {each.state}: {each.num_computed_at_end} tokens, {how}"


def _looked_up(each: Lookup) -> str:
    return f"{each.at} lookup.answered {each.sequence}"


def _happened(each: Instant) -> str:
    return f"{each.at} {each.kind} {each.sequence}"


_LIFE_0 = [
    _begins(STATES[0]),
    _looked_up(LOOKUPS[0]),
    _ends(STATES[0]),
    _begins(STATES[1]),
    _ends(STATES[1]),
    # An arrow leads from the preemption over the load to where the request runs again.
    _begins(STATES[2]) + ", arrow leaves",
    _looked_up(LOOKUPS[1]),
    _ends(STATES[2]),
    _begins(STATES[3]),
    _ends(STATES[3]),
    _begins(STATES[4]) + ", arrow arrives",
    _ends(STATES[4]),
    _begins(STATES[5]),
    _happened(INSTANTS[0]),
    _ends(STATES[5]),
    _begins(STATES[6]),
    _ends(STATES[6]),
    _begins(STATES[7]),
    _ends(STATES[7]),
]
_LIFE_1 = [
    _begins(STATES[8]),
    _looked_up(LOOKUPS[2]),
    _ends(STATES[8]),
    _begins(STATES[9]),
    _happened(INSTANTS[3]),
    _ends(STATES[9]),
    _begins(STATES[10]),
    _happened(INSTANTS[4]),
    _ends(STATES[10]),
    _begins(STATES[11]),
    _ends(STATES[11]),
]


def _copies() -> Iterator[str]:
    for copy in COPIES:
        of = f"{copy.kind} {copy.job_id}"
        arrow = ", arrow passes" if copy.job_id == 3 else ""
        yield f"copies: {copy.since} begins {of}: life {copy.ordinal}, generation {copy.generation}{arrow}"
        outcome = f"failed: {copy.error}" if copy.error else "completed"
        yield f"copies: {copy.until} ends {of}: {copy.num_bytes} B, {outcome}"


def _steps() -> Iterator[str]:
    """A slice lasts to the next step. That of step 6 ends at 38 ms, when no request is left to schedule."""
    ends = [*(step.at for step in STEPS[1:7]), 38, *(step.at for step in STEPS[8:]), END]
    for number, (step, end) in enumerate(zip(STEPS, ends, strict=True)):
        yield f"steps: {step.at} begins step {number}: {step.num_tokens} tokens"
        yield f"steps: {end} ends step"


_COUNTERS = {
    # What is counted after each observation, where it has changed.
    "requests new": "0=1 1=0 40=1 44=0",
    "requests chunked_prefill": "0=0 30=1 30=0 44=1 50=0",
    "requests running": "0=0 1=1 10=0 24=1 30=0 30=1 35=0 44=1 44=0 50=1",
    "requests preempted": "0=0 10=1 20=0",
    "requests recovering": "0=0 20=1 24=0",
    "requests finished": "0=0 35=1 38=0",
    # Blocks 1-3, 4-6, then 7, too; after the end 8-10.
    "blocks held by requests": "0=0 0=3 10=0 20=3 30=4 35=0 40=3",
    "host slots free": "0=5 5=3 10=2 24=3 35=1 44=3",
    "host slots used": "0=0 5=2 10=3 24=2 35=4 44=2",
    # Known from the first save on.
    "host bytes used": "7=1024 10=1536 24=1024 35=2048 44=1024",
    "chunks cached": "0=0 7=1 38=2 44=1",
    "jobs in flight loads": "0=0 20=1 24=0 40=1 44=0",
    "jobs in flight saves": "0=0 5=1 7=0 10=1 12=0 35=1 38=0",
    "scheduled tokens a step": "1=40 5=1 10=0 20=1 30=24 41=1 50=33 60=1",
}

TRACKS = [
    *(f"doc, life 0: {line}" for line in _LIFE_0),
    *(f"doc, life 1: {line}" for line in _LIFE_1),
    *_copies(),
    *_steps(),
    f"trouble: {_happened(INSTANTS[2])}",
    f"trouble: {_happened(INSTANTS[3])}",
    f"cache and log: {_happened(INSTANTS[1])}: 1 chunk",
    *(f"counter {name}: {values}" for name, values in sorted(_COUNTERS.items())),
]


def _tracks(log: Path) -> list[str]:
    """What is written, in the form of `TRACKS` and sorted by track."""
    path = log.parent / "trace.json"
    printed("export", log, "--perfetto", "-o", path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    by_track: defaultdict[str, list[str]] = defaultdict(list)
    counters: defaultdict[str, list[str]] = defaultdict(list)
    for each in events:
        if each["ph"] == "C":
            ((series, value),) = each["args"].items()
            counters[f"{each['name']} {series}"].append(f"{_at(each)}={value}")
        elif each["ph"] != "M":
            track = each["tid"]
            is_life = track >= _FIRST_REQUEST
            name = f"{names[track]}, life {track - _FIRST_REQUEST}" if is_life else names.get(track, "copies")
            by_track[name].append(f"{name}: {_at(each)} {_text(each)}")
    tracks = [
        *sorted(name for name in by_track if "life" in name),
        "copies",
        "steps",
        "trouble",
        "cache and log",
    ]
    lines = [line for track in tracks for line in by_track.pop(track, [])]
    assert not by_track
    return [*lines, *(f"counter {name}: {' '.join(values)}" for name, values in sorted(counters.items()))]


def _at(event: dict[str, Any]) -> str:
    """In milliseconds."""
    return f"{event['ts'] / 1000:g}"


def _text(event: dict[str, Any]) -> str:
    said = event.get("args", {})
    name, arrows = event["name"], ("flow_in" in event, "flow_out" in event)
    match event["ph"], event["cat"]:
        case "B", "state":
            counts = f"{said['num_computed_tokens']} of {said['num_tokens']} tokens"
            text = f"begins {name}: generation {said['generation']}, {said['cause']} {said['sequence']}, {counts}"
        case "E", "state":
            how = "open" if "open" in said else said["left_by"]
            text = f"ends {name}: {said['num_computed_tokens_at_end']} tokens, {how}"
        case "b", _:
            text = f"begins {name} {said['job_id']}: life {said['ordinal']}, generation {said['generation']}"
        case "e", _:
            how = f"failed: {said['error']}" if "error" in said else said["outcome"]
            text = f"ends {name} {int(event['id2']['local'], 16)}: {said['num_bytes']} B, {how}"
        case "B", "step":
            text = f"begins step {said['step']}: {said['num_scheduled_tokens']} tokens"
        case "E", "step":
            text = "ends step"
        case _:
            gone = f": {said['num_chunks']} chunk" if "num_chunks" in said else ""
            text = f"{name} {said.get('sequences', said.get('sequence'))}{gone}"
    return text + _ARROWS[arrows]


_ARROWS = {
    (False, False): "",
    (False, True): ", arrow leaves",
    (True, True): ", arrow passes",
    (True, False): ", arrow arrives",
}


GOLDEN = {"export, a trace for Perfetto": Golden("export", STORY, _tracks, TRACKS)}
