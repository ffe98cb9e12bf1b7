"""`kvledger verify`: is this log what was written, does it keep the rules, and would today's code decide the same?"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import attrs

from kvledger.adapters.cli.ends import num_open_requests, show_ending, sound_text
from kvledger.adapters.cli.finding import selected
from kvledger.adapters.cli.output import Output, event_fields, event_text, plain
from kvledger.adapters.cli.selection import add_handlers
from kvledger.adapters.cli.words import other_code_remarks, plural, retired_remarks, size, written_by
from kvledger.adapters.exit_codes import ExitCode, gravest
from kvledger.adapters.reading.logs import LogDamage, StoredLog, open_log
from kvledger.adapters.reading.window import Window
from kvledger.adapters.reading.workers import WorkerCalls, rank_of, troubles_of_workers
from kvledger.lifecycle import Divergence, Extension, LedgerConfiguration
from kvledger.lifecycle.audit import Audit, Violation
from kvledger.lifecycle.events import Event
from kvledger.storage.events import HowEnded

_MAX_SHOWN = 20
"""Of each kind for people; programs get all that is kept."""
_NO_CONFIGURATION = LedgerConfiguration(block_size=1, chunk_size=1, num_slots=1)
"""For the audit of a log whose configuration is lost: it is given no event."""
_HEADER_LOST = (
    "no copy of the log's header is intact, and the configuration stood there: events were decoded as this version "
    "writes them, and neither rules nor decisions can be judged"
)
_OBJECTS_PER_COLLECTION = 200_000


def configure(parser: argparse.ArgumentParser) -> None:
    """What only this command has."""
    parser.add_argument("-v", "--verbose", action="store_true", help="list the rules that a log cannot decide, and why")
    add_handlers(parser)


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Verify each log; the exit code is that of the worst."""
    codes: list[ExitCode] = []
    for log, window in selected(arguments, output):
        if codes and not output.is_json:
            output.line()
        with output.apart_from_others(log.path):
            codes.append(_verify(log, window, output, verbose=arguments.verbose))
    if output.tells_many and not output.is_json:
        num_sound, num_logs, num_unreadable = codes.count(ExitCode.SOUND), len(arguments.logs), len(output.failures)
        unreadable = f", {num_unreadable} unreadable" if num_unreadable else ""
        output.line()
        output.field(
            "logs",
            f"{num_logs}, {num_sound} sound{unreadable}",
            "bold green" if num_sound == num_logs else "bold red",
        )
    return gravest(codes)


def _verify(log: StoredLog, window: Window, output: Output, *, verbose: bool) -> ExitCode:
    def is_selected(violation: Violation) -> bool:
        return window.holds(violation.sequence) and window.holds_request(violation.request_id)

    keeps = None if window.is_everything else is_selected
    start = log.start()
    configuration = log.configuration if log.header else _NO_CONFIGURATION
    audit = Audit(log.core, configuration, keeps=keeps, start=start)
    of_worker = None if rank_of(log) is None else WorkerCalls()
    with output.progress(log, "verifying"), _rare_collections():
        if log.header:
            frames = log.trusted_frames()
            audit.run_frames(frames if of_worker is None else of_worker.taking(frames), at=window.last_sequence)
        else:
            for _ in log.frames():
                pass
    findings = Findings.of(log, audit, window, _of_workers(log, of_worker))
    if output.is_json:
        _show_json(output, log, audit, findings)
    else:
        _show_text(output, log, audit, findings, verbose=verbose)
    return findings.exit_code


def _of_workers(log: StoredLog, calls: WorkerCalls | None) -> tuple[str, ...]:
    """What went wrong in workers: in the one whose log this is, or in those whose logs lie beside."""
    if calls is None:
        return tuple(f"worker {rank} {trouble}" for rank, trouble in troubles_of_workers(log).items())
    trouble = calls.trouble(is_over=log.ending.how is not HowEnded.OPEN)
    return (f"worker {rank_of(log)} {trouble}",) if trouble else ()


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


