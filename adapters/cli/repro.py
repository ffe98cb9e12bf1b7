"""`kvledger repro`: an incident as a test file, on stdout."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

import attrs

from kvledger.adapters.cli.finding import selected_one
from kvledger.adapters.cli.options import add_handlers, add_request, event_number
from kvledger.adapters.cli.output import Output
from kvledger.adapters.core import composed_core
from kvledger.adapters.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.logs.amounts import plural
from kvledger.adapters.logs.log import StoredLog
from kvledger.adapters.logs.selection import Selection
from kvledger.adapters.repro.call_reduction import reduce_calls
from kvledger.adapters.repro.calls import end_of_call, hook_calls
from kvledger.adapters.repro.from_log import record
from kvledger.adapters.repro.incident import Findings, Incident, find_incidents
from kvledger.adapters.repro.recording import NotReenactable
from kvledger.adapters.repro.reduction import Reduced, reduce
from kvledger.adapters.repro.source import Story, test_source
from kvledger.adapters.repro.wrapped import RECORDER
from kvledger.lifecycle import Core, SequencedEvent
from kvledger.lifecycle import events as e

_MANY_OBSERVATIONS = 20_000
_MAX_EVENTS = 2_000_000
"""They are held in memory, and tried again and again."""
_NUM_EVENTS_BEHIND = 20_000
"""What follows an incident says what a call was about that failed before it was recorded."""
_MAX_NAMED = 10
_PLAYED_BACK = frozenset(
    {
        "ALLOC_MATCHES_LOOKUP",
        "BLOCK_REUSE_FENCED",
        "COMPLETION_ONCE",
        "LEGAL_TRANSITION",
        "RESUME_COVERS_OUTPUT",
        "ROLLBACK_OBSERVED",
        "TABLE_EQ",
        "TOKEN_CONSERVATION",
    }
)
"""Rules that are broken by what is observed as well as by what is decided."""


def configure(parser: argparse.ArgumentParser) -> None:
    """What only this command has."""
    add_request(parser)
    parser.add_argument("--at", metavar="EVENT", type=event_number, help="end with this event of the log")
    parser.add_argument("--core", action="store_true", help="drive the core alone: no vLLM, milliseconds")
    parser.add_argument("--pin", action="store_true", help="pin the answers that the request got, whatever went wrong")
    add_handlers(parser)
    parser.add_argument("--all", action="store_true", help="keep requests that have nothing to do with it")


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Write one test file."""
    log, selection = selected_one(arguments, output)
    request_id = selection.request_id
    if log.worker_rank is not None:
        message = f"{log.path} is worker {log.worker_rank}'s log of its calls; give the scheduler's log beside it"
        raise CommandFailed(message, ExitCode.USAGE)
    last = min(filter(None, (arguments.at, selection.last_sequence)), default=None)
    if arguments.pin and request_id is None:
        raise CommandFailed("--pin needs a REQUEST: whose answers are to be pinned?", ExitCode.USAGE)
    with output.progress(log, "looking for the incident"):
        events = _until(log.trusted_events(), last)
        findings = find_incidents(log.configuration, events, request_id, _core(log, arguments))
    _tell_limits(log, output)
    incidents = [] if arguments.pin else [i for i in findings.incidents if i.sequence >= selection.first_sequence]
    if not incidents and not arguments.pin:
        raise CommandFailed(_nothing(log, selection, findings), ExitCode.USAGE)
    end = last or log.trusted_sequence
    if incidents:
        end = min(end, incidents[-1].sequence + _NUM_EVENTS_BEHIND)
    if end > _MAX_EVENTS:
        message = (
            f"the incident is {end} events into {log.path}; a story of more than {_MAX_EVENTS} cannot be told by a "
            "test. Give a log that begins nearer to it, or an earlier incident with --at"
        )
        raise CommandFailed(message, ExitCode.USAGE)
    with output.progress(log, "reading"):
        kept = list(itertools.takewhile(lambda entry: entry[0] <= end, log.trusted_events()))
    try:
        with output.progress(log, "leaving out what it does not need"):
            story, reduced = _told(log, arguments, kept, incidents, request_id)
    except (NotReenactable, ModuleNotFoundError) as error:
        raise CommandFailed(f"{log.path} cannot be driven again: {error}", ExitCode.USAGE) from error
    source = test_source(reduced.recording, story)
    if output.is_json:
        output.record("repro", _fields(story, reduced, source))
    else:
        sys.stdout.write(source)
    if len(reduced.recording.observations) > _MANY_OBSERVATIONS:
        output.remark(f"the file has {len(reduced.recording.observations)} observations; --at EVENT ends it earlier")
    return ExitCode.SOUND


