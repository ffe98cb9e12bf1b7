"""`kvledger verify`: check that a log is intact and keeps the rules, and that today's code decides the same."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from kvledger.adapters.tools.cli.finding import logs_of, selected
from kvledger.adapters.tools.cli.options import NOTHING_CHOSEN, Deciding, Reading, positive, value
from kvledger.adapters.tools.cli.output import Output, Written, record_divergences, show_decisions, show_ending
from kvledger.adapters.tools.cli.several import num_bytes, side_by_side
from kvledger.adapters.tools.exit_codes import ExitCode, gravest
from kvledger.adapters.tools.logs.describe import plain, sentence
from kvledger.adapters.tools.logs.findings import Finding
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.processes import num_cores
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.verification import Findings, Verification, evidence_of
from kvledger.adapters.units import plural, size
from kvledger.lifecycle.events import Event

_MAX_SHOWN = 20
"""Maximum number of findings that the text lists, and of later faults that it lists for one finding."""
_OBJECTS_PER_COLLECTION = 200_000
MIN_BYTES = 4 << 20
"""Smallest total size in bytes of logs that are verified in parallel; below it, one process is faster."""


def run(
    reading: Reading,
    *,
    verbose: Annotated[
        bool, Parameter(alias="-v", help="list the rules that cannot be checked with a log, and why")
    ] = False,
    jobs: Annotated[
        int | None, value(positive, "N", help="verify N logs in parallel; default: one per CPU core")
    ] = None,
    deciding: Deciding = NOTHING_CHOSEN,
    output: Written,
) -> ExitCode:
    """Verify each log, and return the most severe exit code."""
    logs = logs_of(reading, output, with_workers=True)
    num_jobs = jobs or num_cores()
    verify_each = partial(_verify_each, reading=reading, deciding=deciding, verbose=verbose)
    has_work = sum(map(num_bytes, logs)) >= MIN_BYTES
    if has_work and num_jobs > 1 and len(logs) > 1 and reading.request is None:
        codes = side_by_side(partial(verify_each, follows=True), logs, num_jobs, output, on_lost=_show_lost)
    else:
        codes = verify_each(logs, output)
    if output.has_many_logs and not output.is_json:
        every_code, num_logs = [*codes, *output.failures], len(logs)
        words = {ExitCode.SOUND: "sound"}
        words |= {ExitCode.NOTHING_CHECKED: "without anything to check", ExitCode.NOT_VERIFIED: "not verified"}
        counts = [f"{every_code.count(code)} {word}" for code, word in words.items() if code in (*every_code, 0)]
        num_unreadable = output.failures.count(ExitCode.DAMAGED)
        counts += [f"{num_unreadable} unreadable"] if num_unreadable else []
        style = "bold green" if every_code.count(ExitCode.SOUND) == num_logs else "bold red"
        output.line()
        output.field("logs", f"{num_logs}, {', '.join(counts)}", style)
    return gravest(codes)


def _verify_each(
    logs: Sequence[Path], output: Output, *, reading: Reading, deciding: Deciding, verbose: bool, follows: bool = False
) -> list[ExitCode]:
    """Verify the logs one by one. Return the exit code of each log that can be read.

    `follows` is whether the output of another log is printed before the output of these logs.
    """
    codes: list[ExitCode] = []
    for log, selection in selected(reading, output, logs, deciding.core()):
        if (codes or follows) and not output.is_json:
            output.line()
        with output.apart_from_others(log.path):
            codes.append(_verify(log, selection, output, verbose=verbose))
    return codes


def _verify(log: StoredLog, selection: Selection, output: Output, *, verbose: bool) -> ExitCode:
    with output.progress(log, "verifying"), _rare_collections():
        findings = _findings(log, selection)
    if output.is_json:
        _show_json(output, log, findings)
    else:
        _show_text(output, log, findings, verbose=verbose)
    return findings.exit_code


def _show_lost(path: Path, reason: str, output: Output) -> ExitCode:
    """Report a log that could not be verified to its end, because the verifying process was killed at every try."""
    remedy = "verify this log alone, on a machine with more memory"
    if output.is_json:
        output.record("log", {"path": str(path), "header": None})
        code = ExitCode.NOT_VERIFIED
        remarks = [f"{reason}: {remedy}"]
        output.record("verdict", {"verdict": code.name.lower(), "exit_code": code.value, "remarks": remarks})
    else:
        output.field("log", str(path))
        output.field("verdict", "not verified", "bold red")
    output.remark(f"{path}: not verified: {reason}; {remedy}")
    return ExitCode.NOT_VERIFIED


def _findings(log: StoredLog, selection: Selection) -> Findings:
    verification = Verification(log, selection)
    for batch in log.batches(selection.last_sequence):
        verification.take(batch)
    return verification.findings()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the garbage collector rarely. An audit makes no reference cycles, and each collection scans all its data."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _show_json(output: Output, log: StoredLog, findings: Findings) -> None:
    judgement = findings.judgement
    output.record("log", {"path": str(log.path), "header": plain(log.header)})
    for damage in findings.damage:
        output.record("damage", attrs.asdict(damage))
    for violation in judgement.violations:
        output.record("violation", {**attrs.asdict(violation), "finding": findings.listed.first_sequence(violation)})
    record_divergences(output, judgement, findings.listed)
    for rule, reason in {**judgement.not_judged, **log.core.not_checked}.items():
        output.record("not_checked", {"rule": rule, "reason": reason})
    show_ending(output, log, findings.end_state.num_open_requests)
    output.record(
        "verdict",
        {
            "verdict": findings.exit_code.name.lower(),
            "exit_code": findings.exit_code.value,
            "end": log.ending.how.value,
            "num_events": log.num_events,
            "num_events_checked": judgement.num_events,
            "first_event_checked": findings.checked.first_sequence or None,
            "last_event_checked": findings.checked.last_sequence or None,
            "text": findings.verdict,
            "num_frames": log.num_frames,
            "num_bytes": log.num_bytes,
            "head_hash": log.head_hash,
            "num_skipped": dict(log.skipped),
            "num_findings": len(findings.listed.findings),
            "num_damage": len(findings.damage),
            "num_violations": judgement.num_violations,
            "num_divergences": judgement.divergences.num_found,
            "rules": judgement.judged if log.header else [],
            "stopped_extensions": [attrs.asdict(each) for each in findings.stopped],
            "remarks": findings.remarks,
            "workers": findings.of_workers,
        },
    )


def _show_text(output: Output, log: StoredLog, findings: Findings, *, verbose: bool) -> None:
    judgement = findings.judgement
    output.field("log", str(log.path))
    output.field("written by", log.written_by)
    frames = f"in {plural(log.num_frames, 'frame')}, {size(log.num_bytes)}"
    output.field("events", f"{log.num_events} {frames}")
    num_damaged = len(findings.damage)
    damaged = f"{plural(num_damaged, 'place')} damaged" if num_damaged else f"intact, head {log.head_hash}"
    output.field("chain", damaged, "red" if num_damaged else "green")
    show_ending(output, log, findings.end_state.num_open_requests)
    broken = f"broken: {', '.join(judgement.num_violations)}" if judgement.num_violations else "none broken"
    rules = f"{len(judgement.judged)} checked over {plural(judgement.num_events, 'event')}, {broken}"
    is_checked = not findings.checked.why_nothing or bool(judgement.num_violations)
    output.field("rules", rules if is_checked else "not checked", _style(is_checked, judgement.num_violations))
    if is_checked or not judgement.is_sound:
        show_decisions(output, judgement)
    elif log.header:
        output.field("decisions", "not repeated", "yellow")
    _show_findings(output, log, findings)
    if verbose:
        output.field("not checked", plural(len(log.core.not_checked), "rule"))
        for rule, reason in log.core.not_checked.items():
            output.line(f"  {rule}: {reason}")
    else:
        output.field(
            "not checked", f"{plural(len(log.core.not_checked), 'rule')} that a log cannot decide; --verbose lists them"
        )
    listed = {each.text for each in findings.stopped}
    for remark in (each for each in findings.remarks if each not in listed):
        output.field("note", remark, "yellow")
    verdict = findings.verdict
    if findings.of_workers and findings.exit_code in {ExitCode.SOUND, ExitCode.END_MISSING}:
        head, separator, part = verdict.partition("; ")
        raised = f"but {plural(len(findings.of_workers), 'worker')} raised in a hook or did not return from it"
        verdict = f"{head}, {raised}{separator}{part}"
    is_well = not findings.exit_code and not findings.of_workers
    output.field("verdict", verdict, "bold green" if is_well else "bold red")


def _style(is_checked: bool, broken: Collection[str]) -> str:  # noqa: FBT001
    if broken:
        return "red"
    return "green" if is_checked else "yellow"


def _show_findings(output: Output, log: StoredLog, findings: Findings) -> None:
    listed = findings.listed
    if not listed.findings:
        return
    output.field("findings", str(len(listed.findings)), "red")
    shown = listed.findings[:_MAX_SHOWN]
    evidence = evidence_of(log, shown)
    for finding in shown:
        _show_finding(output, log, finding, evidence)
    _show_more(output, "  ", len(listed.findings))
    if listed.num_uncollected:
        output.line(f"  … and {listed.num_uncollected} more times a rule was broken or a decision differed")


def _show_finding(output: Output, log: StoredLog, finding: Finding, evidence: dict[int, Event]) -> None:
    output.line(f"  {finding.first.title}", style="bold")
    if finding.first.detail:
        output.line(f"    {finding.first.detail}")
    for sequence in finding.first.evidence:
        if sequence in evidence:
            output.line(f"    {sequence:>8}  {sentence(evidence[sequence], log.core)}", style="dim")
    for text in finding.follows[:_MAX_SHOWN]:
        output.line(f"    then {text}")
    _show_more(output, "    ", len(finding.follows))


def _show_more(output: Output, indent: str, total: int) -> None:
    if total > _MAX_SHOWN:
        output.line(f"{indent}… and {total - _MAX_SHOWN} more")
