"""What a log holds never reaches a terminal as something that it obeys."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lifecycle_driver import Driver
from stored_logs import write_log

from kvledger.lifecycle import events as e

TITLE = "\x1b]0;owned\x07"
HOSTILE = f"mallory{TITLE}\x9b31m\r\n\u202e\u2028\x7fend"
"""Sets the window's title, colours the rest, begins a line, turns the direction of text."""
SHOWN = "mallory\\u001b]0;owned\\u0007\\u009b31m\\u000d\\u000a\\u202e\\u2028\\u007fend"
UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.fixture(scope="module")
def hostile_log(story: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The story of a client with a hostile id; a failed hook, a note, the header and the path are as bad."""
    events = [
        msgspec.structs.replace(event, request_id=HOSTILE)
        if getattr(event, "request_id", "") == "chat-17-b6"
        else event
        for event in story.observed
    ]
    last = max(getattr(event, "time_ns", 0) for event in events)
    events += [
        e.HookFailed(request_id=HOSTILE, hook=TITLE, error=TITLE, time_ns=last),
        e.LogNote(text=TITLE, time_ns=last),
    ]
    header = {"connector": TITLE, "vllm_version": TITLE}
    return write_log(tmp_path_factory.mktemp("hostile") / f"log{TITLE}", events, story.configuration, header=header)


def unseen_in(text: str) -> set[str]:
    """What in the text cannot be seen, but for the ends of its lines."""
    return {character for character in text if unicodedata.category(character) in UNSEEN} - {"\n"}


COMMANDS = [
    ("verify", "LOG"),
    ("verify", "LOG", "--verbose"),
    ("show", "LOG"),
    ("show", "LOG", "mallory"),
    ("show", "LOG", "mallory", "--at", "20"),
    ("show", "LOG", "--follow"),
    ("show", "LOG", "nobody"),
    ("why", "LOG", "mallory"),
    ("stats", "LOG"),
    ("show", "LOG", "--at", "1000"),
    ("core", "LOG"),
    ("verify", "LOG\x1b[2J"),
]


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nothing_in_a_log_reaches_the_terminal_unseen(
    run: Any, command: Sequence[str], hostile_log: Path, as_json: bool
) -> None:
    """Request ids, errors, notes, headers and paths; on stdout and on stderr."""
    words = [word.replace("LOG", str(hostile_log)) for word in command]
    result = run(*words, *(["--json"] if as_json else []))
    assert result.exit_code in {0, 1, 2, 3} or "nobody" in command or "LOG\x1b[2J" in command
    assert (result.out + result.err).strip()
    assert not unseen_in(result.out + result.err)


def test_a_request_with_a_hostile_id_is_named_so_that_every_character_can_be_seen(run: Any, hostile_log: Path) -> None:
    """In a table and in an error: as numbers in the way of JSON."""
    assert SHOWN in run("show", hostile_log).out
    assert SHOWN in run("show", hostile_log, "nobody").err


def test_programs_get_a_hostile_id_as_it_is(run: Any, hostile_log: Path) -> None:
    """JSON escapes it, and a parser makes of it what it was."""
    (found,) = {
        line["request_id"] for line in map(json.loads, run("show", "--json", hostile_log, "mallory").out.splitlines())
    }
    assert found == HOSTILE
