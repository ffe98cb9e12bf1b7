"""The command as a whole: arguments, paths, pipes, signals, and what the documentation promises."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from processes import finished, started
from stored_logs import write_log

COMMAND = [sys.executable, "-m", "kvledger.adapters.tools.cli.main"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["verify"],
        ["show", "LOG", "--until", "zero"],
        ["show", "LOG", "--until", "0"],
        ["verify", "LOG", "--fast"],
    ],
)
def test_wrong_usage_gives_64(arguments: list[str], run: Any, log: Path) -> None:
    """Also what the parser refuses, whose own exit code would mean damage."""
    result = run(*(log if argument == "LOG" else argument for argument in arguments))
    assert result.exit_code == 64
    assert result.err.startswith("kvledger: ")
    assert result.err.endswith(" --help\n")


def test_a_path_without_a_log_gives_64(run: Any, tmp_path: Path) -> None:
    """A typing error is no damage."""
    assert run("verify", tmp_path / "nowhere").exit_code == 64
    result = run("verify", tmp_path)
    assert result.exit_code == 64
    assert "contains no log" in result.err


def test_help_and_version_give_0(run: Any) -> None:
    """Asking is no error."""
    assert "COMMAND --help shows the exit codes" in run("--help").out
    assert run("verify", "--help").exit_code == 0
    assert run("--version").out.startswith("kvledger ")


def test_json_may_stand_before_or_after_the_command(run: Any, log: Path) -> None:
    """Nobody remembers which."""
    assert run("--json", "verify", log).out == run("verify", "--json", log).out


def test_all_logs_of_a_directory_are_verified_in_the_order_of_their_opening(
    run: Any, story: Driver, tmp_path: Path
) -> None:
    """By the time in the header, for copying a log changes the times of its files; the worst gives the exit code."""
    logs = tmp_path / "logs"
    new = write_log(logs / "a-new", story.observed, story.configuration, header={"opened_at_unix_ns": 2_000})
    old = write_log(logs / "b-old", story.observed[:5], story.configuration, header={"opened_at_unix_ns": 1_000})
    result = run("verify", logs)
    assert result.exit_code == 0
    assert result.out.index(str(old)) < result.out.index(str(new))
    assert "logs        2, 2 sound" in result.out
    (segment,) = old.glob("*.kvlog")
    segment.write_bytes(segment.read_bytes()[:-1])
    assert run("verify", logs).exit_code == 2
    newest = run("verify", "--newest", logs)
    assert newest.exit_code == 0
    assert f"reading {new}, the newest of 2 logs" in newest.err


def test_a_request_is_found_in_the_log_that_has_it(run: Any, story: Driver, tmp_path: Path) -> None:
    """Who looks for a request does not know after which start of the engine it came."""
    logs = tmp_path / "logs"
    other = Driver()
    other.arrive("chat-1", 5)
    write_log(logs / "a", other.observed, other.configuration, header={"opened_at_unix_ns": 1_000})
    write_log(logs / "b", story.observed, story.configuration, header={"opened_at_unix_ns": 2_000})
    assert run("show", logs, "chat-17").out.startswith("chat-17-b6")
    assert run("show", logs, "--request", "chat-9").out.startswith("chat-9")
    twice = run("show", logs, "--at", 9)
    assert twice.exit_code == 64
    several = "contains 2 logs (`kvledger ls` lists them); name one, the newest is last: "
    assert several in twice.err


def test_a_request_of_two_logs_is_not_guessed(run: Any, story: Driver, tmp_path: Path) -> None:
    """The logs are named."""
    for name in ("a", "b"):
        write_log(tmp_path / "logs" / name, story.observed, story.configuration)
    result = run("show", tmp_path / "logs", "chat-17")
    assert result.exit_code == 64
    assert "chat-17-b6 is in 2 logs; name one of them" in result.err


def test_every_json_object_names_its_type_and_is_documented(run: Any, log: Path) -> None:
    """`docs/cli.md` knows every type that any command prints here."""
    text = (Path(__file__).resolve().parents[4] / "docs" / "cli.md").read_text()
    (segment,) = log.glob("*.kvlog")
    outputs = [
        run("verify", "--json", log),
        run("show", "--json", log),
        run("show", "--json", log, "chat-17"),
        run("show", "--json", log, "chat-17", "--at", 10),
        run("show", "--json", log, "--at", 10),
    ]
    segment.write_bytes(segment.read_bytes()[:-3])
    outputs.append(run("verify", "--json", log))
    types = {item["type"] for output in outputs for item in output.objects()}
    assert {"log", "verdict", "not_checked", "damage", "request", "group", "request_state", "state"} <= types
    for type_name in types | {"violation", "divergence", "reference_difference", "unfoldable"}:
        assert f'`"type": "{type_name}"`' in text, type_name


def test_piped_text_is_neither_coloured_nor_cut(log: Path) -> None:
    """Whoever greps it finds whole lines."""
    shown = finished([*COMMAND, "show", log, "chat-17"])
    assert shown.returncode == 0, shown.stderr
    assert "\x1b" not in shown.stdout
    assert "…" not in shown.stdout
    assert shown.stderr == ""
    assert max(map(len, shown.stdout.splitlines())) > 120


@pytest.fixture
def long_log(tmp_path: Path) -> Path:
    """More than a pipe holds when it is shown: whoever writes it waits for a reader."""
    driver = Driver()
    for number in range(3000):
        driver.arrive(f"request-{number}", 5)
    return write_log(tmp_path / "log", driver.observed, driver.configuration)


def test_an_interrupt_gives_130_without_a_traceback(long_log: Path) -> None:
    """Ctrl-C in the middle of the work."""
    with started([*COMMAND, "show", "--json", long_log], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b'{"type":"log"')
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err == b""
