"""The literals of a generated file are the recording, and read well."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvledger.adapters.repro import Recording, quiet_steps, report, step
from kvledger.adapters.repro.incident import Incident
from kvledger.adapters.repro.literals import LINE_LENGTH, call, laid_out, literal
from kvledger.adapters.repro.source import Story, test_source, with_named_keys
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle import events as e

CONFIGURATION = LedgerConfiguration(block_size=16, chunk_size=8, num_slots=32, windows=(0, 48), max_hit_share=0.5)


def story(detail: str = "it broke") -> Story:
    """An incident at the last event."""
    return Story(
        request_id="r",
        incidents=(Incident("LAST_TOKEN", 19, "r", detail, ("HOOK_FAILED", "LIVENESS")),),
        pinned_answers=(),
        wrapped="",
        on_core=True,
        handlers=(),
        origin="kvledger 0.1.0",
        command="kvledger repro LOG",
        remarks=(),
    )


def recording() -> Recording:
    """One of each kind of observation."""
    observations = (
        (1, e.RequestArrived("r", 0, 40, 1_000_000)),
        (2, e.ChunkKeysObserved("r", 0, (b"\x00" * 16, b"\x01" * 16))),
        (3, e.LookupRequested("r", 0, 40, 5)),
        (5, e.BlocksAllocated("r", tuple(range(60)), 0, 6)),
        (6, step(0, 7, num_scheduled_tokens=40, advanced=((0, 0, 40, 40),), settled=((0, 0, 40),))),
        (8, report(1, 8, ranks_failed=(1,), error='a "quoted" error')),
        *((9 + number, step(1 + number, 10 * (1 + number), num_scheduled_tokens=1)) for number in range(9)),
        (18, e.ChunkKeysObserved("r", 1, (b"\x01" * 16, b"\x02" * 16))),
        (19, e.RequestFinished("r", "FINISHED_STOPPED", 40, 41, 100)),
    )
    return Recording(CONFIGURATION, observations, jobs={1: (6, "r")}, answers={3: 24})


def read_back(source: str) -> Recording:
    """The recording that the file defines."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "generated", "exec"), namespace)  # noqa: S102 -- it was written just now
    found = namespace["RECORDING"]
    assert isinstance(found, Recording)
    return found


def test_the_file_defines_the_recording() -> None:
    """Every field of every event, the configuration, jobs and answers; keys have names of their own."""
    found = read_back(test_source(recording(), story()))
    assert found == with_named_keys(recording())


def test_equal_keys_have_equal_names() -> None:
    """In the order in which they appear."""
    keys = [
        event.keys for _, event in with_named_keys(recording()).observations if isinstance(event, e.ChunkKeysObserved)
    ]
    assert keys == [(b"k1", b"k2"), (b"k2", b"k3")]


def test_an_incident_speaks_of_chunks_by_their_new_names() -> None:
    """No key of the log is in the file."""
    source = test_source(recording(), story(f"chunk {'01' * 16} was evicted, not {'ab' * 16}"))
    assert "chunk k2 was evicted, not (not here)" in source


def test_steps_that_say_nothing_are_one_line() -> None:
    """Nine of them, spread evenly over what they took."""
    source = test_source(recording(), story())
    assert "*quiet_steps(9, 17, step=1, count=9, num_scheduled_tokens=1, from_ns=10, to_ns=90)," in source
    assert len(list(quiet_steps(9, 17, step=1, count=9, num_scheduled_tokens=1, from_ns=10, to_ns=90))) == 9


def test_the_step_of_the_incident_is_written_out() -> None:
    """So that a test can end with it."""
    observations = recording().observations[:-4]
    last = observations[-1][0]
    incident = attrs.evolve(story().incidents[0], sequence=last)
    source = test_source(
        attrs.evolve(recording(), observations=observations), attrs.evolve(story(), incidents=(incident,))
    )
    assert f"        ({last}, step(" in source
    assert read_back(source).observations[-1] == observations[-1]


@pytest.mark.parametrize(
    "detail", ['says "no"', '"""', "back\\slash", "ends with \\", 'ends with "', "line\nbreak", "x" * 300, "ünïcode"]
)
def test_whatever_an_incident_says_can_be_told(detail: str) -> None:
    """The file stays a Python file that says it."""
    source = test_source(recording(), story(detail))
    namespace: dict[str, Any] = {}
    exec(compile(source, "generated", "exec"), namespace)  # noqa: S102 -- it was written just now
    assert detail.rsplit(maxsplit=1)[-1][:40].replace('"""', "'''") in namespace["__doc__"]


def test_other_rules_that_were_broken_are_not_asked_for() -> None:
    """Only this incident's rule must hold, and no hook may fail but where one failed then."""
    assert '.trouble("LAST_TOKEN", besides={"HOOK_FAILED"})' in test_source(recording(), story())


def test_no_line_is_too_long_where_it_can_be_broken() -> None:
    """As the formatter would have it."""
    assert max(map(len, test_source(recording(), story()).splitlines())) <= LINE_LENGTH


def test_layout_breaks_calls_before_their_arguments() -> None:
    """Arguments together on a line of their own where they fit, else one by one; tuples always one by one."""
    assert laid_out(call("f", "1", "2")) == "f(1, 2)"
    assert laid_out(call("f" * 60, "1" * 30, "2" * 40)) == f"{'f' * 60}(\n    {'1' * 30}, {'2' * 40}\n)"
    assert laid_out(literal((1,))) == "(1,)"
    assert laid_out(literal(tuple(range(60)))).splitlines()[:3] == ["(", "    0,", "    1,"]


def test_long_numbers_are_grouped() -> None:
    """Nanoseconds are long."""
    assert [literal(value) for value in (99_999, 1_234_567, -1_234_567)] == ["99999", "1_234_567", "-1_234_567"]
