"""An incident as two files: a short test, and the log of what was recorded, which the test runs again.

The layout is the formatter's, so that the test can go into a test suite as it is.
"""

from __future__ import annotations

import re
import tempfile
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import attrs

from kvledger.adapters.lab.repro.chosen import Chosen
from kvledger.adapters.lab.repro.outcome import HOOK_FAILED, UNFOLDABLE, Trouble
from kvledger.adapters.lab.repro.recording import NotRerunnable, changed
from kvledger.adapters.lab.repro.shape import RUN_IN_DOCSTRINGS, wrong_part
from kvledger.adapters.recorded.rules import RULES
from kvledger.adapters.tools.logs.visible import shortened, visible
from kvledger.lifecycle import Core, LedgerConfiguration, Rule, SequencedEvent, batches, log_header
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.storage.events import SegmentEventStore

ANSWERS_TEST = "test_lookups_get_the_recorded_answers"
"""The test of a file that asks for the answers, next to the one that asks for the incident or alone."""
_WIDTH = 116
_MAX_TEXT = 1000
"""Characters of one text in a docstring. A log may have any number of them."""
_MAX_NAME = 200
"""Characters of one name within a text."""
_MAX_COMMAND = 10_000
_NO_NAME = "the_recorded_rule_holds"
"""The name of a test of a rule that is not known here: of a later kvledger, or made up."""
_KEY = re.compile(r"\b[0-9a-f]{32}\b")
_RUNNABLE = re.compile("|".join(f"{sign[0]}{{{len(sign)},}}" for sign in RUN_IN_DOCSTRINGS))
_KEPT_OF_HEADER = ("vllm_version", "opened_at_unix_ns")


@attrs.frozen
class Description:
    """What the test says, and asks."""

    incident: Trouble | None
    """None where the answers alone are asked for."""
    request_id: str
    excused: Collection[str]
    """Of what nothing excuses, what had happened in the log by then."""
    wrapped: str
    """The connector of a recorder's log that is run; empty where the log is kvledger's own."""
    chosen: Chosen
    """Which connector is run in its place, as the user says."""
    on_core: bool
    """Whether observations are given to the core alone, instead of hook calls to the connector."""
    handlers: Sequence[str]
    """State handlers that the engine had, as "module:Class"."""
    origin: str
    """Which versions wrote the log."""
    command: str
    remarks: Sequence[str]


def with_numbered_keys(events: Iterable[SequencedEvent]) -> Iterator[SequencedEvent]:
    """The events with numbers in the place of chunk keys, in the order in which they appear: equal ones for equal keys.

    A key is a hash of tokens; whoever has the salt could look for a prompt with it.
    """
    numbers: dict[bytes, bytes] = {}

    def number(key: bytes) -> bytes:
        return numbers.setdefault(key, (len(numbers) + 1).to_bytes(16, "big"))

    for sequence, event in events:
        if isinstance(event, e.ChunkKeysObserved):
            keys = tuple(map(number, event.keys))
            yield sequence, changed(event, keys=keys, hash_prefixes=b"", are_block_hashes=False)
        elif isinstance(event, e.ChunksEvicted | e.ChunksTainted):
            yield sequence, changed(event, keys=tuple(map(number, event.keys)))
        elif isinstance(event, e.InvariantViolated | e.DecisionWithheld):
            detail = _KEY.sub(lambda found: number(bytes.fromhex(found[0])).hex(), event.detail)
            yield sequence, changed(event, detail=detail)
        else:
            yield sequence, event


def log_bytes(
    core: Core,
    configuration: LedgerConfiguration,
    header: Mapping[str, object],
    events: Iterable[SequencedEvent],
) -> bytes:
    """A log of one segment; of the `header` of the recorded log it has what says when and with what it was written."""
    kept = {name: header[name] for name in _KEPT_OF_HEADER if name in header}
    with tempfile.TemporaryDirectory() as folder:
        store = SegmentEventStore.create(
            Path(folder) / "log", {**kept, **log_header(core, configuration)}, segment_bytes=1 << 62
        )
        for batch in batches(events):
            store.append(encode_events([event for _, event in batch]), len(batch))
        segment = store.segment
        store.close()
        return segment.read_bytes()


def test_source(about: Description) -> bytes:
    """The whole file; the log is to stand next to it, under its name with `.kvlog`.

    Everything that `about` has may come from a log of a stranger. It reaches the file as a literal or in a docstring,
    and what is returned was parsed to see that none of it is code.

    Raises:
        NotRerunnable: the file would not be what it is meant to be, which is a mistake in kvledger.
    """
    run = "rerun_core" if about.on_core else "rerun"
    tests, names = [], []
    if about.incident is not None:
        rule = about.incident.rule
        names.append(f"test_{_name_of(rule)}")
        besides = f", besides={{{', '.join(map(_text, sorted(about.excused)))}}}" if about.excused else ""
        tests.append(
            f'def {names[-1]}() -> None:\n    """{_sentence(about.incident.detail)}"""\n'
            + _assertion(about, run, f"trouble({_text(rule)}{besides})", "trouble")
        )
    if about.wrapped or about.incident is None:
        names.append(ANSWERS_TEST)
        tests.append(
            f"def {ANSWERS_TEST}() -> None:\n"
            f'    """Each of them, from {_quotable(about.wrapped) or "kvledger"} as it is installed here."""\n'
            + _assertion(about, run, "other_answers", "")
        )
    source = (
        f'"""{_docstring(about)}\n"""\n\nfrom __future__ import annotations\n\nfrom pathlib import Path\n\n'
        f'from kvledger.adapters.lab.repro import {run}\n\nLOG = Path(__file__).with_suffix(".kvlog")\n\n\n'
        + "\n\n".join(tests)
    )
    content = source.encode(errors="backslashreplace")
    wrong = wrong_part(content, run, names)
    if wrong:
        raise NotRerunnable(
            f"the test that would be written of it is not what it should be ({wrong}), so it was neither written nor "
            "run; this is a mistake in kvledger: please report it, with the log if you may share it"
        )
    return content


