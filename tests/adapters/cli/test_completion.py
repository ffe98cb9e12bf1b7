"""The Tab key: a real bash asks, and the command answers without a start that is slower for everybody."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import finished

SHELLS = ("bash", "zsh", "fish")
ASK = """
eval "$(kvledger completion bash)"
while read -r line; do
    COMP_LINE="$line" COMP_POINT=${#line} COMP_TYPE=9 COMP_WORDS=($line) COMPREPLY=()
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    _python_argcomplete kvledger
    echo "${COMPREPLY[@]}"
done
"""


@pytest.fixture
def asked(tmp_path: Path, log: Path) -> Path:
    """A folder with a log in it, and the command on the path."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "kvledger"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvledger.adapters.cli.main "$@"\n')
    command.chmod(0o755)
    assert log == tmp_path / "log"
    return tmp_path


def answers(folder: Path, *lines: str, **environment: str) -> list[list[str]]:
    """What bash would offer for each line."""
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), **environment}
    script = "".join(f"{line}\n" for line in lines)
    ended = subprocess.run(
        ["bash", "-c", ASK], input=script, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return [line.split() for line in ended.stdout.splitlines()]


def test_bash_completes_commands_options_logs_and_requests(asked: Path) -> None:
    """Requests of the log that stands on the line, wherever that is."""
    found = answers(asked, "kvledger sh", "kvledger show --fol", "kvledger show lo", "kvledger why log chat-1")
    assert found == [["show", "ship"], ["--follow"], ["log/"], ["chat-17-b6"]]


def test_requests_of_the_default_log_are_completed_in_the_place_of_a_log(asked: Path) -> None:
    """As `kvledger why chat-17` is understood."""
    assert answers(asked, "kvledger why ch", KVLEDGER_LOG="log") == [["chat-17-b6", "chat-9"]]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_is_one_that_the_shell_can_read(shell: str, asked: Path) -> None:
    """Where that shell is not installed, the script is there all the same."""
    script = asked / f"script.{shell}"
    script.write_text(finished([asked / "bin" / "kvledger", "completion", shell]).stdout)
    assert "kvledger" in script.read_text()
    if shutil.which(shell) is not None:
        assert finished([shell, "-n", script]).returncode == 0


def test_a_start_does_not_import_argcomplete(asked: Path, log: Path) -> None:
    """Who does not press Tab does not wait for it."""
    code = (
        "import sys; from kvledger.adapters.cli.main import main; "
        f"main(['show', {str(log)!r}]); print('argcomplete' in sys.modules)"
    )
    assert finished([sys.executable, "-c", code], cwd=asked).stdout.splitlines()[-1] == "False"
