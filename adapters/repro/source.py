"""A recording as a test file: its docstring tells the incident, its literals are the recording, its tests assert.

The layout is the formatter's, so that the file can go into a test suite as it is.
"""

from __future__ import annotations

import keyword
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
import msgspec

from kvledger.adapters.repro.calls import end_of_call
from kvledger.adapters.repro.incident import Incident
from kvledger.adapters.repro.literals import Group, Source, call, flat, laid_out, literal
from kvledger.adapters.repro.recording import Recorded, Recording, changed, ended_transfers, reported_by_workers
from kvledger.adapters.repro.reenactment import HOOK_FAILED, NEVER_EXCUSED
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import field_names

_TEXT_WIDTH = 116
_KEY = re.compile(r"\b[0-9a-f]{32}\b")
_MIN_QUIET_STEPS = 4
"""A run of fewer steps is written out."""


@attrs.frozen
class Story:
    """What the file tells besides the recording."""

    request_id: str
    """Empty where nobody was asked for."""
    incidents: Sequence[Incident]
    """Empty where answers are pinned."""
    pinned_answers: Sequence[int | None]
    wrapped: str
    """The connector that was recorded; empty where it is kvledger's own."""
    on_core: bool
    """Whether observations are given to the core alone, instead of hook calls to the connector."""
    handlers: Sequence[str]
    """State handlers that the engine had, as "module:Class"."""
    origin: str
    """Which versions wrote the log."""
    command: str
    remarks: Sequence[str]


def test_source(recording: Recording, story: Story) -> str:
    """The whole file."""
    names: dict[bytes, bytes] = {}
    recording = with_named_keys(recording, names)
    told = {key.hex(): name.decode() for key, name in names.items()}
    story = attrs.evolve(story, incidents=[_with_names(incident, told) for incident in story.incidents])
    tests = list(_tests(story, recording))
    body = "\n\n\n".join([_recording(recording, story), *tests])
    return f"{_docstring(story)}\n\n{_imports(body, story)}\n\n{body}\n"


test_source.__test__ = False  # type: ignore[attr-defined]  # pytest takes a function of this name for a test


def with_named_keys(recording: Recording, names: dict[bytes, bytes] | None = None) -> Recording:
    """The recording with short names for chunk keys, in the order in which they appear; `names` takes them up."""
    names = {} if names is None else names
    observations: list[Recorded] = []
    for sequence, event in recording.observations:
        if isinstance(event, e.ChunkKeysObserved):
            keys = tuple(names.setdefault(key, f"k{len(names) + 1}".encode()) for key in event.keys)
            observations.append((sequence, changed(event, keys=keys)))
        else:
            observations.append((sequence, event))
    return attrs.evolve(recording, observations=tuple(observations))


def _with_names(incident: Incident, names: Mapping[str, str]) -> Incident:
    """The incident without keys of the log in what it says."""
    detail = _KEY.sub(lambda found: names.get(found[0], "(not here)"), incident.detail)
    return attrs.evolve(incident, detail=detail)


# --- words ----------------------------------------------------------------------------------------


def _docstring(story: Story) -> str:
    driven = "observations are given to the core" if story.on_core else "hook calls are made to the real connector"
    if story.incidents:
        first = story.incidents[0]
        of = f" for {first.request_id}" if first.request_id else ""
        title = f"What broke {first.rule}{of} at event {first.sequence}, once more."
        if first.rule == HOOK_FAILED:
            title = f"What made a hook fail{of} at event {first.sequence}, once more."
        told = [f"Event {breach.sequence}: {breach.rule}: {breach.detail}" for breach in story.incidents]
        does = (
            f"The recorded {driven} once more, and what it writes is audited. The tests fail where it goes wrong as it "
            "did, and where a hook or a handler raises that did not. What vLLM and the workers did is part of the "
            "recording: a fault of theirs stays, and the tests ask whether "
            f"{story.wrapped or 'kvledger'} copes with it."
        )
    else:
        title = f"The recorded answers to the lookups of {story.request_id}, once more."
        told = []
        does = f"The recorded {driven} once more, and must get the recorded answers."
    paragraphs = [title, *told, does, f"The log was written by {story.origin}. This file was written by:"]
    text = "\n\n".join(textwrap.fill(_quotable(p), _TEXT_WIDTH, break_long_words=False) for p in paragraphs)
    text += f"\n\n    {_quotable(story.command)}"
    remarks = "\n\n".join(textwrap.fill(_quotable(r), _TEXT_WIDTH, break_long_words=False) for r in story.remarks)
    return f'"""{text}\n\n{remarks}\n"""' if remarks else f'"""{text}\n"""'


