"""`kvledger conformance`: run a connector, without a GPU or a model, and report whether it does what vLLM relies on.

The code that runs the connector needs vLLM and is imported only when the command runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from kvledger.adapters.tools.cli.options import count, json_object, value
from kvledger.adapters.tools.cli.output import Output, Written
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.units import plural
from kvledger.lifecycle import described, raise_if_unstoppable
from kvledger.storage.extras import CONNECTOR, require

if TYPE_CHECKING:
    from kvledger.adapters.lab.conformance.harness import Failure
    from kvledger.adapters.lab.conformance.runs import Finding, Outcome, Run
    from kvledger.adapters.lab.conformance.subject import Subject

_PLACE = re.compile(r"\{run_dir\}[/A-Za-z_-]*")
"""A string of the extra configuration that is not a secret: a path in the run's own directory."""
_STYLES = {"kept": "green", "broken": "bold red", "not judged": "yellow"}


@Parameter(name="*")
@attrs.frozen
class Examined:
    """The connector to test, and the runs to make with it."""

    connector: Annotated[
        str, Parameter(metavar="MODULE:CLASS", help="class of the connector, or its name in vLLM's registry")
    ]
    extra_config: Annotated[
        dict[str, Any],
        value(
            json_object,
            "JSON",
            help="the connector's kv_connector_extra_config; in its strings, {run_dir} stands for a directory that is "
            "empty at the start of each run",
        ),
    ] = attrs.field(factory=dict, kw_only=True)
    seeds: Annotated[int, value(count, "N", help="number of worlds (runs with random traffic)")] = attrs.field(
        default=50, kw_only=True
    )
    first: Annotated[int, value(count, "N", help="seed of the first world")] = attrs.field(default=0, kw_only=True)
    lose: Annotated[
        str | None,
        Parameter(
            metavar="MODULE:FUNCTION",
            help="function that makes loads fail: it gets the connector's scheduler side and worker side, and deletes "
            "the saved KV",
        ),
    ] = attrs.field(default=None, kw_only=True)
    only: Annotated[
        str | None,
        Parameter(metavar="RUN", help='the only run to make: the name of a scenario, or a world such as "world 17"'),
    ] = attrs.field(default=None, kw_only=True)
    directory: Annotated[
        Path,
        Parameter(
            name=("--output", "-o"),
            metavar="DIR",
            help="directory for the logs of runs that broke an obligation or a rule",
        ),
    ] = attrs.field(default=Path("kvledger-conformance"), kw_only=True)


def run(examined: Examined, *, output: Written) -> ExitCode:
    """Run scenarios and worlds, and report on each obligation."""
    require("kvledger conformance", *CONNECTOR)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.disable(logging.CRITICAL)  # a connector's own messages would hide the report
    try:
        return _examine(examined, output)
    finally:
        logging.disable(logging.NOTSET)


def _examine(examined: Examined, output: Output) -> ExitCode:
    for given in (examined.connector, examined.lose or ""):
        _refuse_missing_module(given)
    from kvledger.adapters.lab.conformance import runs

    directory = examined.directory.absolute()
    chosen = list(_chosen(examined))
    subject, remarks = _subject(examined, chosen[0], directory)
    outcomes = _played(chosen, subject, directory, output)
    is_complete = len(outcomes) == len(chosen)
    for outcome in outcomes:
        remarks += [f"{outcome.run.name}: {remark}" for remark in outcome.remarks]
    if not output.is_json:
        _show_runs(outcomes, len(chosen), examined, output)
    findings = runs.findings(outcomes)
    for finding in findings:
        _show_finding(finding, examined, output)
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
    exit_code = _exit_code(findings, is_broken=bool(unassigned)) if is_complete else ExitCode.INTERRUPTED
    _show_verdict(exit_code, findings, len(outcomes), len(chosen), output)
    return exit_code


def _show_runs(outcomes: Sequence[Outcome], num_chosen: int, examined: Examined, output: Output) -> None:
    num_steps, num_events = (sum(getattr(each, name) for each in outcomes) for name in ("num_steps", "num_events"))
    num_runs = f"{len(outcomes)}" if len(outcomes) == num_chosen else f"{len(outcomes)} of {num_chosen}, interrupted"
    output.field("connector", examined.connector)
    output.field("runs", f"{num_runs}, {plural(num_steps, 'step')}, {plural(num_events, 'event')} audited")


def _show_verdict(
    exit_code: ExitCode, findings: Sequence[Finding], num_runs: int, num_chosen: int, output: Output
) -> None:
    counts = {word: sum(finding.verdict == word for finding in findings) for word in _STYLES}
    if output.is_json:
        keys = {f"num_{word.replace(' ', '_')}": number for word, number in counts.items()}
        verdict = {"verdict": exit_code.name.lower(), "exit_code": exit_code.value, "num_runs": num_runs}
        output.record("conformance", {**verdict, **keys})
    else:
        summary = ", ".join(f"{number} {word}" for word, number in counts.items())
        if exit_code is ExitCode.NOTHING_CHECKED:
            summary = f"nothing could be checked: {summary}"
        elif exit_code is ExitCode.INTERRUPTED:
            summary = f"incomplete, interrupted after {num_runs} of {plural(num_chosen, 'run')}: {summary}"
        output.field("verdict", summary, "bold green" if exit_code is ExitCode.SOUND else "bold red")