@attrs.frozen
class Findings:
    """What is wrong with the selected part of a log."""

    damage: tuple[LogDamage, ...]
    divergences: tuple[Divergence, ...]
    num_divergences: int
    """Where everything is selected, also those that were not kept."""
    reference_differences: tuple[Divergence, ...]
    remarks: tuple[str, ...]
    of_workers: tuple[str, ...]
    """Where a worker failed or stayed; no fault of the log."""
    exit_code: ExitCode

    @classmethod
    def of(cls, log: StoredLog, audit: Audit, window: Window, of_workers: tuple[str, ...] = ()) -> Findings:
        """Those of an audit that has come to its end."""
        damage = tuple(d for d in log.damage if d.sequence is None or window.holds(d.sequence))
        divergences = tuple(d for d in audit.divergences if _is_selected(d, window))
        differences = tuple(d for d in audit.reference_differences if _is_selected(d, window))
        if damage:
            exit_code = ExitCode.DAMAGED
        elif audit.num_violations:
            exit_code = ExitCode.RULE_BROKEN
        elif divergences or differences or audit.unfoldable is not None or _has_more(audit, window):
            exit_code = ExitCode.DIVERGED
        elif log.ending.missing is not None:
            exit_code = ExitCode.END_MISSING
        else:
            exit_code = ExitCode.SOUND
        remarks = _remarks(log, window, audit)
        if _has_more(audit, window):
            kept, found = len(audit.divergences), audit.divergences.num_found
            remarks.append(
                f"{found} decisions diverge, of which the first {kept} are kept; the rest may be selected, too"
            )
        num_divergences = audit.divergences.num_found if window.is_everything else len(divergences)
        return cls(damage, divergences, num_divergences, differences, tuple(remarks), of_workers, exit_code)


def _has_more(audit: Audit, window: Window) -> bool:
    """Whether divergences that were not kept could be selected."""
    return not window.is_everything and audit.divergences.num_found > len(audit.divergences)


def _is_selected(divergence: Divergence, window: Window) -> bool:
    event = divergence.recorded or divergence.decided
    return window.holds(divergence.sequence) and window.holds_request(getattr(event, "request_id", ""))


def _remarks(log: StoredLog, window: Window, audit: Audit) -> list[str]:
    remarks = []
    if not window.is_everything:
        end = "the end" if window.last_sequence is None else f"event {window.last_sequence}"
        whose = "" if window.request_id is None else f" that concerns {window.request_id}"
        remarks.append(f"only what was found from event {window.first_sequence} to {end}{whose} is told")
    remarks += retired_remarks(log.retired)
    if log.skipped:
        skipped = ", ".join(f"{count} {event_id}" for event_id, count in sorted(log.skipped.items()))
        remarks.append(
            f"events that this version does not know were skipped: {skipped}; what follows from them is missing, so "
            "rules may seem broken that are not"
        )
    remarks += log.start_remarks
    if log.start_sequence:
        remarks.append(
            f"rules and decisions were checked from event {log.start_sequence + 1} on, from a snapshot, whose state is "
            "trusted"
        )
    elif log.header and log.begins_late:
        remarks.append(
            f"the log begins with event {log.first_sequence}: what came before was retired or is in another file, "
            "so neither rules nor decisions could be checked"
        )
    if not log.header:
        remarks.append(_HEADER_LOST)
    is_told = log.header and (log.start_sequence > 0 or not log.begins_late)
    if is_told and log.trusted_sequence < log.last_sequence and not window.is_over(log.last_sequence):
        remarks.append(
            f"rules and decisions were checked up to event {log.trusted_sequence}; the next ones are missing"
        )
    remarks += _of_extensions(log, audit)
    table = log.core.table_fingerprint()
    if log.header.get("table_fingerprint", table) != table:
        remarks.append("the log was written with another transition table; divergences may come from that")
    used = log.core.handler_fingerprint()
    written_with = log.header.get("handler_fingerprint", used)
    if written_with != used and not log.core.absent:
        remarks.append(
            "the log was written with other handlers than were asked here, so divergences may come from that; "
            f"name them with --handlers: it was written with {written_with}"
        )
    return remarks + other_code_remarks(log)


def _of_extensions(log: StoredLog, audit: Audit) -> Iterator[str]:
    for extension in log.core.absent:
        yield _absence(extension, audit)
    for rule, reason in audit.not_judged.items():
        yield f"rule {rule} of an extension could not be judged, or not to the end: {reason}"


def _absence(extension: Extension, audit: Audit) -> str:
    declared = extension.declaration()
    events = audit.projections.totals.figures.num_extension_events
    rules = f"; its rules {', '.join(declared.rules)} were not checked" if declared.rules else ""
    return (
        f"the log was written with extension {extension.name} {extension.version} ({declared.made_by}), which is not "
        f"here. Its sub-states follow the rows in the header, {plural(events, 'event')} of extensions "
        f"{'was' if events == 1 else 'were'} taken up{rules}. What was decided upon "
        f"{plural(audit.num_unjudged, 'observation')} it may have influenced: that was not decided again. Install it, "
        "or name it with --extensions"
    )