def _quotable(text: str) -> str:
    """Text that can stand in a docstring, on one line."""
    return " ".join(text.replace("\\", "\\\\").replace('"""', "'''").split())


def _imports(body: str, story: Story) -> str:
    drive = "reenact_core" if story.on_core else "reenact"
    names = ["Recording", drive]
    names += [
        name
        for name in ("quiet_steps", "report", "step", "transfers_ended", "workers_reported")
        if re.search(rf"\b{name}\(", body)
    ]
    names += ["Wrapped"] if story.wrapped else []
    return (
        "from __future__ import annotations\n\n"
        f"from kvledger.adapters.repro import {', '.join(sorted(names, key=_isorted))}\n"
        "from kvledger.lifecycle import LedgerConfiguration\n"
        "from kvledger.lifecycle import events as e"
    )


def _isorted(name: str) -> tuple[bool, str]:
    return not name[0].isupper(), name


# --- tests ----------------------------------------------------------------------------------------


def _tests(story: Story, recording: Recording) -> Iterator[str]:
    drive = "reenact_core" if story.on_core else "reenact"
    for incident in story.incidents:
        end = end_of_call(recording.observations, incident.sequence)
        until = "" if end == recording.observations[-1][0] else f", until={end}"
        until += _handlers(story)
        excused = NEVER_EXCUSED.intersection(incident.besides)
        besides = f", besides={_set(excused)}" if excused else ""
        name = "no_hook_fails" if incident.rule == HOOK_FAILED else f"{incident.rule.lower()}_holds"
        yield (
            f"def test_{_identifier(name)}_at_event_{incident.sequence}() -> None:\n"
            f'    """{_sentence(incident)}"""\n'
            f"    trouble = {drive}(RECORDING{until}).trouble({_text(incident.rule)}{besides})\n"
            "    assert not trouble, trouble"
        )
    if story.wrapped:
        last = story.incidents[-1] if story.incidents else None
        until = "" if last is None else f", until={end_of_call(recording.observations, last.sequence)}"
        yield (
            "def test_the_recorded_calls_get_the_recorded_answers() -> None:\n"
            f'    """Each lookup, from {_quotable(story.wrapped)} as it is installed here."""\n'
            f"    assert reenact(RECORDING{until}).other_answers == []"
        )
    elif not story.incidents:
        answers = laid_out(
            Group("[", tuple(map(literal, story.pinned_answers)), "]"),
            prefix=f"assert reenactment.answers({_text(story.request_id)}) == ",
            depth=1,
        )
        yield (
            "def test_lookups_get_the_recorded_answers() -> None:\n"
            '    """External tokens of each lookup in turn; None where it was to be asked again."""\n'
            f"    reenactment = {drive}(RECORDING{_handlers(story)})\n"
            f"{answers}"
        )


def _handlers(story: Story) -> str:
    return f", handlers={flat(literal(tuple(story.handlers)))}" if story.handlers else ""


def _sentence(incident: Incident) -> str:
    said = f"Recorded: {_quotable(incident.detail)}"
    said = said if len(said) <= _TEXT_WIDTH - 10 else f"{said[: _TEXT_WIDTH - 13]}..."
    said = said.rstrip("\\").replace('"', "'")
    return said if said.endswith((".", "!", "?")) else f"{said}."


def _set(names: Collection[str]) -> str:
    return "{" + ", ".join(map(_text, sorted(names))) + "}"


def _text(text: str) -> str:
    source = literal(text)
    return source if isinstance(source, str) else repr(text)


def _identifier(text: str) -> str:
    name = re.sub(r"\W+", "_", text)
    return f"{name}_" if keyword.iskeyword(name) else name


# --- the recording --------------------------------------------------------------------------------


