"""`kvledger completion SHELL`: print the script that lets a shell complete commands, options and paths."""

from __future__ import annotations

from typing import Literal

from kvledger.adapters.tools.cli.app import build_app
from kvledger.adapters.tools.cli.output import Written
from kvledger.adapters.tools.exit_codes import ExitCode


def run(shell: Literal["bash", "zsh", "fish"], *, output: Written) -> ExitCode:
    """Print the script."""
    script = build_app().generate_completion(shell=shell)
    if output.is_json:
        output.record("completion", {"shell": shell, "script": script})
    else:
        output.raw(script)
    return ExitCode.SOUND
