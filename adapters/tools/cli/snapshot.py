"""`kvledger snapshot`: write the snapshots that a log lacks, as its writer has it done for every new segment."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvledger.adapters.tools.cli.default_log import LogArgument
from kvledger.adapters.tools.cli.options import add_handlers, chosen_core
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.adapters.tools.logs.sources import find_logs, one_of
from kvledger.adapters.units import plural


def configure(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument(
        "log", action=LogArgument, type=Path, help="a log directory; it may be one that is being written"
    )
    add_handlers(parser)


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Write them, and say how many."""
    path = one_of(find_logs(arguments.log), arguments.log)
    if not path.is_dir():
        raise CommandFailed(f"{path} is one segment; give the directory of its log, where snapshots stand")
    log = open_log(path, chosen_core(arguments))
    with output.progress(log, "folding"):
        num_written = write_snapshots(log)
    if output.is_json:
        output.record("snapshots", {"num_written": num_written})
    else:
        output.line(f"{plural(num_written, 'snapshot')} written")
    return ExitCode.SOUND