def _recording(recording: Recording, story: Story) -> str:
    kept_whole = {end_of_call(recording.observations, incident.sequence) for incident in story.incidents}
    fields: dict[str, Source] = {
        "configuration": _configuration(recording.configuration),
        "observations": Group("(", tuple(_observations(recording.observations, kept_whole)), ")"),
    }
    for name, table in (("jobs", recording.jobs), ("answers", recording.answers), ("copies", recording.copies)):
        if table:
            fields[name] = literal(dict(table))
    if recording.wrapped is not None:
        values = {name: literal(value) for name, value in msgspec.structs.asdict(recording.wrapped).items()}
        fields["wrapped"] = call("Wrapped", **values)
    for name in ("speculates", "zeroes_new_blocks"):
        if getattr(recording, name):
            fields[name] = "True"
    return laid_out(call("Recording", **fields), prefix="RECORDING = ")


def _configuration(configuration: LedgerConfiguration) -> Source:
    fields = {
        field.name: literal(getattr(configuration, field.name))
        for field in attrs.fields(LedgerConfiguration)
        if field.default is attrs.NOTHING or getattr(configuration, field.name) != field.default
    }
    return call("LedgerConfiguration", **fields)


def _observations(observations: Sequence[Recorded], kept_whole: Collection[int]) -> Iterator[Source]:
    run: list[tuple[int, e.StepScheduled]] = []
    for sequence, event in observations:
        if isinstance(event, e.StepScheduled) and _is_quiet(event) and sequence not in kept_whole:
            if run and not _follows(run[-1][1], event):
                yield from _steps(run)
                run = []
            run.append((sequence, event))
            continue
        yield from _steps(run)
        run = []
        yield _entry(sequence, event)
    yield from _steps(run)


def _is_quiet(event: e.StepScheduled) -> bool:
    return not (event.advanced or event.paused or event.extended or event.settled)


def _follows(before: e.StepScheduled, event: e.StepScheduled) -> bool:
    return event.step == before.step + 1 and event.num_scheduled_tokens == before.num_scheduled_tokens


def _steps(run: Sequence[tuple[int, e.StepScheduled]]) -> Iterator[Source]:
    if len(run) < _MIN_QUIET_STEPS:
        yield from (_entry(sequence, event) for sequence, event in run)
        return
    (first, first_step), (last, last_step) = run[0], run[-1]
    yield call(
        "*quiet_steps",
        literal(first),
        literal(last),
        step=literal(first_step.step),
        count=literal(len(run)),
        num_scheduled_tokens=literal(first_step.num_scheduled_tokens),
        from_ns=literal(first_step.time_ns),
        to_ns=literal(last_step.time_ns),
    )


def _entry(sequence: int, event: e.Event) -> Source:
    return Group("(", (literal(sequence), _event(event)), ")")


_SHORT: Mapping[type[e.Event], tuple[str, tuple[str, ...], Mapping[str, object]]] = {
    e.StepScheduled: ("step", ("step", "time_ns"), {"advanced": (), "paused": (), "extended": (), "settled": ()}),
    e.TransferReported: (
        "report",
        ("job_id", "time_ns"),
        {
            "ranks_done": (0,),
            "ranks_failed": (),
            "is_repeated": False,
            "num_bytes": 0,
            "duration_ns": 0,
            "error": "",
            "withheld": "",
        },
    ),
}
"""Events with a function of their own: its name, what it takes by position, and what may be left out."""


def _event(event: e.Event) -> Source:
    ended = ended_transfers(event)
    if ended:
        return call("transfers_ended", literal(getattr(event, "time_ns", 0)), *map(literal, ended))
    reported = reported_by_workers(event)
    if reported is not None:
        told = {name: value for name, value in msgspec.structs.asdict(reported).items() if value}
        time_ns = getattr(event, "time_ns", 0)
        return call("workers_reported", literal(time_ns), **{name: literal(value) for name, value in told.items()})
    leads = ("request_id",) if isinstance(event, e.RequestEvent) else ()
    name, positional, defaults = _SHORT.get(type(event), (f"e.{type(event).__name__}", leads, {}))
    given = {field: getattr(event, field) for field in field_names(type(event))}
    leading = [literal(given.pop(field)) for field in positional if field in given]
    named = {
        field: literal(value) for field, value in given.items() if field not in defaults or value != defaults[field]
    }
    return call(name, *leading, **named)
