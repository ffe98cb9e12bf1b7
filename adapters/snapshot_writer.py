"""Writes the snapshots that a log lacks, in a process that the engine starts for each new segment.

`python -P -m kvledger.adapters.snapshot_writer DIRECTORY` reads the log in the same way as kvledger's commands. The
engine imports nothing of this module.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvledger.adapters.core import composed_core
from kvledger.adapters.tools.exit_codes import CommandFailed, unreadable_text
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.lifecycle import ConfigurationError, described, raise_if_unstoppable


def main() -> int:
    """Write the snapshots. Return 0; on failure, print the reason on stderr and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="directory of the log")
    parser.add_argument(
        "--handlers", action="append", default=[], help="module:Class of a handler that the engine uses; repeatable"
    )
    parser.add_argument(
        "--extensions",
        action="append",
        default=[],
        help="module:Class of an extension that the engine uses; repeatable",
    )
    arguments = parser.parse_args()
    try:
        write_snapshots(open_log(arguments.directory, composed_core(arguments.handlers, arguments.extensions)))
    except BaseException as error:  # noqa: BLE001 -- the engine logs one line of it
        raise_if_unstoppable(error)
        sys.stderr.write(f"{_reason(error)}\n")
        return 1
    return 0


def _reason(error: BaseException) -> str:
    if isinstance(error, CommandFailed | ConfigurationError):
        return str(error)
    return unreadable_text(error) if isinstance(error, OSError) else f"kvledger failed: {described(error)}"


if __name__ == "__main__":
    sys.exit(main())
