"""Builds the command line from `COMMANDS`.

A command is a function: `run` in the module with the command's name, or an entry point. The function takes the
command's arguments and an `Output`, and returns an exit code. The library cyclopts parses the command line and imports
only the module of the chosen command. `kvledger --help` imports neither a command nor the core.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

from cyclopts import App, Parameter

from kvledger.adapters.tools.cli.commands import COMMANDS
from kvledger.adapters.tools.exit_codes import ExitCode


def build_app() -> App:
    """Return the cyclopts app with all commands. Its `meta` app parses the arguments and runs the chosen command."""
    app = App(
        name="kvledger",
        help="Read the event logs of kvledger.",
        help_epilogue="COMMAND --help shows the exit codes of a command, and examples. If you leave out LOG, "
        "the command takes it from the environment variable KVLEDGER_LOG.",
        help_format="plaintext",
        version=lambda: f"kvledger {version('kvledger')}",
        default_parameter=Parameter(negative=(), show_default=lambda default: str(default) if default else None),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for place, (name, command) in enumerate(COMMANDS.items()):
        app.command(command.path(name), name=name, help=command.help, help_epilogue=command.epilogue(), sort_key=place)
    app.meta.suppress_keyboard_interrupt = False

    @app.meta.default
    def launch(
        *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        json: Annotated[bool, Parameter(help="print one JSON object per line", negative=())] = False,
    ) -> ExitCode:
        command, bound, injected = app.parse_args(words)
        if "output" not in injected:  # help, or the version
            command(*bound.args, **bound.kwargs)
            return ExitCode.SOUND if words else ExitCode.USAGE
        from kvledger.adapters.tools.cli.running import run_command  # noqa: PLC0415 -- imports the core

        return run_command(command, bound, is_json=json)

    return app
