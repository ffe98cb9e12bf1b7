"""`kvledger verify`: is this log what was written, does it keep the rules, and would today's code decide the same?"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import attrs

from kvledger.adapters.cli.exit_codes import ExitCode
from kvledger.adapters.cli.logs import StoredLog, open_log
from kvledger.adapters.cli.output import Output, event_fields, event_text, plain
from kvledger.adapters.cli.words import plural, size
from kvledger.lifecycle import HandlerRegistry
from kvledger.lifecycle.audit import NOT_CHECKED, Audit, Violation
from kvledger.lifecycle.events import Event
from kvledger.lifecycle.machine import ReferenceMachine, table_fingerprint

_MAX_SHOWN = 20
"""Of each kind for people; programs get all that is kept."""
_OBJECTS_PER_COLLECTION = 200_000


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Verify one log."""
    log = open_log(arguments.log)
    audit = Audit(log.configuration, ReferenceMachine())
    with output.progress(log, "verifying"), _rare_collections():
        audit.run_frames(log.trusted_frames())
    exit_code = _exit_code(log, audit)
    if output.is_json:
        _show_json(output, log, audit, exit_code)
    else:
        _show_text(output, log, audit, exit_code, verbose=arguments.verbose)
    return exit_code


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for cyclic garbage seldom: an audit makes none, and what it keeps would be walked over again and again."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _exit_code(log: StoredLog, audit: Audit) -> ExitCode:
    if log.damage:
        return ExitCode.DAMAGED
    if audit.num_violations:
        return ExitCode.RULE_BROKEN
    if not audit.is_sound:
        return ExitCode.DIVERGED
    return ExitCode.SOUND


def _remarks(log: StoredLog) -> list[str]:
    remarks = []
    if log.begins_late:
        remarks.append(
            f"the log begins with event {log.first_sequence}: what came before was retired or is in another file, "
            "so neither rules nor decisions could be checked"
        )
    elif log.trusted_sequence < log.last_sequence:
        remarks.append(
            f"rules and decisions were checked up to event {log.trusted_sequence}; the next ones are missing"
        )
    if log.header.get("table_fingerprint", table_fingerprint()) != table_fingerprint():
        remarks.append("the log was written with another transition table; divergences may come from that")
    handlers = HandlerRegistry().fingerprint()
    if log.header.get("handler_fingerprint", handlers) != handlers:
        remarks.append("the log was written with handlers of its own; divergences may come from that")
    return remarks


def _show_json(output: Output, log: StoredLog, audit: Audit, exit_code: ExitCode) -> None:
    output.record("log", {"path": str(log.path), "header": plain(log.header)})
    for damage in log.damage:
        output.record("damage", attrs.asdict(damage))
    for violation in audit.violations:
        output.record("violation", attrs.asdict(violation))
    for kind, found in (("divergence", audit.divergences), ("reference_difference", audit.reference_differences)):
        for divergence in found:
            recorded, decided = event_fields(divergence.recorded), event_fields(divergence.decided)
            output.record(kind, {"sequence": divergence.sequence, "recorded": recorded, "decided": decided})
    if audit.unfoldable is not None:
        event = event_fields(audit.unfoldable.event)
        error = audit.unfoldable.error
        output.record("unfoldable", {"sequence": audit.unfoldable.sequence, "event": event, "error": error})
    for rule, reason in NOT_CHECKED.items():
        output.record("not_checked", {"rule": rule, "reason": reason})
    output.record(
        "verdict",
        {
            "verdict": exit_code.name.lower(),
            "exit_code": exit_code.value,
            "num_events": log.num_events,
            "num_events_checked": audit.num_events,
            "num_frames": log.num_frames,
            "num_bytes": log.num_bytes,
            "head_hash": log.head_hash,
            "num_damage": len(log.damage),
            "num_violations": dict(audit.num_violations),
            "num_divergences": len(audit.divergences),
            "rules": [checker.rule for checker in audit.checkers],
            "remarks": _remarks(log),
        },
    )


