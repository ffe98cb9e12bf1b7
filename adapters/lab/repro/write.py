"""Writes an incident as two files: a short test, and a log with the recording that the test runs again.

The test has the formatter's layout, so you can add it to a test suite as it is.
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
"""Name of the test that asserts the recorded answers, next to the test of the incident or alone."""
_WIDTH = 116
_MAX_TEXT = 1000
"""Most characters of one text in a docstring. A log may have any number of them."""
_MAX_NAME = 200
"""Most characters of one name within a text."""
_MAX_COMMAND = 10_000
_NO_NAME = "the_recorded_rule_holds"
"""Name of the test of an unknown rule, which a later kvledger has or is made up."""
_KEY = re.compile(r"\b[0-9a-f]{32}\b")
_RUNNABLE = re.compile("|".join(f"{sign[0]}{{{len(sign)},}}" for sign in RUN_IN_DOCSTRINGS))
_KEPT_OF_HEADER = ("vllm_version", "opened_at_unix_ns")


@attrs.frozen
class Description:
    """What a test asserts, and the facts for its docstring."""

    incident: Trouble | None
    """The incident that the test repeats; None if the test asserts only the answers."""
    request_id: str
    excused: Collection[str]
    """Rules of `NEVER_EXCUSED` that the log broke before the incident. The test ignores them."""
    wrapped: str
    """Class of the connector that runs for a recorder's log; empty if the log is kvledger's own."""
    chosen: Chosen
    """The user's choice of the connector and its options."""
    on_core: bool
    """Whether the test gives the observations to the core alone, instead of calling the hooks of the connector."""
    handlers: Sequence[str]
    """State handlers of the engine, as "module:Class"."""
    origin: str
    """The versions of kvledger and vLLM that wrote the log."""
    command: str
    remarks: Sequence[str]


def with_numbered_keys(events: Iterable[SequencedEvent]) -> Iterator[SequencedEvent]:
    """Yield the events with numbers in place of chunk keys. Equal keys get equal numbers, in the order of appearance.

    A key is a hash of tokens. Somebody who has the keys and knows the hash's salt could check guesses of a prompt.
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
    """Return the bytes of a log of one segment. Its header keeps the recorded log's opening time and vLLM version."""
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
    """Return the content of the test file. The log must be next to that file, under the same name with `.kvlog`.

    All texts in `about` may come from a stranger's log. They get into the file only as literals or in docstrings. The
    file is parsed, to check that no such text is code.

    Raises:
        NotRerunnable: the file has other code than it should have, which is a bug in kvledger.
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
            f'    """Lookups get the recorded answers from the installed {_quotable(about.wrapped) or "kvledger"}."""\n'
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
            f"the test generated from the log is malformed ({wrong}), so kvledger neither wrote nor ran the test; this "
            "is a bug in kvledger: please report the bug, with the log if you may share the log"
        )
    return content


def _assertion(about: Description, run: str, asked: str, name: str) -> str:
    """Return the body of a test, which runs the log again and asserts that `asked`, a part of the result, is empty."""
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
    """Return the source of a JSON value or a tuple of texts. With `indent`, long source is split into several lines."""
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
    calls = "gives the core the observations" if about.on_core else "makes the hook calls to the real connector"
    request_id = _short(about.request_id)
    if about.incident is None:
        paragraphs = [f"Checks that the lookups of {request_id} get the recorded answers."]
    else:
        rule, of = _short(about.incident.rule), _short(about.incident.request_id)
        what = ("made a hook fail" if rule == HOOK_FAILED else f"broke {rule}") + (f" for {of}" if of else "")
        paragraphs = [f"Repeats the calls that {what} at event {about.incident.sequence}.", about.incident.detail]
    paragraphs.append(
        f"The test {calls} as recorded in the log next to this file. The recording is from {_short(about.origin)}. It "
        "includes what vLLM and the workers did, and the test repeats their bugs, too. Both files were written by:"
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
    """Return the name of the test for a rule. The tests of rules that this kvledger does not have share one name."""
    if rule == HOOK_FAILED:
        return "no_hook_fails"
    return f"{rule.lower()}_holds" if rule in _known_rules() else _NO_NAME


@cache
def _known_rules() -> frozenset[str]:
    return frozenset({UNFOLDABLE, *Rule, *Core.standard().rules, *RULES})


def _quotable(text: str, max_length: int = _MAX_TEXT) -> str:
    """Return text for a docstring: on one line, shortened, with an escape for each invisible character."""
    text = shortened(visible(" ".join(text.split())), max_length)
    text = _RUNNABLE.sub(lambda found: "".join(f"\\u{ord(each):04x}" for each in found[0]), text)
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _sentence(text: str) -> str:
    """Return text that can be the whole content of a docstring of one line."""
    recorded = _quotable(f"Recorded: {text}", _WIDTH - 10).replace('"', "'")
    return recorded if recorded.endswith((".", "!", "?")) else f"{recorded}."


def _text(text: str) -> str:
    source = repr(text)
    return f'"{source[1:-1]}"' if source.startswith("'") and '"' not in source else source
