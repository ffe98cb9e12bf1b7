"""What is typed: arguments and options, the default LOG, the help and its examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from stored_logs import write_log

from kvledger.adapters.tools.cli.commands import COMMANDS
from kvledger.adapters.tools.exit_codes import ExitCode


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_its_own_exit_codes_and_examples(
    command: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 80 columns; a code that it never returns is not among its own."""
    monkeypatch.setenv("COLUMNS", "80")
    text = run(command, "--help").out
    own = text.partition("\nexit codes:\n")[2].partition("\nexit codes of every command:\n")[0]
    codes = [int(line.split()[0]) for line in own.splitlines() if not line.startswith("     ")]
    assert codes == [code.value for code in COMMANDS[command].exit_codes]
    assert max(map(len, text.splitlines())) <= 80
    assert len(COMMANDS[command].examples) == 2
    for line in COMMANDS[command].examples.values():
        assert f"\n  {line}\n" in text
        assert f"kvledger {command}" in line


@pytest.fixture
def default(log: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log that KVLEDGER_LOG names."""
    monkeypatch.setenv("KVLEDGER_LOG", str(log))
    return log


@pytest.mark.parametrize("words", ["verify", "show", "stats", "export --perfetto", "retire --max-age 3d"])
def test_kvledger_log_stands_for_the_log(default: Path, run: Any, words: str) -> None:
    """In every command that takes one; what is printed is the same."""
    command, *options = words.split()
    named, unnamed = run(command, default, *options), run(*words.split())
    assert (unnamed.exit_code, unnamed.out) == (named.exit_code, named.out)
    assert named.exit_code == 0


@pytest.mark.parametrize("command", ["show", "why"])
def test_one_argument_is_the_request_where_it_is_no_path(default: Path, run: Any, command: str) -> None:
    """`kvledger why chat-17`, once the log is named in the environment."""
    assert run(command, "chat-17").out == run(command, default, "chat-17").out


def test_a_log_that_is_named_goes_over_kvledger_log(default: Path, run: Any, story: Driver, tmp_path: Path) -> None:
    """The argument stands nearer."""
    other = write_log(tmp_path / "other", story.observed[:5], story.configuration)
    assert str(other) in run("verify", other).out
    assert str(default) not in run("verify", other).out


def test_an_error_about_kvledger_log_names_it(default: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody knows where the path came from."""
    assert run("why", "nobody").err.endswith(f" (LOG is {default}, from KVLEDGER_LOG)\n")
    monkeypatch.setenv("KVLEDGER_LOG", "/nowhere")
    missing = run("verify")
    assert missing.exit_code == 64
    assert missing.err.startswith("kvledger: /nowhere does not exist; ")
    assert "KVLEDGER_LOG" in missing.err


@pytest.mark.usefixtures("default")
def test_a_path_that_is_not_there_is_no_request(run: Any) -> None:
    """A slip of the pen in a path is not looked for among the requests."""
    assert run("show", "nowhere/logs").err.startswith("kvledger: nowhere/logs does not exist")


def test_options_may_stand_anywhere_among_log_and_request(log: Path, run: Any) -> None:
    """Nobody remembers whether options come first; --json also stands before the command."""
    expected = run("show", log, "chat-17", "--until", "30", "--json")
    assert expected.exit_code == 0
    for words in (
        "--json show --until 30 LOG chat-17",
        "show LOG --json --until=30 chat-17",
        "show LOG --request chat-17 --until 30 --json",
    ):
        assert run(*(log if word == "LOG" else word for word in words.split())) == expected


def test_where_neither_log_nor_request_is_a_path_the_error_says_which_comes_first(run: Any) -> None:
    """They may be in the wrong order."""
    neither = run("why", "chat-17", "chat-18")
    assert neither.exit_code == 64
    assert "chat-17 does not exist; give the LOG (a log directory or a *.kvlog file) and the REQUEST" in neither.err


def test_a_misspelt_option_gets_the_nearest_one_and_the_help_of_its_command(log: Path, run: Any) -> None:
    """The help of all commands says nothing of this one's options."""
    misspelt = run("show", log, "--faild")
    assert misspelt.exit_code == 64
    assert misspelt.err == "kvledger: Unknown option: --faild. Did you mean --failed? See kvledger show --help\n"
    assert run("show", log, "chat-17", "chat-9").err.endswith(
        "'chat-9': too many arguments. See kvledger show --help\n"
    )


def test_a_misspelt_command_gets_the_nearest_one(run: Any) -> None:
    """And where all are listed."""
    misspelt = run("verfy", "logs")
    assert misspelt.exit_code == 64
    assert 'Unknown command "verfy". Did you mean "verify"?' in misspelt.err
    assert misspelt.err.endswith(" See kvledger --help\n")


def test_without_a_log_the_error_names_kvledger_log(run: Any) -> None:
    """The remedy for whoever types the path again and again."""
    result = run("show")
    assert result.exit_code == 64
    assert "Give LOG, or set the environment variable KVLEDGER_LOG." in result.err


def test_an_empty_kvledger_log_names_no_log(run: Any, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the current directory, in which `retire` would delete segments."""
    monkeypatch.setenv("KVLEDGER_LOG", "")
    monkeypatch.chdir(log.parent)
    result = run("retire", "--max-age", "1s", "--dry-run")
    assert (result.exit_code, result.out) == (ExitCode.USAGE, "")
    assert "LOG is missing" in result.err


def test_a_command_that_is_missing_is_wrong_usage(run: Any) -> None:
    """The help is printed all the same."""
    result = run()
    assert result.exit_code == ExitCode.USAGE
    assert "verify" in result.out


def test_two_logs_are_told_from_a_log_and_a_request(run: Any, log: Path) -> None:
    """Each with its remedy."""
    assert "are two logs; give the directory that contains both" in run("verify", log, log).err
    assert "give LOG before REQUEST" in run("show", "chat-17", log).err
    assert "'b': too many arguments" in run("show", log, "a", "b").err


def test_the_state_at_a_moment_takes_no_part_of_the_log(run: Any, log: Path) -> None:
    """An option that would not be heeded is refused."""
    for options in (["--until", "5"], ["--since", "5"], ["--follow"], ["--failed"]):
        result = run("show", log, "--at", "10", *options)
        assert result.exit_code == ExitCode.USAGE, options
        assert "--at shows one moment" in result.err
