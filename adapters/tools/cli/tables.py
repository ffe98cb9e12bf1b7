"""`kvledger tables`: write logs as Parquet files, one per table, for DuckDB, Polars, pandas and data lakes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvledger.adapters.tools.cli.export_otlp import coverage_of_all
from kvledger.adapters.tools.cli.finding import foldable, logs_of
from kvledger.adapters.tools.cli.options import NO_EXTENSIONS, Extending, Reading, value
from kvledger.adapters.tools.cli.output import Written
from kvledger.adapters.tools.cli.target import open_target
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.tools.logs.sources import engine_starts
from kvledger.adapters.tools.tables.arrow import parquet_file
from kvledger.adapters.tools.tables.rows import read_rows
from kvledger.adapters.tools.tables.schema import TABLES, VIOLATIONS, table_named
from kvledger.adapters.units import plural, size
from kvledger.storage.extras import require


def _names(text: str) -> Sequence[str]:
    """Parse names of tables, separated by commas. Raises `ValueError` if a table does not exist."""
    return tuple(dict.fromkeys(table_named(name.strip()).name for name in text.split(",")))


def run(
    reading: Reading,
    *,
    folder: Annotated[
        Path | None,
        Parameter(
            name=("--output", "-o"),
            metavar="DIR",
            help="folder for the files, one TABLE.parquet per table; a missing folder is created",
        ),
    ] = None,
    tables: Annotated[
        Sequence[str],
        value(
            _names,
            "NAME,...",
            name="--table",
            help=f"tables to write: {', '.join(TABLES)}; default: all except {VIOLATIONS}, because that table needs a "
            "verification of the logs, which takes longer than all other tables together",
        ),
    ] = (),
    force: Annotated[bool, Parameter(help="replace files that exist")] = False,
    extending: Extending = NO_EXTENSIONS,
    output: Written,
) -> ExitCode:
    """Write one file for each table, with the rows of all logs."""
    require("kvledger tables", "pyarrow")
    if folder is None:
        raise CommandFailed("this command writes several files; name a folder with -o")
    every_log = logs_of(reading, output)
    logs = foldable(reading, output, every_log, extending.core())
    if folder.exists() and not folder.is_dir():
        raise CommandFailed(f"{folder} is not a folder; name a folder with -o")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise CommandFailed(f"{folder}: {error.strerror}; name a folder that can be created") from error
    start_of = {path: start.main.name for start in engine_starts(every_log) for path in start.logs}
    paths = {name: folder / f"{name}.parquet" for name in tables or (name for name in TABLES if name != VIOLATIONS)}
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open_target(path, overwrite=force)) for name, path in paths.items()}
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