def _core(log: StoredLog, arguments: argparse.Namespace) -> Core:
    """Of the engine; kvledger's own or a recorder's."""
    is_recorders = any(extension.name == "recorder" for extension in log.core.extensions)
    return composed_core(arguments.handlers, (RECORDER,) if is_recorders else ())


def _until(events: Iterable[SequencedEvent], last: int | None) -> Iterator[SequencedEvent]:
    """Events up to `last`; the rest is read all the same, for the log's damage."""
    for sequence, event in events:
        if last is None or sequence <= last:
            yield sequence, event


def _tell_limits(log: StoredLog, output: Output) -> None:
    if log.begins_late:
        message = (
            f"{log.path} begins with event {log.first_sequence}; without those before, nothing can be re-enacted: give "
            "the whole log directory, or a log that was not cut by retention"
        )
        raise CommandFailed(message, ExitCode.USAGE)
    for damage in log.damage:
        output.remark(str(damage))
    for event_id, number in log.skipped.items():
        output.remark(
            f"{plural(number, 'event')} of the kind {event_id} were skipped; what they led to is not re-enacted"
        )
    if log.trusted_sequence < log.last_sequence:
        output.remark(f"only events up to {log.trusted_sequence} can be re-enacted; the next ones are missing")


def _nothing(log: StoredLog, selection: Selection, findings: Findings) -> str:
    request_id = selection.request_id
    if not findings.is_known:
        return f"{request_id} is not in the part of {log.path} that can be re-enacted (events 1–{log.trusted_sequence})"
    whose = "in this log" if request_id is None else f"with {request_id}"
    message = f"nothing went wrong {whose} as far as the rules tell"
    others = [name for name, _ in findings.others.most_common(_MAX_NAMED) if name]
    if others:
        message += f"; something did with {', '.join(others)}"
    elif findings.others:
        message += "; something did that belongs to no request: leave REQUEST out"
    if findings.has_diverged:
        message += "; today's code decides otherwise than the log, see `kvledger verify`"
    return f"{message}. To pin the answers that a request got: --pin"


def _told(
    log: StoredLog,
    arguments: argparse.Namespace,
    events: Sequence[SequencedEvent],
    incidents: Sequence[Incident],
    request_id: str | None,
) -> tuple[Story, Reduced]:
    recording = record(log.configuration, events)
    if recording.wrapped is not None and arguments.core:
        raise CommandFailed(
            f"--core is for logs of KVLedgerConnector; this one is of {recording.wrapped_name}, which decides "
            "itself: leave --core out",
            ExitCode.USAGE,
        )
    if incidents:
        recording = recording.until(end_of_call(recording.observations, incidents[-1].sequence))
        request_id = request_id or incidents[0].request_id
    end = recording.observations[-1][0]
    rules = {incident.rule for incident in incidents}
    if recording.wrapped is not None:
        reduced = reduce_calls(recording, rules=rules, request_id=request_id or "", keep_all=arguments.all)
    else:
        reduced = reduce(
            recording,
            [(sequence, event) for sequence, event in events if sequence <= end or event.is_decision],
            rules=rules,
            request_id=request_id or "",
            keep_all=arguments.all,
            handlers=arguments.handlers,
        )
    story = Story(
        request_id=request_id or "",
        incidents=incidents,
        pinned_answers=_answers(events, request_id or "") if arguments.pin else (),
        wrapped=recording.wrapped_name,
        on_core=arguments.core,
        handlers=arguments.handlers,
        origin=f"kvledger {log.header.get('kvledger_version', 'unknown')} with vLLM "
        f"{log.header.get('vllm_version', 'unknown')}",
        command=_command(arguments),
        remarks=list(_remarks(log, arguments, reduced, incidents)),
    )
    if arguments.pin and not story.pinned_answers:
        raise CommandFailed(f"{request_id} was never looked up, so there is nothing to pin", ExitCode.USAGE)
    return story, reduced


