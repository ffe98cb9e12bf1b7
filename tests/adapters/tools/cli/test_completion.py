"""The Tab key: real shells ask, and the command answers without a start that is slower for everybody."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from processes import finished

SHELLS = ("bash", "zsh", "fish")
LINES = ("kvledger sh", "kvledger show --fol", "kvledger show my", "kvledger why my\\ log chat-1")
ASK = """
eval "$(kvledger completion bash)"
while read -r line; do
    COMP_LINE="$line" COMP_POINT=${#line} COMP_TYPE=9 COMP_WORDS=($line) COMPREPLY=()
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    _python_argcomplete kvledger
    echo "${COMPREPLY[@]}"
done
"""
ASK_ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1=; autoload -Uz compinit; compinit -D -u; eval "$(kvledger completion zsh)"; setopt menu_complete'
zpty -w shell 'answer() { print -r -- "$BUFFER" >> answers; BUFFER=; print -n answer"ed" }; zle -N answer'
zpty -w shell 'bindkey "^G" answer'
while IFS= read -r line; do
    zpty -w -n shell "$line"$'\a'
    zpty -r shell said '*answered*'
done
zpty -d shell
cat answers
"""
"""A zsh on a terminal of its own: each line is typed, Tab keys and all, and what then stands there is the answer."""

ASK_FISH = """
mkdir -p ~/.config/fish/completions
kvledger completion fish > ~/.config/fish/completions/kvledger.fish
while read line
    complete -C "$line"
end
"""
"""`complete -C` is what the Tab key asks."""


@pytest.fixture
def asked(tmp_path: Path, log: Path) -> Path:
    """A folder with a log in it, and the command on the path."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "kvledger"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvledger.adapters.tools.cli.main "$@"\n')
    command.chmod(0o755)
    assert log == tmp_path / "log"
    return tmp_path


def said(shell: str, program: str, folder: Path, *lines: str, **environment: str) -> list[str]:
    """What a shell prints that reads `lines` from its input."""
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), **environment}
    typed = folder / "typed"
    typed.write_text("".join(f"{line}\n" for line in lines))
    with typed.open() as keys:
        ended = finished([shell, "-c", program], stdin=keys, cwd=folder, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def answers(folder: Path, *lines: str, **environment: str) -> list[list[str]]:
    """What bash would offer for each line."""
    return [line.split() for line in said("bash", ASK, folder, *lines, **environment)]


def test_bash_completes_commands_options_logs_and_requests(asked: Path) -> None:
    """Requests of the log that stands on the line, wherever that is."""
    found = answers(asked, "kvledger sh", "kvledger show --fol", "kvledger show lo", "kvledger why log chat-1")
    assert found == [["show", "ship"], ["--follow"], ["log/"], ["chat-17-b6"]]


def test_requests_of_the_default_log_are_completed_in_the_place_of_a_log(asked: Path) -> None:
    """As `kvledger why chat-17` is understood."""
    assert answers(asked, "kvledger why ch", KVLEDGER_LOG="log") == [["chat-17-b6", "chat-9"]]


def test_requests_are_those_of_a_log_whose_name_is_quoted(asked: Path) -> None:
    """The line is read as the shell reads it."""
    (asked / "log").rename(asked / "my log")
    assert answers(asked, "kvledger why 'my log' chat-1", "kvledger why my\\ log chat-1") == [["chat-17-b6"]] * 2


def test_zsh_completes_commands_options_logs_and_requests(asked: Path, zsh: str) -> None:
    """With the Tab key, after `compinit`."""
    (asked / "log").rename(asked / "my log")
    typed = [f"{line}\t" for line in LINES]
    assert [line.strip() for line in said(zsh, ASK_ZSH, asked, *typed, f"{LINES[0]}\t\t")] == [
        "kvledger show",
        "kvledger show --follow",
        "kvledger show my\\ log/",
        "kvledger why my\\ log chat-17-b6",
        "kvledger ship",
    ]


def test_fish_completes_commands_options_logs_and_requests(asked: Path, fish: str) -> None:
    """From the file that fish reads by itself; beside a command and an option stands what it is."""
    (asked / "log").rename(asked / "my log")
    ship, show, follow, *others = said(fish, ASK_FISH, asked, *LINES)
    assert ship.startswith("ship\tcopy logs")
    assert show.startswith("show\tshow a log")
    assert follow.startswith("--follow\tkeep printing")
    assert others == ["my log/", "chat-17-b6"]


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
        "import sys; from kvledger.adapters.tools.cli.main import main; "
        f"main(['show', {str(log)!r}]); print('argcomplete' in sys.modules)"
    )
    assert finished([sys.executable, "-c", code], cwd=asked).stdout.splitlines()[-1] == "False"
