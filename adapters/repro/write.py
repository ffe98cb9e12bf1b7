"""An incident as two files: a short test, and the log of what was recorded, which the test runs again.

The layout is the formatter's, so that the test can go into a test suite as it is.
"""

from __future__ import annotations

import re
import tempfile
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from kvledger.adapters.repro.outcome import HOOK_FAILED, Trouble
from kvledger.adapters.repro.recording import changed
from kvledger.lifecycle import Core, LedgerConfiguration, SequencedEvent, batches, log_header
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventEncoder
from kvledger.storage.events import SegmentEventStore

ANSWERS_TEST = "test_lookups_get_the_recorded_answers"
"""The test of a file that asks for the answers, next to the one that asks for the incident or alone."""
_WIDTH = 116
_KEY = re.compile(r"\b[0-9a-f]{32}\b")
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
    """The connector that was recorded; empty where it is kvledger's own."""
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
            yield sequence, changed(event, keys=tuple(map(number, event.keys)))
        elif isinstance(event, e.ChunkEvicted | e.ChunkTainted):
            yield sequence, changed(event, key=number(event.key))
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
    encoder = EventEncoder()
    with tempfile.TemporaryDirectory() as folder:
        store = SegmentEventStore.create(
            Path(folder) / "log", {**kept, **log_header(core, configuration)}, segment_bytes=1 << 62
        )
        for batch in batches(events):
            store.append(encoder.encode([event for _, event in batch]), len(batch))
        segment = store.segment
        store.close()
        return segment.read_bytes()


def test_source(about: Description) -> str:
    """The whole file; the log is to stand next to it, under its name with `.kvlog`."""
    run = "rerun_core" if about.on_core else "rerun"
    handlers = ", ".join(map(_text, about.handlers)) + ("," if len(about.handlers) == 1 else "")
    call = f"{run}(LOG, handlers=({handlers}))" if about.handlers else f"{run}(LOG)"
    tests = []
    if about.incident is not None:
        rule = about.incident.rule
        name = "no_hook_fails" if rule == HOOK_FAILED else f"{rule.lower()}_holds"
        besides = f", besides={{{', '.join(map(_text, sorted(about.excused)))}}}" if about.excused else ""
        tests.append(
            f'def test_{name}() -> None:\n    """{_sentence(about.incident.detail)}"""\n'
            f"    trouble = {call}.trouble({_text(rule)}{besides})\n    assert not trouble, trouble\n"
        )
    if about.wrapped or about.incident is None:
        tests.append(
            f"def {ANSWERS_TEST}() -> None:\n"
            f'    """Each of them, from {_quotable(about.wrapped) or "kvledger"} as it is installed here."""\n'
            f"    assert {call}.other_answers == []\n"
        )
    return (
        f'"""{_docstring(about)}\n"""\n\nfrom __future__ import annotations\n\nfrom pathlib import Path\n\n'
        f'from kvledger.adapters.repro import {run}\n\nLOG = Path(__file__).with_suffix(".kvlog")\n\n\n'
        + "\n\n".join(tests)
    )


test_source.__test__ = False  # type: ignore[attr-defined]  # pytest takes a function of this name for a test


def _docstring(about: Description) -> str:
    calls = "Observations are given to the core" if about.on_core else "Hook calls are made to the real connector"
    if about.incident is None:
        paragraphs = [f"The recorded answers to the lookups of {about.request_id}, once more."]
    else:
        rule, of = about.incident.rule, f" for {about.incident.request_id}" if about.incident.request_id else ""
        what = f"made a hook fail{of}" if rule == HOOK_FAILED else f"broke {rule}{of}"
        paragraphs = [f"What {what} at event {about.incident.sequence}, once more.", about.incident.detail]
    paragraphs.append(
        f"{calls} as they were recorded in the log next to this file, which comes from {about.origin}. What vLLM and "
        "the workers did is part of it: a fault of theirs stays. Both files were written by:"
    )
    filled = [textwrap.fill(_quotable(text), _WIDTH, break_long_words=False) for text in (*paragraphs, *about.remarks)]
    command = textwrap.indent(
        textwrap.fill(_quotable(about.command), _WIDTH - 4, break_long_words=False, break_on_hyphens=False), "    "
    )
    return "\n\n".join([*filled[: len(paragraphs)], command, *filled[len(paragraphs) :]])


def _quotable(text: str) -> str:
    """Text that can stand in a docstring, on one line."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.replace("\\", "\\\\").replace('"""', "'''").split())


def _sentence(text: str) -> str:
    recorded = f"Recorded: {_quotable(text)}"
    recorded = recorded if len(recorded) <= _WIDTH - 10 else f"{recorded[: _WIDTH - 13]}..."
    recorded = recorded.rstrip("\\").replace('"', "'")
    return recorded if recorded.endswith((".", "!", "?")) else f"{recorded}."


def _text(text: str) -> str:
    source = repr(text)
    return f'"{source[1:-1]}"' if source.startswith("'") and '"' not in source else source