def _answers(events: Iterable[SequencedEvent], request_id: str) -> list[int | None]:
    return [
        event.num_external_tokens if isinstance(event, e.LookupAnswered) else None
        for _, event in events
        if isinstance(event, e.LookupAnswered | e.LookupDeferred) and event.request_id == request_id
    ]


def _remarks(
    log: StoredLog, arguments: argparse.Namespace, reduced: Reduced, incidents: Sequence[Incident]
) -> Iterator[str]:
    wrapped = reduced.recording.wrapped_name
    if wrapped:
        yield from _remarks_on_wrapped(wrapped, arguments, reduced)
        return
    if reduced.num_left_out:
        yield (
            f"Left out: {plural(reduced.num_left_out, 'request')}, without which the core decides the same and breaks "
            "the same rules."
        )
    yield "Chunk keys have names of their own, and times of steps that say nothing are spread evenly."
    if not reduced.recurs and not arguments.pin:
        yield (
            f"With kvledger {_version()} the core alone does not break the rules: it was mended, or the fault is in "
            "what the adapter makes of hook calls. So nothing was left out."
        )
    ours = log.core.handler_fingerprint()
    if log.header.get("handler_fingerprint", ours) != ours:
        yield "The engine had other state handlers: where they are your own, name them with --handlers."
    played_back = [incident.rule for incident in incidents if incident.rule in _PLAYED_BACK]
    if played_back:
        yield (
            f"{' and '.join(played_back)} may be broken by what was observed alone: by vLLM, by a worker, or by an "
            "adapter that took something for something else. What was observed is played back, and a test of it fails "
            "as long as it stands here."
        )
    if reduced.recording.speculates and not arguments.core:
        yield "The engine decoded speculatively: drafts that were taken back show in counts only."
    calls, left_over = hook_calls(reduced.recording.observations)
    left_out = [f"event {sequence}, {event.id}" for sequence, event in left_over]
    left_out += [
        f"event {call.sequence}, {call.hook}"
        for call in calls
        if isinstance(call.main, e.HookFailed) and call.hook not in {"get_kv_connector_stats", "has_pending_push_work"}
    ]
    kept = {sequence for sequence, _ in reduced.recording.observations}
    guessed = [f"event {sequence}" for sequence in reduced.recording.guessed if sequence in kept]
    if guessed:
        yield (
            "A log does not have what a call was about that failed before it was recorded. Guessed from what came "
            f"before and after: {_few(guessed)}."
        )
    if left_out:
        yield f"Not re-enacted: {_few(left_out)}."


def _remarks_on_wrapped(wrapped: str, arguments: argparse.Namespace, reduced: Reduced) -> Iterator[str]:
    if arguments.pin or arguments.all:
        yield "Nothing was left out."
    elif reduced.recurs:
        yield (
            f"Left out: {plural(reduced.num_left_out, 'request')} and every hook call without which {wrapped} still "
            "goes wrong in the same way, answers as recorded, and is asked what vLLM could ask."
        )
    else:
        yield (
            f"{wrapped}, made again with what is installed here, does not go wrong: another version, a cause before "
            "the log began or in its workers, or a thread of its own. So nothing was left out."
        )
    yield "Chunk keys have names of their own, and times of steps that say nothing are spread evenly."


def _few(things: Sequence[str]) -> str:
    return "; ".join(things[:_MAX_NAMED]) + (f"; and {len(things) - _MAX_NAMED} more" if things[_MAX_NAMED:] else "")


def _command(arguments: argparse.Namespace) -> str:
    words = ["kvledger", "repro", str(arguments.log)]
    words += [arguments.request] if arguments.request else []
    words += ["--at", str(arguments.at)] if arguments.at else []
    words += [word for name in arguments.handlers for word in ("--handlers", name)]
    words += [f"--{name}" for name in ("core", "pin", "all") if getattr(arguments, name)]
    return shlex.join(words)


def _fields(story: Story, reduced: Reduced, source: str) -> dict[str, object]:
    return {
        "request_id": story.request_id,
        "incidents": [attrs.asdict(incident) for incident in story.incidents],
        "num_observations": len(reduced.recording.observations),
        "num_requests_left_out": reduced.num_left_out,
        "recurs_on_core": reduced.recurs,
        "source": source,
    }


def _version() -> str:
    try:
        return version("kvledger")
    except PackageNotFoundError:
        return "(not installed)"