def _show_text(output: Output, log: StoredLog, audit: Audit, exit_code: ExitCode, *, verbose: bool) -> None:
    output.field("log", str(log.path))
    output.field("written by", _origin(log))
    frames = f"in {plural(log.num_frames, 'frame')}, {size(log.num_bytes)}"
    output.field("events", f"{log.num_events} {frames}")
    damaged = f"{plural(len(log.damage), 'place')} damaged" if log.damage else f"intact, head {log.head_hash}"
    output.field("chain", damaged, "red" if log.damage else "green")
    for damage in log.damage[:_MAX_SHOWN]:
        at = "" if damage.sequence is None else f", event {damage.sequence}"
        output.line(f"  {damage.kind} in {damage.segment} at byte {damage.offset}{at}: {damage.detail}")
    _show_more(output, len(log.damage))
    num_broken = len(audit.num_violations)
    rules = f"{len(audit.checkers)} checked over {plural(audit.num_events, 'event')}, {num_broken or 'none'} broken"
    output.field("rules", rules, "red" if num_broken else "green")
    evidence = _evidence(log, audit.violations[:_MAX_SHOWN])
    for violation in audit.violations[:_MAX_SHOWN]:
        _show_violation(output, violation, evidence)
    _show_more(output, audit.num_violations.total())
    _show_divergence(output, audit)
    if verbose:
        output.field("not checked", plural(len(NOT_CHECKED), "rule"))
        for rule, reason in NOT_CHECKED.items():
            output.line(f"  {rule}: {reason}")
    else:
        output.field(
            "not checked", f"{plural(len(NOT_CHECKED), 'rule')} that a log cannot decide; --verbose lists them"
        )
    for remark in _remarks(log):
        output.field("note", remark, "yellow")
    output.field("verdict", exit_code.name.lower().replace("_", " "), "bold red" if exit_code else "bold green")


def _show_more(output: Output, total: int) -> None:
    if total > _MAX_SHOWN:
        output.line(f"  … and {total - _MAX_SHOWN} more")


def _show_violation(output: Output, violation: Violation, evidence: dict[int, Event]) -> None:
    of = f", request {violation.request_id}" if violation.request_id else ""
    generation = "" if violation.generation is None else f", generation {violation.generation}"
    output.line(f"  {violation.rule} at event {violation.sequence}{of}{generation}", style="bold")
    output.line(f"    {violation.detail}")
    for sequence in dict.fromkeys((*violation.evidence, violation.sequence)):
        if sequence in evidence:
            output.line(f"    {sequence:>8}  {event_text(evidence[sequence])}", style="dim")


def _show_divergence(output: Output, audit: Audit) -> None:
    if audit.unfoldable is not None:
        output.field("decisions", str(audit.unfoldable), "red")
    elif audit.divergences:
        num_more = len(audit.divergences) - 1
        more = f" (and {num_more} more, perhaps only because of this one)" if num_more else ""
        output.field("decisions", f"diverged {audit.divergences[0]}{more}", "red")
    else:
        output.field("decisions", "made again, all equal", "green")
    if audit.reference_differences:
        output.field("reference", f"differs {audit.reference_differences[0]}", "red")


def _evidence(log: StoredLog, violations: Collection[Violation]) -> dict[int, Event]:
    """The events that the violations name, read again: keeping all events during the audit would cost memory."""
    wanted = {sequence for violation in violations for sequence in (*violation.evidence, violation.sequence)}
    if not wanted:
        return {}
    copy = open_log(log.path)
    found: dict[int, Event] = {}
    for sequence, event in copy.events():
        if sequence in wanted:
            found[sequence] = event
            if len(found) == len(wanted):
                break
    return found


def _origin(log: StoredLog) -> str:
    return f"kvledger {log.header.get('kvledger_version', 'unknown')}, vLLM {log.header.get('vllm_version', 'unknown')}"
