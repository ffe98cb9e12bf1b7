"""The `kvledger` command: runs the chosen command and returns an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from kvledger.adapters.tools.cli.streams import guard_standard_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A traceback is printed only if KVLEDGER_TRACEBACK is set."""
    guard_standard_streams()
    try:
        try:
            exit_code = _run(sys.argv[1:] if argv is None else list(argv))
        except BaseException as error:  # noqa: BLE001 -- the error is explained
            from kvledger.adapters.tools.cli.running import explained  # noqa: PLC0415 -- imports the core

            exit_code = explained(error)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:  # noqa: BLE001 -- errors that end the command
        from kvledger.adapters.tools.cli.running import ended  # noqa: PLC0415

        exit_code = ended(error)
    return exit_code


def _run(words: list[str]) -> int:
    if words == ["--version"]:  # takes a third of the time without the parser
        print(f"kvledger {version('kvledger')}")
        return 0
    from kvledger.adapters.tools.cli.app import build_app  # noqa: PLC0415

    if not os.environ.get("KVLEDGER_LOG"):  # an empty value would mean the current directory
        os.environ.pop("KVLEDGER_LOG", None)
    return int(build_app().meta(words) or 0)


if __name__ == "__main__":
    sys.exit(main())
