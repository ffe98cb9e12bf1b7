"""The `kvledger` command: reads arguments, runs one command, turns what happens into an exit code.

`arguments.logs` are the logs that were found, engine start by engine start, the newest start last.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from kvledger.adapters.tools.cli.commands import COMMANDS
from kvledger.adapters.tools.cli.default_log import DEFAULT_LOG
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.cli.parser import build_parser
from kvledger.adapters.tools.cli.streams import OutputFailed, guard_standard_streams, silence_standard_streams
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode, gravest, unreadable_text
from kvledger.adapters.tools.logs.sources import engine_starts, find_logs, started_with
from kvledger.adapters.tools.logs.streams import StreamUrl, keep_mirrored, shown_log
from kvledger.adapters.tools.logs.visible import remark
from kvledger.adapters.units import plural
from kvledger.lifecycle import described, raise_if_unstoppable, without_credentials
from kvledger.storage.events.files import refused_link
from kvledger.storage.extras import EXTRAS


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Nothing is raised; a traceback is printed only if it is asked for."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may stand at the cursor
        from kvledger.adapters.tools.cli.completion import complete  # noqa: PLC0415 -- a start does not pay for it

        complete()
    guard_standard_streams()
    try:
        exit_code = _run(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    except OutputFailed as failure:
        if not failure.is_reader_gone:
            with contextlib.suppress(OutputFailed):
                remark(f"the output cannot be written: {failure}; make room, or write elsewhere")
        silence_standard_streams()
        return (ExitCode.BROKEN_PIPE if failure.is_reader_gone else ExitCode.CANNOT_WRITE).value
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED.value
    return exit_code


def _run(argv: Sequence[str] | None) -> int:
    arguments, default = argparse.Namespace(), ""
    try:
        try:
            arguments = build_parser().parse_args(argv)
        except SystemExit as exit_:  # argparse, after --help, --version or wrong usage
            return exit_.code if isinstance(exit_.code, int) else ExitCode.SOUND.value
        if getattr(arguments, "log_is_default", False):
            default = f" (LOG is {shown_log(arguments.log)}, from {DEFAULT_LOG})"
        arguments.logs = _logs(arguments) if arguments.is_reading else []
        output = Output(is_json=arguments.json)
        output.has_many_logs = len(arguments.logs) > 1
        return int(gravest([arguments.run(arguments, output), *output.failures]))
    except CommandFailed as failure:
        remark(f"{_without_log(str(failure), arguments)}{default}")
        return failure.exit_code.value
    except OSError as error:
        remark(f"{_without_log(unreadable_text(error), arguments)}{default}")
        return ExitCode.DAMAGED.value
    except BaseException as error:  # noqa: BLE001 -- the last place that can say it in words
        raise_if_unstoppable(error)
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            remark(str(error))
            return ExitCode.REFUSED.value
        _report_mistake(error)
        return ExitCode.INTERNAL_ERROR.value


def _without_log(text: str, arguments: argparse.Namespace) -> str:
    """An error that may quote a LOG that is an address and was taken for a path."""
    log = getattr(arguments, "log", None)
    return text.replace(str(log), shown_log(log)) if isinstance(log, Path) else text


def _report_mistake(error: BaseException) -> None:
    """Say what a person can do about a mistake of ours; KVLEDGER_TRACEBACK has it in full."""
    if os.environ.get("KVLEDGER_TRACEBACK"):
        sys.stderr.write(without_credentials("".join(traceback.format_exception(error))))
    place = traceback.extract_tb(error.__traceback__)[-1]
    remark(
        f"a mistake in kvledger itself, and no judgement of the log: {described(error)} "
        f"({Path(place.filename).name}:{place.lineno}). Please report it with this line, the command and, if "
        "you may share it, the log; KVLEDGER_TRACEBACK=1 prints the traceback"
    )


def _is_missing(path: Path) -> bool:
    """Whether there is nothing, which is not known where nobody may look."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _logs(arguments: argparse.Namespace) -> list[Path]:
    if arguments.request and isinstance(arguments.log, Path) and _is_missing(arguments.log):
        raise CommandFailed(
            f"there is nothing at {shown_log(arguments.log)}, nor at {shown_log(arguments.request)}; give the LOG (a "
            "log directory or a *.kvlog file) and the REQUEST in it"
        )
    logs = find_logs(arguments.log, arguments.mirror, newest=arguments.newest)
    if isinstance(arguments.log, StreamUrl) and getattr(arguments, "follow", False):
        keep_mirrored(arguments.log, arguments.mirror, newest=arguments.newest)
    if arguments.newest and len(logs) > 1:
        return _newest(logs, arguments)
    return logs


def _newest(logs: Sequence[Path], arguments: argparse.Namespace) -> list[Path]:
    """The scheduler's log of the newest engine start, behind those of its workers for a command that judges them."""
    for link in filter(Path.is_symlink, logs):
        remark(str(refused_link(link)))
    starts = engine_starts(logs)
    newest = starts[-1]
    if newest.scheduler is None:
        remark(
            f"the newest of {len(starts)} engine starts in {arguments.log} has no scheduler log, only "
            f"{plural(len(newest.workers), 'log')} of workers: it failed before its scheduler was made, or that log "
            "was removed; `kvledger ls` lists the earlier starts"
        )
        return newest.logs
    of_what = "logs" if len(starts) == len(logs) else "logs, the scheduler's of the newest engine start,"
    remark(f"reading {newest.scheduler}, the newest of {len(logs)} {of_what} in {arguments.log}")
    others = started_with(newest, starts)
    if others:
        named = ", ".join(str(other.main) for other in others)
        remark(f"it is one of {len(others) + 1} engines or connectors of the same server; not read: {named}")
    return newest.logs if COMMANDS[arguments.command].judges_workers else [newest.scheduler]


if __name__ == "__main__":
    sys.exit(main())