def _show_json(output: Output, log: StoredLog, audit: Audit, findings: Findings) -> None:
    output.record("log", {"path": str(log.path), "header": plain(log.header)})
    for damage in findings.damage:
        output.record("damage", attrs.asdict(damage))
    for violation in audit.violations:
        output.record("violation", attrs.asdict(violation))
    for kind, found in (
        ("divergence", findings.divergences),
        ("reference_difference", findings.reference_differences),
    ):
        for divergence in found:
            recorded, decided = event_fields(divergence.recorded), event_fields(divergence.decided)
            output.record(kind, {"sequence": divergence.sequence, "recorded": recorded, "decided": decided})
    if audit.unfoldable is not None:
        event = event_fields(audit.unfoldable.event)
        error = audit.unfoldable.error
        output.record("unfoldable", {"sequence": audit.unfoldable.sequence, "event": event, "error": error})
    for rule, reason in {**audit.not_judged, **log.core.not_checked}.items():
        output.record("not_checked", {"rule": rule, "reason": reason})
    show_ending(output, log, num_open_requests(audit.projections) if log.header else None)
    output.record(
        "verdict",
        {
            "verdict": findings.exit_code.name.lower(),
            "exit_code": findings.exit_code.value,
            "end": log.ending.how.value,
            "num_events": log.num_events,
            "num_events_checked": audit.num_events,
            "num_frames": log.num_frames,
            "num_bytes": log.num_bytes,
            "head_hash": log.head_hash,
            "num_skipped": dict(log.skipped),
            "num_damage": len(findings.damage),
            "num_violations": dict(audit.num_violations),
            "num_divergences": findings.num_divergences,
            "rules": audit.judged if log.header else [],
            "remarks": findings.remarks,
            "workers": findings.of_workers,
        },
    )


def _show_text(output: Output, log: StoredLog, audit: Audit, findings: Findings, *, verbose: bool) -> None:
    output.field("log", str(log.path))
    output.field("written by", written_by(log))
    frames = f"in {plural(log.num_frames, 'frame')}, {size(log.num_bytes)}"
    output.field("events", f"{log.num_events} {frames}")
    num_damaged = len(findings.damage)
    damaged = f"{plural(num_damaged, 'place')} damaged" if num_damaged else f"intact, head {log.head_hash}"
    output.field("chain", damaged, "red" if num_damaged else "green")
    for damage in findings.damage[:_MAX_SHOWN]:
        at = "" if damage.sequence is None else f", event {damage.sequence}"
        output.line(f"  {damage.kind} in {damage.segment} at byte {damage.offset}{at}: {damage.detail}")
    _show_more(output, num_damaged)
    show_ending(output, log, num_open_requests(audit.projections) if log.header else None)
    num_broken = len(audit.num_violations)
    rules = f"{len(audit.judged)} checked over {plural(audit.num_events, 'event')}, {num_broken or 'none'} broken"
    rules = rules if log.header else "not checked"
    output.field("rules", rules, "red" if num_broken else "green")
    evidence = _evidence(log, audit.violations[:_MAX_SHOWN])
    for violation in audit.violations[:_MAX_SHOWN]:
        _show_violation(output, violation, evidence)
    _show_more(output, audit.num_violations.total())
    if log.header:
        _show_divergence(output, audit, findings)
    if verbose:
        output.field("not checked", plural(len(log.core.not_checked), "rule"))
        for rule, reason in log.core.not_checked.items():
            output.line(f"  {rule}: {reason}")
    else:
        output.field(
            "not checked", f"{plural(len(log.core.not_checked), 'rule')} that a log cannot decide; --verbose lists them"
        )
    for remark in findings.remarks:
        output.field("note", remark, "yellow")
    for trouble in findings.of_workers:
        output.field("worker", trouble, "red")
    is_sound = findings.exit_code in {ExitCode.SOUND, ExitCode.END_MISSING}
    verdict = sound_text(log.ending) if is_sound else findings.exit_code.name.lower().replace("_", " ")
    if is_sound and findings.of_workers:
        verdict += f", but {plural(len(findings.of_workers), 'worker')} raised in a hook or did not return from it"
    is_well = not findings.exit_code and not findings.of_workers
    output.field("verdict", verdict, "bold green" if is_well else "bold red")


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


def _show_divergence(output: Output, audit: Audit, findings: Findings) -> None:
    if audit.unfoldable is not None:
        output.field("decisions", str(audit.unfoldable), "red")
    elif findings.divergences:
        num_more = findings.num_divergences - 1
        more = f" (and {num_more} more, perhaps only because of this one)" if num_more else ""
        output.field("decisions", f"diverged {findings.divergences[0]}{more}", "red")
    else:
        output.field("decisions", "made again, all equal", "green")
    if findings.reference_differences:
        output.field("reference", f"differs {findings.reference_differences[0]}", "red")


def _evidence(log: StoredLog, violations: Collection[Violation]) -> dict[int, Event]:
    """The events that the violations name, read again: keeping all events during the audit would cost memory."""
    wanted = {sequence for violation in violations for sequence in (*violation.evidence, violation.sequence)}
    if not wanted:
        return {}
    copy = open_log(log.path, log.core, lenient=True)  # what was refused has been refused before
    found: dict[int, Event] = {}
    for sequence, event in copy.events():
        if sequence in wanted:
            found[sequence] = event
            if len(found) == len(wanted):
                break
    return found