def _played(chosen: Sequence[Run], subject: Subject, directory: Path, output: Output) -> list[Outcome]:
    """Make the runs and return their outcomes. After SIGINT or SIGTERM, return the outcomes of the completed runs.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM came before any run was completed.
    """
    from kvledger.adapters.lab.conformance import runs

    outcomes: list[Outcome] = []
    is_terminal = sys.stderr.isatty()
    with (
        _interrupted_by_sigterm(),
        Progress(console=Console(file=sys.stderr), transient=True, disable=not is_terminal) as progress,
    ):
        task = progress.add_task("runs", total=len(chosen))
        try:
            for number, each in enumerate(chosen, 1):
                if not is_terminal:
                    output.remark(f"run {number} of {len(chosen)}: {each.name}")
                outcomes.append(runs.played(each, subject, directory))
                num_broken = sum(bool(outcome.failures) for outcome in outcomes)
                progress.update(task, advance=1, description=f"{each.name}; {num_broken} broken")
        except KeyboardInterrupt:
            if not outcomes:
                raise
    return outcomes


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise `KeyboardInterrupt`, as SIGINT does."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _refuse_missing_module(given: str) -> None:
    """Refuse "module:name" if the module does not exist. This comes before the import of vLLM, because that is slow."""
    module = given.rpartition(":")[0]
    try:
        is_missing = bool(module) and importlib.util.find_spec(module) is None
    except ModuleNotFoundError as error:  # a package around it is missing, or something that the package imports
        is_missing = f"{module}.".startswith(f"{error.name}.")
    except BaseException as error:  # noqa: BLE001 -- the import that follows reports it
        raise_if_unstoppable(error)
        return
    if is_missing:
        raise CommandFailed(
            f"{given}: there is no module {module}; put the folder that contains it on PYTHONPATH (PYTHONPATH=. for "
            "the current folder)"
        )


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


def _show_finding(finding: Finding, examined: Examined, output: Output) -> None:
    name = finding.obligation.name
    broken_in = [
        {**_failed(outcome, failure), "again": _again(examined, outcome.run.name)}
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


def _chosen(examined: Examined) -> list[Run]:
    from kvledger.adapters.lab.conformance import runs

    everything = list(runs.runs(range(examined.first, examined.first + examined.seeds)))
    if examined.only is None:
        return everything
    kind, _, seed = examined.only.partition(" ")
    if kind == "world" and seed.isdecimal():
        return [runs.world(int(seed))]
    found = [each for each in everything if examined.only in (each.name, each.scenario)]
    if not found:
        names = ", ".join(dict.fromkeys(each.scenario for each in everything if each.scenario))
        raise CommandFailed(f'--only {examined.only}: no such run; give "world N" or one of: {names}')
    return found


def _subject(examined: Examined, first: Run, directory: Path) -> tuple[Subject, list[str]]:
    """Return the connector to test, and remarks for the report.

    If the connector's worker side cannot run here, only its scheduler side is tested, and a remark says so.

    Raises:
        CommandFailed: the connector cannot be loaded or started.
    """
    from kvledger.adapters.lab.conformance import runs
    from kvledger.adapters.lab.conformance.subject import Subject
    from kvledger.adapters.recorder.options import without_unrecorded

    def text(error: BaseException) -> str:
        return without_unrecorded(described(error), examined.extra_config)

    try:
        subject = Subject.named(examined.connector, examined.extra_config, examined.lose)
    except BaseException as error:
        raise_if_unstoppable(error)
        message = f"{examined.connector}: {text(error)}; give MODULE:CLASS of a vLLM connector"
        raise CommandFailed(message) from error
    added = {key: value for key, value in subject.extra_config.items() if key not in examined.extra_config}
    remarks = [f"tested with --extra-config {json.dumps(added)}, the default for this connector"] if added else []
    try:
        runs.built(first, subject, directory)
    except BaseException as error:  # noqa: BLE001 -- if its worker is the reason, the scheduler side runs alone
        raise_if_unstoppable(error)
        without = attrs.evolve(subject, has_worker=False)
        try:
            runs.built(first, without, directory)
        except BaseException as again:  # noqa: BLE001 -- the first error says more
            raise_if_unstoppable(again)
            message = f"{examined.connector} cannot be started: {text(error)}; give its settings with --extra-config"
            raise CommandFailed(message) from error
        remark = (
            f"the connector's worker side cannot run here ({text(error)}), so only its scheduler side was run; no "
            "bytes were copied, and every copy that vLLM waited for was reported as done"
        )
        return without, [*remarks, remark]
    return subject, remarks


def _again(examined: Examined, run_name: str) -> str:
    """Return the command that repeats one run.

    Values of options that may be secrets are replaced by their type and length. The user has to fill in these values.
    """
    from kvledger.adapters.recorder.options import recorded_options

    shown = recorded_options(examined.extra_config)
    shown |= {name: value for name, value in examined.extra_config.items() if _PLACE.fullmatch(str(value))}
    extra = ["--extra-config", json.dumps(shown)] if shown else []
    lose = ["--lose", examined.lose] if examined.lose else []
    return shlex.join(["kvledger", "conformance", examined.connector, *extra, *lose, "--only", run_name])
