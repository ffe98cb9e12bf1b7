"""`kvledger repro`: writes a test that reproduces an incident, and next to it the log that the test repeats."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import attrs
from cyclopts import Parameter

from kvledger.adapters.lab.repro.calls import end_of_call, hook_calls
from kvledger.adapters.lab.repro.chosen import Chosen
from kvledger.adapters.lab.repro.core import CoreRun
from kvledger.adapters.lab.repro.incidents import Findings, find_incidents
from kvledger.adapters.lab.repro.outcome import NEVER_EXCUSED, Trouble
from kvledger.adapters.lab.repro.recording import NotRerunnable, Recording, record
from kvledger.adapters.lab.repro.reduce import Reduced, reduce
from kvledger.adapters.lab.repro.rerun import rerun
from kvledger.adapters.lab.repro.run_once import Ended, TestRun, run_once
from kvledger.adapters.lab.repro.write import ANSWERS_TEST, Description, log_bytes, test_source, with_numbered_keys
from kvledger.adapters.tools.cli.finding import selected_one
from kvledger.adapters.tools.cli.options import NOTHING_CHOSEN, Deciding, Reading, json_object, value
from kvledger.adapters.tools.cli.output import Output, Written
from kvledger.adapters.tools.cli.target import open_target
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.sources import start_of
from kvledger.adapters.units import plural
from kvledger.lifecycle import SequencedEvent

_MAX_EVENTS = 2_000_000
"""Most events that a test may take. They are held in memory and run again many times."""
_MAX_EVENTS_OF_A_CALL = 20_000
_MAX_NAMED = 10


_OF_RECORDER: Final = "A recorder's log"


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Wanted:
    """Options of the test."""

    path: Annotated[
        Path,
        Parameter(
            name=("--output", "-o"),
            metavar="FILE",
            help="test file to write; next to it, the command writes the log that the test repeats",
        ),
    ] = Path("test_incident.py")
    force: Annotated[bool, Parameter(help="replace FILE and the log next to FILE if they exist")] = False
    core: Annotated[bool, Parameter(help="test only the core. This takes milliseconds and does not need vLLM")] = False
    pin: Annotated[
        bool, Parameter(help="instead of an incident, test that the lookups of REQUEST get the recorded answers")
    ] = False
    connector: Annotated[
        str,
        Parameter(
            group=_OF_RECORDER,
            metavar="MODULE:CLASS",
            help="connector to run: its class, or its name in vLLM's registry",
        ),
    ] = ""
    run_recorded: Annotated[
        bool,
        Parameter(
            group=_OF_RECORDER,
            help="run the connector that the log names. kvledger then imports a module that the log names, so use this "
            "option only for logs that you trust",
        ),
    ] = False
    extra_config: Annotated[
        Mapping[str, Any],
        value(
            json_object,
            "JSON",
            group=_OF_RECORDER,
            help="keys of the connector's kv_connector_extra_config. Give paths, addresses and names of code here if "
            "the connector needs them: they are not taken from the log",
        ),
    ] = attrs.field(factory=dict)
    all: Annotated[bool, Parameter(help="keep all requests, even if the test does not need them")] = False
    no_run: Annotated[bool, Parameter(help="write the test without running it")] = False

    @property
    def log_path(self) -> Path:
        """Return the path of the log that is written next to the test."""
        return self.path.with_suffix(".kvlog")

    def refuse_contradictions(self) -> None:
        """Refuse a test file that is not a Python file, and options that exclude each other."""
        if self.path.suffix != ".py":
            raise CommandFailed(f"{self.path} is not a Python file; give -o a name that ends in .py")
        if self.connector and self.run_recorded:
            raise CommandFailed("give --connector or --run-recorded, not both")


def run(
    reading: Reading,
    *,
    wanted: Wanted = Wanted(),
    deciding: Deciding = NOTHING_CHOSEN,
    output: Written,
) -> ExitCode:
    """Write a test and the log that it repeats, and run the test once."""
    wanted.refuse_contradictions()
    log, selection = selected_one(reading, output, deciding.core())
    log_path = wanted.log_path
    for path in (wanted.path, log_path):  # before minutes of work
        _refuse_target(path, overwrite=wanted.force)
    if log.worker_rank is not None:
        scheduler = start_of(log.path).scheduler
        remedy = (
            f"give the scheduler's log: {scheduler}"
            if scheduler is not None
            else "there is no scheduler's log of the same engine start: the start failed before the scheduler was "
            "created, so there is no request to run again"
        )
        raise CommandFailed(f"{log.path} is the log of worker {log.worker_rank}, with that worker's calls; {remedy}")
    if wanted.pin and selection.request_id is None:
        raise CommandFailed("--pin needs a REQUEST; name the request whose answers the test is to assert")
    findings = _look(log, selection, output)
    incidents = [found for found in findings.incidents if found.sequence >= selection.first_sequence]
    incident = None if wanted.pin or not incidents else incidents[0]
    if incident is None and not wanted.pin:
        raise CommandFailed(_nothing(log, selection, findings))
    logging.disable(logging.CRITICAL)  # each rerun would repeat the messages of vLLM and of the connector
    try:
        written = _made(log, reading, wanted, deciding, selection, incident, findings, output)
    except NotRerunnable as error:
        raise CommandFailed(f"{log.path} cannot be run again: {error}") from error
    finally:
        logging.disable(logging.NOTSET)
    with contextlib.ExitStack() as stack:  # both files or none
        for path, content in ((wanted.path, written.source), (log_path, written.log_content)):
            stack.enter_context(open_target(path, overwrite=wanted.force)).write(content)
    for later in incidents[1:] if incident else ():
        output.remark(
            f"later, {later.rule} was broken at event {later.sequence}; to write a test of that breach, use --since "
            f"{later.sequence}"
        )
    if output.is_json:
        fields = {
            "test": str(wanted.path),
            "log": str(log_path),
            "incident": incident and attrs.asdict(incident, filter=attrs.filters.exclude("hook")),
            "num_events": written.num_events,
            "num_requests_left_out": written.reduced.num_left_out,
            "recurs": written.reduced.recurs,
            "runs": [attrs.asdict(each) for each in written.runs],
        }
        output.record("repro", fields)
    else:
        num_left_out = written.reduced.num_left_out
        left_out = f", {plural(num_left_out, 'request')} left out" if num_left_out else ""
        output.remark(f"wrote {wanted.path} and {log_path}, {plural(written.num_events, 'event')}{left_out}")
    exit_code, text = _verdict(written, log)
    output.remark(text)
    return exit_code


class _Unused(Exception):
    """Raised while a file is open for writing, so that the file is discarded and no existing file is replaced."""


def _refuse_target(path: Path, *, overwrite: bool) -> None:
    """Refuse a path that exists or cannot be written. The check leaves no file behind."""
    with contextlib.suppress(_Unused), open_target(path, overwrite=overwrite):
        raise _Unused


def _made(
    log: StoredLog,
    reading: Reading,
    wanted: Wanted,
    deciding: Deciding,
    selection: Selection,
    incident: Trouble | None,
    findings: Findings,
    output: Output,
) -> _Written:
    """Return the test and its log. Unless the user gave --no-run, run the test once, too.

    Raises:
        NotRerunnable: a test cannot be written; the message has the reason.
    """
    recording, events = _recorded(log, selection, incident, output)
    chosen = _chosen(recording, wanted, output)
    about = Description(
        incident=incident,
        request_id=selection.request_id or "",
        excused=() if incident is None else _excused(findings, incident),
        wrapped="" if recording.wrapped is None else chosen.name(recording.wrapped.kv_transfer),
        chosen=chosen,
        on_core=wanted.core,
        handlers=deciding.handlers,
        origin=f"kvledger {log.header.get('kvledger_version', 'unknown')} with vLLM "
        f"{log.header.get('vllm_version', 'unknown')}",
        command=_command(reading, wanted, deciding),
        remarks=(),
    )
    with output.progress(log, "reducing the test"):
        reduced = _reduced(log, recording, wanted, about, selection)
    written = _written(log, recording, events, reduced, about)
    if wanted.no_run:
        return written
    with output.progress(log, "running the test once"):
        return _tried(written, wanted.path, log, recording, events)


def _chosen(recording: Recording, wanted: Wanted, output: Output) -> Chosen:
    """Return which connector and options the user chose for a recorder's log. The connector is not run here.

    Raises:
        NotRerunnable: the log is a recorder's and the user chose no connector, or the log is of kvledger's own
            connector and the user chose something.
    """
    chosen = Chosen(wanted.connector, wanted.extra_config, wanted.run_recorded)
    if recording.wrapped is None:
        if not chosen.is_empty:
            raise NotRerunnable(
                "it is a log of kvledger's own connector; leave out --connector, --extra-config and --run-recorded, "
                "which are only for a recorder's log"
            )
        return chosen
    recorded = recording.wrapped.kv_transfer
    chosen.transfer(recorded, ("--connector MODULE:CLASS", "--run-recorded"))
    left_out = chosen.left_out(recorded)
    if left_out:
        output.remark(
            f"these options are not taken from the log, because they may be paths, addresses or code: {left_out}; if "
            "the connector needs an option, give it with --extra-config"
        )
    return chosen


@attrs.frozen
class _Written:
    """The generated test and its log, with the results of a run of the test."""

    about: Description
    reduced: Reduced
    num_events: int
    source: bytes
    log_content: bytes
    runs: Sequence[TestRun] = ()
    """Empty if not run."""

    @property
    def ended(self) -> Ended | None:
        """How the test of the incident ended. None if no test was run.

        Without an incident, how the test of the answers ended.
        """
        of_incident = [run for run in self.runs if run.name != ANSWERS_TEST or self.about.incident is None]
        ends = {run.ended for run in of_incident}
        return next((ended for ended in (Ended.FAILED, Ended.NOT_RUN, Ended.PASSED) if ended in ends), None)


def _written(
    log: StoredLog, recording: Recording, events: Sequence[SequencedEvent], reduced: Reduced, about: Description
) -> _Written:
    kept = events if reduced.events is None else reduced.events
    about = attrs.evolve(about, remarks=list(_remarks(log, about, recording, reduced)))
    content = log_bytes(log.core, recording.configuration, log.header, kept)
    return _Written(about, reduced, len(kept), test_source(about), content)


def _tried(
    written: _Written, path: Path, log: StoredLog, recording: Recording, events: Sequence[SequencedEvent]
) -> _Written:
    """Run the test in its own process, as a user will. If a reduced test passes, replace it by the unreduced test.

    The trials of the reduction ran in one process. They shared its modules and classes, whose state can change
    decisions. Therefore a test that failed in the trials may pass in its own process.
    """
    runs = _run(written, path)
    written = attrs.evolve(written, runs=runs)
    if written.reduced.events is not None and written.about.incident is not None and written.ended is Ended.PASSED:
        whole = Reduced(None, written.reduced.recurs, other_answers=written.reduced.other_answers)
        written = _written(log, recording, events, whole, written.about)
        written = attrs.evolve(written, runs=_run(written, path))
    is_same_run = written.about.on_core or recording.wrapped is not None
    if is_same_run and written.ended in {Ended.PASSED, Ended.FAILED}:
        recurs = (written.ended is Ended.FAILED) is (written.about.incident is not None)
        known = attrs.evolve(written.reduced, recurs=recurs)
        written = attrs.evolve(_written(log, recording, events, known, written.about), runs=written.runs)
    return written


def _run(written: _Written, path: Path) -> list[TestRun]:
    with tempfile.TemporaryDirectory() as folder:
        test = Path(folder) / path.name
        test.write_bytes(written.source)
        test.with_suffix(".kvlog").write_bytes(written.log_content)
        return run_once(test)


def _verdict(written: _Written, log: StoredLog) -> tuple[ExitCode, str]:
    """Return the exit code, and a sentence about how the test ended."""
    is_pin, ended = written.about.incident is None, written.ended
    text = next((run.text for run in written.runs if run.ended is ended), "")
    if ended is None:
        return ExitCode.SOUND, "the test was not run; run it before you rely on it"
    if ended is Ended.NOT_RUN:
        return ExitCode.NOT_VERIFIED, f"the test could not be run here: {text}; fix the cause or run the test elsewhere"
    if ended is Ended.FAILED:
        if is_pin:
            return ExitCode.DIVERGED, f"the test was run once and fails here, although it should pass: {text}"
        return ExitCode.SOUND, "the test was run once and fails, as it should"
    if is_pin:
        return ExitCode.SOUND, "the test was run once and passes"
    reason = "the installed code does not have the bug, or the log does not contain its cause"
    remedy = "run the test with the code that has the bug"
    if not written.about.wrapped and not written.about.handlers and _has_other_handlers(log):
        reason, remedy = "the engine had other state handlers than this command", "name these handlers with --handlers"
    return ExitCode.DIVERGED, f"the test was run once and passes, so it does not show the incident: {reason}; {remedy}"


def _has_other_handlers(log: StoredLog) -> bool:
    ours = log.core.handler_fingerprint()
    return bool(log.header.get("handler_fingerprint", ours) != ours)


def _look(log: StoredLog, selection: Selection, output: Output) -> Findings:
    """Find the incidents in the selected part of the log."""
    with output.progress(log, "looking for the incident"):
        # later events are read too, to find damage
        events = (entry for entry in log.trusted_events() if not selection.is_over(entry[0]))
        findings = find_incidents(log.configuration, with_numbered_keys(events), selection.request_id, log.core)
    if log.begins_late or not log.num_events:
        reason = f"it begins with event {log.first_sequence}" if log.num_events else "it holds no event"
        message = (
            f"{log.path}: nothing can be run again, because {reason}; give the whole log directory, or a log of which "
            "no segment was deleted"
        )
        has_damage = bool(log.damage) and not log.num_events
        raise CommandFailed(message, ExitCode.DAMAGED if has_damage else ExitCode.NOTHING_CHECKED)
    if selection.first_sequence > log.last_sequence:
        message = (
            f"{log.path}: nothing can be run again, because the log ends with event {log.last_sequence}, before the "
            "selected part"
        )
        raise CommandFailed(message, ExitCode.NOTHING_CHECKED)
    if log.skipped:
        message = (
            f"{log.path} has events that this kvledger cannot read ({', '.join(log.skipped)}); use a newer kvledger"
        )
        raise CommandFailed(message)
    for damage in log.damage:
        output.remark(str(damage))
    if log.trusted_sequence < log.last_sequence:
        output.remark(f"only events up to {log.trusted_sequence} can be run again, because the next events are missing")
    return findings


def _nothing(log: StoredLog, selection: Selection, findings: Findings) -> str:
    request_id = selection.request_id
    if not findings.is_known:
        return f"{request_id} is not in the part of {log.path} that can be run again (events 1–{log.trusted_sequence})"
    where = "in this log" if request_id is None else f"for {request_id}"
    message = f"no rule was broken and no hook failed {where}"
    others = [name for name, _ in findings.others.most_common(_MAX_NAMED) if name]
    if others:
        message += f"; something failed for {', '.join(others)}"
    elif findings.others:
        message += "; another failure belongs to no single request; to write a test of that failure, leave out REQUEST"
    if findings.has_diverged:
        message += "; the installed code makes other decisions than the log has, see `kvledger verify`"
    return f"{message}. To write a test of the answers that a request got, use --pin"


def _recorded(
    log: StoredLog, selection: Selection, incident: Trouble | None, output: Output
) -> tuple[Recording, list[SequencedEvent]]:
    """Return the recording, and the events that it is made from. Both end with the hook call that has the incident.

    Without an incident, both end with the selected part of the log.

    Raises:
        NotRerunnable: there are too many events, or the call with the incident cannot be repeated.
    """
    end = selection.last_sequence or log.trusted_sequence
    if incident is not None:
        end = min(end, incident.sequence + _MAX_EVENTS_OF_A_CALL)
    if end > _MAX_EVENTS:
        raise NotRerunnable(
            f"the incident comes after {end} events, but a test can have at most {_MAX_EVENTS} events; give a log "
            "that begins closer to the incident, or choose an earlier incident with --until"
        )
    with output.progress(log, "reading"):
        numbered = with_numbered_keys(log.trusted_events())
        events = list(itertools.takewhile(lambda entry: entry[0] <= end, numbered))
    recording = record(log.configuration, events)
    if incident is None:
        return recording, events
    lost = next((event for sequence, event in _left_over(recording) if sequence == incident.sequence), None)
    if lost is not None:
        raise NotRerunnable(
            f"{incident.detail} (event {incident.sequence}). This happened before kvledger recorded the call, so the "
            "call cannot be repeated; fix the code that raised the error"
        )
    end = end_of_call(recording.observations, incident.sequence)
    next_sequence = next((sequence for sequence, _ in recording.observations if sequence > end), events[-1][0] + 1)
    events = [entry for entry in events if entry[0] < next_sequence]
    return record(log.configuration, events), events


def _left_over(recording: Recording) -> Iterable[SequencedEvent]:
    return hook_calls(recording.observations)[1]


def _reduced(log: StoredLog, recording: Recording, wanted: Wanted, about: Description, selection: Selection) -> Reduced:
    is_wrapped, incident = recording.wrapped is not None, about.incident
    if is_wrapped and wanted.core:
        raise NotRerunnable(f"--core is for logs of kvledger's own connector, not of {about.wrapped}; leave --core out")
    if wanted.all:
        return Reduced(None, recurs=None)
    reduced = reduce(
        recording,
        (lambda some: rerun(some, handlers=about.handlers, **attrs.asdict(about.chosen)))
        if is_wrapped
        else lambda some: CoreRun(some, log.core).run(),
        rule="" if incident is None else incident.rule,
        request_id=selection.request_id or ("" if incident is None else incident.request_id),
        leaves_out_calls=is_wrapped or wanted.core,
    )
    if is_wrapped and not reduced.recurs and reduced.other_answers:
        raise NotRerunnable(
            f"{reduced.other_answers[0]}. {about.wrapped} answers from data that no recording has: files of its "
            "workers, another process, or data of an earlier engine. Record the connector from its first call, with "
            "nothing stored before; or write the test anyway with --all"
        )
    return reduced


def _excused(findings: Findings, incident: Trouble) -> set[str]:
    before = {rule for rule, sequence in findings.first_breaches.items() if sequence <= incident.sequence}
    return (before & NEVER_EXCUSED) - {incident.rule}


def _remarks(log: StoredLog, about: Description, recording: Recording, reduced: Reduced) -> Iterator[str]:
    incident, code = about.incident, about.wrapped or "the core"
    if reduced.recurs is False and incident is not None:
        yield (
            f"If the log is rerun, {code}, as installed here, does not fail: the bug is fixed, or its cause is not in "
            "the log. kvledger could therefore not find out which requests the failure needs, so the test has all of "
            "them."
            if recording.wrapped is not None
            else "With this kvledger the core alone does not break the rule: the bug is fixed, or the bug is in the "
            "adapter, which translates hook calls. Therefore no request was left out of this test."
        )
    elif reduced.num_left_out:
        yield (
            f"Left out: {plural(reduced.num_left_out, 'request')}, without which {code} does the same. The event "
            "numbers in the log next to this file differ from the event number above."
        )
    yield "Chunk keys are replaced by numbers."
    if recording.wrapped is None and not about.handlers and _has_other_handlers(log):
        yield "The engine had other state handlers than this kvledger. Name these handlers with --handlers."
    left_over = [f"event {sequence}, {event.id}" for sequence, event in _left_over(recording)]
    if left_over:
        yield f"The calls of these events cannot be repeated: {_few(left_over)}."


def _few(things: Sequence[str]) -> str:
    return "; ".join(things[:_MAX_NAMED]) + (f"; and {len(things) - _MAX_NAMED} more" if things[_MAX_NAMED:] else "")


def _command(reading: Reading, wanted: Wanted, deciding: Deciding) -> str:
    words = ["kvledger", "repro", str(reading.log)]
    words += [reading.request] if reading.request else []
    words += ["-o", str(wanted.path)]
    words += [word for name in deciding.handlers for word in ("--handlers", name)]
    words += ["--connector", wanted.connector] if wanted.connector else []
    words += ["--extra-config", json.dumps(wanted.extra_config)] if wanted.extra_config else []
    options = {"core": "core", "pin": "pin", "all": "all", "run_recorded": "run-recorded"}
    words += [f"--{option}" for name, option in options.items() if getattr(wanted, name)]
    return shlex.join(words)
