"""`kvledger tables`: logs as Parquet files, one for each table, for DuckDB, Polars, pandas and data lakes."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from kvledger.adapters.tools.cli.export_otlp import coverage_of_all
from kvledger.adapters.tools.cli.finding import foldable
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.cli.target import open_target
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.tools.logs.sources import engine_starts
from kvledger.adapters.tools.tables.arrow import parquet_file
from kvledger.adapters.tools.tables.rows import read_rows
from kvledger.adapters.tools.tables.schema import TABLES, VIOLATIONS, table_named
from kvledger.adapters.units import plural, size
from kvledger.storage.extras import require

_DEFAULT = tuple(name for name in TABLES if name != VIOLATIONS)


def configure(parser: argparse.ArgumentParser) -> None:
    """What only this command has."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=Path,
        help="the folder to write into, one TABLE.parquet for each table; it is created if it does not exist",
    )
    parser.add_argument(
        "--table",
        metavar="NAME,...",
        type=_names,
        default=_DEFAULT,
        help=f"which tables: {', '.join(TABLES)}. default: all but {VIOLATIONS}, which verifies the logs and so takes "
        "longer than all others together",
    )
    parser.add_argument("--force", action="store_true", help="replace files that exist")


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Write each table of all logs into one file."""
    require("kvledger tables", "pyarrow")
    folder: Path | None = arguments.output
    if folder is None:
        raise CommandFailed("several files are written: name a folder with -o")
    logs = foldable(arguments, output)
    if folder.exists() and not folder.is_dir():
        raise CommandFailed(f"{folder} is not a folder; name a folder with -o")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise CommandFailed(f"{folder}: {error.strerror}; name a folder that can be created") from error
    start_of = {path: start.main.name for start in engine_starts(arguments.logs) for path in start.logs}
    paths = {name: folder / f"{name}.parquet" for name in arguments.table}
    with contextlib.ExitStack() as stack:
        files = {
            name: stack.enter_context(open_target(path, overwrite=arguments.force)) for name, path in paths.items()
        }
        rows = {name: stack.enter_context(parquet_file(file, TABLES[name])) for name, file in files.items()}
        add = {name: batches.add for name, batches in rows.items()}
        for log, selection in logs:
            with output.progress(log, "writing tables"):
                read_rows(log, selection, start_of[log.path], add, output.remark)
    for name, path in paths.items():
        num_rows, num_bytes = rows[name].num_rows, path.stat().st_size
        if output.is_json:
            fields = {"path": str(path), "table": name, "num_rows": num_rows, "num_bytes": num_bytes}
            output.record("table", {**fields, "num_logs": len(logs)})
        else:
            output.remark(f"wrote {path}: {plural(num_rows, 'row')} of {plural(len(logs), 'log')}, {size(num_bytes)}")
    return coverage_of_all(logs, output)


def _names(text: str) -> Sequence[str]:
    """Names of tables, separated by commas.

    Raises:
        argparse.ArgumentTypeError: there is no such table.
    """
    try:
        return tuple(dict.fromkeys(table_named(name.strip()).name for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