def _assertion(about: Description, run: str, asked: str, name: str) -> str:
    """What a test does: run the log again, ask the outcome, and assert that what it is asked for is empty."""
    arguments = {"handlers": tuple(about.handlers)} if about.handlers else {}
    arguments |= attrs.asdict(about.chosen, filter=lambda _, value: bool(value))
    given = ", ".join(["LOG", *(f"{key}={literal(value)}" for key, value in arguments.items())])
    call, before = f"{run}({given})", ""
    if len(call) + len(asked) > _WIDTH - len("    trouble = ."):
        lines = "".join(f"        {key}={literal(value, 8)},\n" for key, value in arguments.items())
        call, before = "outcome", f"    outcome = {run}(\n        LOG,\n{lines}    )\n"
    if name:
        return f"{before}    {name} = {call}.{asked}\n    assert not {name}, {name}\n"
    return f"{before}    assert {call}.{asked} == []\n"


def literal(value: object, indent: int = 0) -> str:
    """Source of a value of JSON, or of a tuple of texts, over several lines where one is too short."""
    if isinstance(value, str):
        return _text(value)
    if not isinstance(value, Mapping | list | tuple):
        return repr(value)
    inside = indent + 4 if indent else 0
    pairs = (
        [(f"{_text(key)}: ", each) for key, each in value.items()]
        if isinstance(value, Mapping)
        else [("", each) for each in value]
    )
    parts = [f"{key}{literal(each, inside)}" for key, each in pairs]
    brackets = "{}" if isinstance(value, Mapping) else "[]" if isinstance(value, list) else "()"
    line = ", ".join(parts) + ("," if isinstance(value, tuple) and len(parts) == 1 else "")
    if not parts or not indent or ("\n" not in line and len(line) <= _WIDTH - indent):
        return brackets[0] + line + brackets[1]
    lines = "".join(f"{' ' * inside}{part},\n" for part in parts)
    return f"{brackets[0]}\n{lines}{' ' * indent}{brackets[1]}"


test_source.__test__ = False  # type: ignore[attr-defined]  # pytest takes a function of this name for a test


def _docstring(about: Description) -> str:
    calls = "Observations are given to the core" if about.on_core else "Hook calls are made to the real connector"
    request_id = _short(about.request_id)
    if about.incident is None:
        paragraphs = [f"The recorded answers to the lookups of {request_id}, once more."]
    else:
        rule, of = _short(about.incident.rule), _short(about.incident.request_id)
        what = ("made a hook fail" if rule == HOOK_FAILED else f"broke {rule}") + (f" for {of}" if of else "")
        paragraphs = [f"What {what} at event {about.incident.sequence}, once more.", about.incident.detail]
    paragraphs.append(
        f"{calls} as they were recorded in the log next to this file, which comes from {_short(about.origin)}. What "
        "vLLM and the workers did is part of it: a fault of theirs stays. Both files were written by:"
    )
    filled = [textwrap.fill(_quotable(text), _WIDTH, break_long_words=False) for text in (*paragraphs, *about.remarks)]
    command = textwrap.indent(
        textwrap.fill(
            _quotable(about.command, _MAX_COMMAND), _WIDTH - 4, break_long_words=False, break_on_hyphens=False
        ),
        "    ",
    )
    return "\n\n".join([*filled[: len(paragraphs)], command, *filled[len(paragraphs) :]])


def _short(text: str) -> str:
    return shortened(text, _MAX_NAME)


def _name_of(rule: str) -> str:
    """What a test of this rule is called: only rules that are known here become names."""
    if rule == HOOK_FAILED:
        return "no_hook_fails"
    return f"{rule.lower()}_holds" if rule in _known_rules() else _NO_NAME


@cache
def _known_rules() -> frozenset[str]:
    return frozenset({UNFOLDABLE, *Rule, *Core.standard().rules, *RULES})


def _quotable(text: str, max_length: int = _MAX_TEXT) -> str:
    """Text that can stand in a docstring, on one line, with each character that cannot be seen as its number."""
    text = shortened(visible(" ".join(text.split())), max_length)
    text = _RUNNABLE.sub(lambda found: "".join(f"\\u{ord(each):04x}" for each in found[0]), text)
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _sentence(text: str) -> str:
    """As the only line of a docstring, which may begin and end with it."""
    recorded = _quotable(f"Recorded: {text}", _WIDTH - 10).replace('"', "'")
    return recorded if recorded.endswith((".", "!", "?")) else f"{recorded}."


def _text(text: str) -> str:
    source = repr(text)
    return f'"{source[1:-1]}"' if source.startswith("'") and '"' not in source else source
