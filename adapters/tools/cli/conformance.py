"""`kvledger conformance`: does a connector keep what vLLM relies on? It is run; no GPU and no model is needed.

What runs it needs vLLM and is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from kvledger.adapters.tools.cli.options import count, json_object
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.units import plural
from kvledger.lifecycle import described, raise_if_unstoppable
from kvledger.storage.extras import CONNECTOR, require

if TYPE_CHECKING:
    from kvledger.adapters.lab.conformance.harness import Failure
    from kvledger.adapters.lab.conformance.runs import Finding, Outcome, Run
    from kvledger.adapters.lab.conformance.subject import Subject

_PLACE = re.compile(r"\{run_dir\}[/A-Za-z_-]*")
"""What is no secret in a string of the extra configuration: a place in the run's own directory."""
_STYLES = {"kept": "green", "broken": "bold red", "not judged": "yellow"}


def configure(parser: argparse.ArgumentParser) -> None:
    """What only this command has."""
    parser.add_argument(
        "connector", metavar="MODULE:CLASS", help="the connector, or the name of one that vLLM registers"
    )
    parser.add_argument(
        "--extra-config",
        metavar="JSON",
        type=json_object,
        default={},
        help="its kv_connector_extra_config; {run_dir} in a string is a directory that is empty when a run begins",
    )
    parser.add_argument("--seeds", metavar="N", type=count, default=50, help="how many worlds of random traffic; 50")
    parser.add_argument("--first", metavar="N", type=count, default=0, help="the seed of the first; 0")
    parser.add_argument(
        "--lose",
        metavar="MODULE:FUNCTION",
        help="called with the connector's scheduler's side and its worker's, loses what they hold: loads fail then",
    )
    parser.add_argument("--only", metavar="RUN", help='play this run alone: the name of a scenario, or "world 17"')
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("kvledger-conformance"),
        help="where the logs of runs are left in which something broke; kvledger-conformance",
    )


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Play scenarios and worlds, and report each obligation."""
    require("kvledger conformance", *CONNECTOR)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.disable(logging.CRITICAL)  # what a connector says of each run would hide the report
    try:
        return _examine(arguments, output)
    finally:
        logging.disable(logging.NOTSET)


def _examine(arguments: argparse.Namespace, output: Output) -> ExitCode:
    from kvledger.adapters.lab.conformance import runs

    directory = arguments.output.absolute()
    chosen = list(_chosen(arguments))
    subject, remarks = _subject(arguments, chosen[0], directory)
    outcomes: list[Outcome] = []
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("runs", total=len(chosen))
        for each in chosen:
            outcomes.append(runs.played(each, subject, directory))
            num_broken = sum(bool(outcome.failures) for outcome in outcomes)
            progress.update(task, advance=1, description=f"{each.name}; {num_broken} broken")
    for outcome in outcomes:
        remarks += [f"{outcome.run.name}: {remark}" for remark in outcome.remarks]
    if not output.is_json:
        num_steps, num_events = (sum(getattr(each, name) for each in outcomes) for name in ("num_steps", "num_events"))
        output.field("connector", arguments.connector)
        output.field("runs", f"{len(outcomes)}, {plural(num_steps, 'step')}, {plural(num_events, 'event')} audited")
    findings = runs.findings(outcomes)
    for finding in findings:
        _show_finding(finding, arguments, output)
    for remark in remarks:
        if output.is_json:
            output.record("remark", {"text": remark})
        else:
            output.field("note", remark, "yellow")
    unassigned = runs.unassigned(outcomes)
    for outcome, failure in unassigned:
        failed = _failed(outcome, failure)
        if output.is_json:
            output.record("unassigned", failed)
        else:
            output.field("unassigned", f"{failed['check']} in {failed['run']}: {failed['detail']}", "red")
    exit_code = _exit_code(findings, is_broken=bool(unassigned))
    counts = {word: sum(finding.verdict == word for finding in findings) for word in _STYLES}
    if output.is_json:
        keys = {f"num_{word.replace(' ', '_')}": number for word, number in counts.items()}
        verdict = {"verdict": exit_code.name.lower(), "exit_code": exit_code.value, "num_runs": len(outcomes)}
        output.record("conformance", {**verdict, **keys})
    else:
        summary = ", ".join(f"{number} {word}" for word, number in counts.items())
        summary = f"nothing could be checked: {summary}" if exit_code is ExitCode.NOTHING_CHECKED else summary
        output.field("verdict", summary, "bold green" if exit_code is ExitCode.SOUND else "bold red")
    return exit_code


def _exit_code(findings: Sequence[Finding], *, is_broken: bool) -> ExitCode:
    if is_broken or any(finding.broken_in for finding in findings):
        return ExitCode.RULE_BROKEN
    is_judged = any(finding.verdict == "kept" for finding in findings)
    return ExitCode.SOUND if is_judged else ExitCode.NOTHING_CHECKED


def _failed(outcome: Outcome, failure: Failure) -> dict[str, object]:
    return {
        "run": outcome.run.name,
        "check": failure.check,
        "detail": failure.detail,
        "sequence": failure.event,
        "log": None if outcome.log is None else str(outcome.log),
    }


def _show_finding(finding: Finding, arguments: argparse.Namespace, output: Output) -> None:
    name = finding.obligation.name
    broken_in = [
        {**_failed(outcome, failure), "again": _again(arguments, outcome.run.name)}
        for outcome, failure in finding.broken_in
    ]
    if output.is_json:
        fields = {"obligation": name, "verdict": finding.verdict.replace(" ", "_"), "reason": finding.reason}
        output.record("obligation", {**fields, "broken_in": broken_in})
        return
    style = _STYLES[finding.verdict]
    if not broken_in:
        output.field(finding.verdict, name + (f": {finding.reason}" if finding.reason else ""), style)
        return
    first, also = broken_in[0], len(broken_in) - 1
    more = f", and in {plural(also, 'more run')}" if also else ""
    at = "" if first["sequence"] is None else f" at event {first['sequence']}"
    output.field("broken", f"{name} ({finding.obligation.hook}), in {first['run']}{more}", style)
    output.line(f"    {first['check']}{at}: {first['detail']}")
    output.line(f"    again: {first['again']}", style="dim")
    if first["log"] is not None:
        output.line(f"    log: kvledger show {shlex.quote(str(first['log']))}", style="dim")


def _chosen(arguments: argparse.Namespace) -> list[Run]:
    from kvledger.adapters.lab.conformance import runs

    everything = list(runs.runs(range(arguments.first, arguments.first + arguments.seeds)))
    if arguments.only is None:
        return everything
    kind, _, seed = arguments.only.partition(" ")
    if kind == "world" and seed.isdecimal():
        return [runs.world(int(seed))]
    found = [each for each in everything if arguments.only in (each.name, each.scenario)]
    if not found:
        names = ", ".join(dict.fromkeys(each.scenario for each in everything if each.scenario))
        raise CommandFailed(f'--only {arguments.only}: no such run; there are "world N", and: {names}')
    return found


def _subject(arguments: argparse.Namespace, first: Run, directory: Path) -> tuple[Subject, list[str]]:
    """The connector with its worker, or, where that cannot be made here, without; and what is to say of that."""
    import attrs

    from kvledger.adapters.lab.conformance import runs
    from kvledger.adapters.lab.conformance.subject import Subject
    from kvledger.adapters.recorder.options import without_unrecorded

    def text(error: BaseException) -> str:
        return without_unrecorded(described(error), arguments.extra_config)

    try:
        subject = Subject.named(arguments.connector, arguments.extra_config, arguments.lose)
    except BaseException as error:
        raise_if_unstoppable(error)
        message = f"{arguments.connector}: {text(error)}; say MODULE:CLASS of a connector of vLLM's"
        raise CommandFailed(message) from error
    added = {key: value for key, value in subject.extra_config.items() if key not in arguments.extra_config}
    remarks = [f"run with --extra-config {json.dumps(added)}, the default for it here"] if added else []
    try:
        runs.built(first, subject, directory)
    except BaseException as error:  # noqa: BLE001 -- where its worker is the reason, the other side runs alone
        raise_if_unstoppable(error)
        without = attrs.evolve(subject, has_worker=False)
        try:
            runs.built(first, without, directory)
        except BaseException as again:  # noqa: BLE001 -- the first error says more
            raise_if_unstoppable(again)
            message = (
                f"{arguments.connector} cannot be started: {text(error)}; what it needs is said with --extra-config"
            )
            raise CommandFailed(message) from error
        remark = (
            f"its worker cannot run here ({text(error)}), so its scheduler's side was run alone: no "
            "byte was moved, and whatever vLLM waited for was reported as done"
        )
        return without, [*remarks, remark]
    return subject, remarks


def _again(arguments: argparse.Namespace, run_name: str) -> str:
    """The command that plays one run; options that may be secrets are to be filled in."""
    from kvledger.adapters.recorder.options import recorded_options

    shown = recorded_options(arguments.extra_config)
    shown |= {name: value for name, value in arguments.extra_config.items() if _PLACE.fullmatch(str(value))}
    extra = ["--extra-config", json.dumps(shown)] if shown else []
    lose = ["--lose", arguments.lose] if arguments.lose else []
    return shlex.join(["kvledger", "conformance", arguments.connector, *extra, *lose, "--only", run_name])
