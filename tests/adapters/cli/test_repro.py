"""`kvledger repro`: what it writes, and what it says where there is nothing to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import events as e

BROKEN = "ALLOC_MATCHES_LOOKUP"


@pytest.fixture
def broken_log(story: Driver, tools: Any, tmp_path: Path) -> Path:
    """After its preemption the request took up more than it was answered, and the connector did not notice."""
    events = tools.replaced(story.observed, e.BlocksAllocated, 1, num_external_tokens=80)
    return tools.write_log(tmp_path / "broken", events, story.configuration)


def namespace_of(source: str) -> dict[str, Any]:
    """What a generated file defines."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "generated", "exec"), namespace)  # noqa: S102 -- it was written just now
    return namespace


def checks_of(source: str) -> dict[str, Any]:
    """The test functions of a generated file."""
    return {name: function for name, function in namespace_of(source).items() if name.startswith("test_")}


def test_a_broken_rule_becomes_a_test_that_breaks_it(run: Any, broken_log: Path) -> None:
    """What vLLM took up is part of the recording, so the rule stays broken; the message names rule, hook and event."""
    result = run("repro", broken_log, "chat-17", "--core")
    assert result.exit_code == 0
    (test,) = [test for name, test in checks_of(result.out).items() if BROKEN.lower() in name]
    with pytest.raises(AssertionError, match=rf"{BROKEN} was broken of chat-17-b6 in update_state_after_alloc"):
        test()


def test_the_docstring_tells_the_incident(run: Any, broken_log: Path) -> None:
    """Rule, event, request, detail, versions and the command, so that the file explains itself."""
    source = run("repro", broken_log, "chat-17", "--core").out
    docstring = namespace_of(source)["__doc__"]
    assert f"broke {BROKEN} for chat-17-b6 at event" in docstring
    assert "80 external tokens were taken up, 64 had been answered" in docstring
    assert "kvledger 0.1.0 with vLLM 0.32.0" in docstring
    assert f"kvledger repro {broken_log} chat-17 --core" in docstring


def test_the_recording_ends_with_the_incident(run: Any, broken_log: Path) -> None:
    """What came later had nothing to do with it."""
    source = run("repro", broken_log, "chat-17", "--core").out
    observations = namespace_of(source)["RECORDING"].observations
    assert isinstance(observations[-1][1], e.BlocksAllocated)
    assert "chat-9" not in source


def test_chunk_keys_of_the_log_are_not_in_the_file(run: Any, broken_log: Path) -> None:
    """They have names of their own: equal names for equal keys is all that matters."""
    source = run("repro", broken_log, "chat-17", "--core").out
    keys = namespace_of(source)["RECORDING"].observations[1][1].keys
    assert keys == (b"k1", b"k2", b"k3", b"k4", b"k5")
    assert not any(key.hex() in source or repr(key) in source for key in keys_of("a", 8))


def test_without_a_request_the_first_incident_of_the_log_is_taken(run: Any, broken_log: Path) -> None:
    """On call one knows the log, not always the request."""
    result = run("repro", broken_log, "--core")
    assert result.exit_code == 0
    assert BROKEN in result.out


def test_the_answers_of_a_request_can_be_pinned(run: Any, log: Path) -> None:
    """Nothing went wrong: the test says what the request was answered, and passes."""
    result = run("repro", log, "chat-17", "--core", "--pin")
    assert result.exit_code == 0
    (test,) = checks_of(result.out).values()
    test()
    assert "== [0, 64, 64, 64]" in result.out


def test_a_pinned_answer_that_changes_is_noticed(run: Any, log: Path) -> None:
    """Under a policy that allows less, the answers are other ones."""
    source = run("repro", log, "chat-17", "--core", "--pin").out
    (test,) = checks_of(source.replace("chunk_size=8", "chunk_size=8, max_hit_share=0.1")).values()
    with pytest.raises(AssertionError):
        test()


def test_where_nothing_went_wrong_pinning_is_offered(run: Any, log: Path) -> None:
    """No file is written, which a script sees by the exit code."""
    result = run("repro", log, "chat-17", "--core")
    assert (result.exit_code, result.out) == (64, "")
    assert "nothing went wrong with chat-17-b6" in result.err
    assert "--pin" in result.err


def test_others_with_whom_something_went_wrong_are_named(run: Any, broken_log: Path) -> None:
    """The incident may be another request's."""
    result = run("repro", broken_log, "chat-9", "--core")
    assert result.exit_code == 64
    assert "something did with chat-17-b6" in result.err


def test_an_unknown_request_is_refused(run: Any, log: Path) -> None:
    """As by every command."""
    result = run("repro", log, "nobody")
    assert result.exit_code == 64
    assert "no request begins with 'nobody'" in result.err


def test_pinning_needs_a_request(run: Any, log: Path) -> None:
    """Whose answers?"""
    result = run("repro", log, "--pin")
    assert result.exit_code == 64
    assert "--pin needs a REQUEST" in result.err


def test_a_log_that_begins_late_is_refused(run: Any, story: Driver, tools: Any, tmp_path: Path) -> None:
    """Without what came before, nothing can be re-enacted."""
    directory = tools.write_log(tmp_path / "log", story.observed, story.configuration, segment_bytes=1 << 10)
    late = sorted(directory.glob("*.kvlog"))[1]
    result = run("repro", late, "chat-17")
    assert (result.exit_code, result.out) == (64, "")
    assert "begins with event" in result.err


def test_damage_behind_the_incident_does_not_matter(run: Any, broken_log: Path) -> None:
    """The last frame is torn: it is told, and the test is written."""
    (segment,) = broken_log.glob("*.kvlog")
    segment.write_bytes(segment.read_bytes()[:-3])
    result = run("repro", broken_log, "chat-17", "--core")
    assert result.exit_code == 0
    assert "torn_tail" in result.err
    assert BROKEN in result.out


def test_damage_before_the_incident_ends_the_story(run: Any, broken_log: Path) -> None:
    """Behind a gap nothing is known, so nothing can be re-enacted."""
    (segment,) = broken_log.glob("*.kvlog")
    content = bytearray(segment.read_bytes())
    content[-600] ^= 0xFF  # well behind the header
    segment.write_bytes(content)
    result = run("repro", broken_log, "chat-17", "--core")
    assert result.exit_code == 64
    assert "can be re-enacted" in result.err


def test_a_story_can_be_ended_earlier(run: Any, broken_log: Path) -> None:
    """Before the incident there is none."""
    result = run("repro", broken_log, "chat-17", "--core", "--at", "20")
    assert result.exit_code == 64
    assert "nothing went wrong" in result.err


def test_programs_get_an_object(run: Any, broken_log: Path) -> None:
    """The source and the facts in one line of JSON."""
    result = run("repro", broken_log, "chat-17", "--core", "--json")
    (found,) = result.objects("repro")
    assert BROKEN in {incident["rule"] for incident in found["incidents"]}
    assert found["recurs_on_core"] is True
    assert f'trouble("{BROKEN}"' in found["source"]
