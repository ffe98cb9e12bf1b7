"""`kvledger replay --diff`: the first event in which two logs differ, and the state just before it.

Two runs of the same requests should write the same events; where they part is where to look.
"""

from __future__ import annotations

from itertools import zip_longest

import attrs

from kvledger.adapters.figures import Totals
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.cli.state import show_state
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.tools.logs.coverage import checked
from kvledger.adapters.tools.logs.describe import event_fields, event_text, plain
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.units import plural
from kvledger.lifecycle.events import Event, field_names
from kvledger.lifecycle.untrusted import Undecodable, from_msgpack

_TIMES = frozenset({"time_ns", "duration_ns"})


def compare(log: StoredLog, other: StoredLog, selection: Selection, output: Output) -> ExitCode:
    """Compare two logs event by event; equal logs are sound, others diverged."""
    _compare_configurations(log, other, output)
    projections = log.core.new_projections(log.configuration)
    totals = Totals(projections)
    last = 0
    with output.progress(log, "comparing"):
        for ours, theirs in zip_longest(log.trusted_events(), other.trusted_events()):
            sequence, event = ours or (last + 1, None)
            if selection.is_over(sequence):
                break
            recorded = None if theirs is None else theirs[1]
            if not _is_same(event, recorded):
                _show(sequence, event, recorded, output)
                if not output.is_json:
                    show_state(output, projections, totals, last, getattr(event or recorded, "request_id", None))
                return ExitCode.DIVERGED
            if event is not None:
                projections.fold(event, sequence)
            last = sequence
    for read in (log, other):
        for damage in read.damage:
            output.remark(f"{read.path}: {damage}")
    exit_code = ExitCode.DAMAGED if log.damage or other.damage else ExitCode.SOUND
    if not last:
        return exit_code or _nothing(log, other, selection, output)
    if output.is_json:
        output.record("equal", {"num_events": last, "path": str(log.path), "other_path": str(other.path)})
    else:
        output.line(f"{plural(last, 'event')} equal, but for times", "green")
    return exit_code


def _nothing(log: StoredLog, other: StoredLog, selection: Selection, output: Output) -> ExitCode:
    """Of two logs of which none has an event that can be compared."""
    for read in (log, other):
        reason = checked(read, selection, None, is_present=True).why_nothing
        if reason:
            output.nothing(read.path, f"{read.path}: nothing could be compared: {reason}")
    return ExitCode.NOTHING_CHECKED


def _compare_configurations(log: StoredLog, other: StoredLog, output: Output) -> None:
    ours, theirs = attrs.asdict(log.configuration), attrs.asdict(other.configuration)
    for name, value in ours.items():
        if theirs[name] != value:
            output.remark(f"the logs were configured differently: {name} is {value} here and {theirs[name]} there")


def _is_same(event: Event | None, other: Event | None) -> bool:
    if type(event) is not type(other) or event is None or other is None:
        return event == other
    names = (name for name in field_names(type(event)) if name not in _TIMES)
    return all(_without_times(getattr(event, name)) == _without_times(getattr(other, name)) for name in names)


def _without_times(value: object) -> object:
    """A payload of an extension without durations; anything else as it is."""
    if not isinstance(value, bytes):
        return value
    try:
        fields: object = from_msgpack(value)
    except Undecodable:
        return value
    return {name: each for name, each in fields.items() if name not in _TIMES} if isinstance(fields, dict) else value


def _show(sequence: int, event: Event | None, other: Event | None, output: Output) -> None:
    if output.is_json:
        fields = {"sequence": sequence, "here": event_fields(event), "there": event_fields(other)}
        output.record("difference", {**fields, "fields": plain(_changed(event, other))})
        return
    output.line(f"the logs differ at event {sequence}", "bold red")
    output.field("here", "the log ends" if event is None else event_text(event))
    output.field("there", "the log ends" if other is None else event_text(other))
    changed = _changed(event, other)
    if changed:
        output.field("differs in", ", ".join(changed))


def _changed(event: Event | None, other: Event | None) -> list[str]:
    if event is None or other is None or type(event) is not type(other):
        return []
    return [name for name in field_names(type(event)) if getattr(event, name) != getattr(other, name)]
