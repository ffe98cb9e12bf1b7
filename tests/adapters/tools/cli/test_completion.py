"""`kvledger completion`: the script of each shell."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import finished

ASK = """
eval "$(kvledger completion bash)"
while read -r line; do
    COMP_LINE="$line" COMP_POINT=${#line} COMP_WORDS=($line) COMPREPLY=()
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    "$(complete -p kvledger | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" kvledger
    echo "${COMPREPLY[@]}"
done
"""


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """As soon as the script is evaluated."""
    command = tmp_path / "kvledger"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvledger.adapters.tools.cli.main "$@"\n')
    command.chmod(0o755)
    typed = tmp_path / "typed"
    typed.write_text("kvledger sh\nkvledger show --fol\n")
    with typed.open() as keys:
        ended = finished(["bash", "-c", ASK], stdin=keys, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert ended.returncode == 0, ended.stderr
    assert [set(line.split()) for line in ended.stdout.splitlines()] == [{"show", "ship"}, {"--follow"}]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_one_that_the_shell_can_read(shell: str, run: Any, tmp_path: Path) -> None:
    """Where that shell is not installed, the script is there all the same."""
    script = tmp_path / f"script.{shell}"
    script.write_text(run("completion", shell).out)
    assert "kvledger" in script.read_text()
    if shutil.which(shell) is not None:
        assert finished([shell, "-n", script]).returncode == 0
