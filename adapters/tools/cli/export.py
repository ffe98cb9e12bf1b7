"""`kvledger export`: a log as a trace for Perfetto, as a page for a ticket, as tables, or as spans of OpenTelemetry."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO

from kvledger.adapters.tools.cli.export_otlp import coverage_of_all, export_spans
from kvledger.adapters.tools.cli.finding import selected
from kvledger.adapters.tools.cli.options import add_handlers
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.cli.streams import OutputFailed
from kvledger.adapters.tools.cli.target import open_target
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode, gravest
from kvledger.adapters.tools.export.perfetto import EngineTrace, TraceFile
from kvledger.adapters.tools.export.reading import read_trace
from kvledger.adapters.tools.export.tables import COLUMNS, EVENTS, Tables, WriteRow
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.reading import begin_model
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.visible import visible
from kvledger.adapters.units import plural, size

_ALL_TABLES = "all"

_Selected = list[tuple[StoredLog, Selection]]


def configure(parser: argparse.ArgumentParser) -> None:
    """What only this command has."""
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--perfetto", action="store_true", help="a trace that ui.perfetto.dev opens")
    formats.add_argument("--html", action="store_true", help="one page with everything in it, for a ticket")
    formats.add_argument(
        "--csv",
        metavar="TABLE",
        nargs="?",
        const="requests",
        choices=(*COLUMNS, _ALL_TABLES),
        help=f"a table: {', '.join(COLUMNS)} (default: requests); or {_ALL_TABLES}, into the folder named with -o",
    )
    formats.add_argument(
        "--otlp",
        metavar="TARGET",
        help="spans for OpenTelemetry: sent to http://host:4318, or written to a file as lines of JSON (- for stdout)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="where to write; default: stdout")
    add_handlers(parser)
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Write the selected part of each log into one file."""
    if not (arguments.perfetto or arguments.html or arguments.csv or arguments.otlp):
        raise CommandFailed("say which format is wanted: --perfetto, --html, --csv or --otlp")
    path: Path | None = arguments.output
    if arguments.otlp:
        if path is not None:
            raise CommandFailed(f"--otlp names where spans go: give --otlp {path}, and no -o")
        return export_spans(arguments, output)
    if output.is_json and path is None:
        raise CommandFailed("--json lists what was written, so name a file with -o")
    logs = list(_readable(selected(arguments, output), output))
    if not logs:
        raise CommandFailed("no log could be read: see above", gravest(output.failures) or ExitCode.DAMAGED)
    if arguments.csv == _ALL_TABLES:
        paths = _export_all_tables(logs, path, output, overwrite=arguments.force)
    else:
        with open_target(path, overwrite=arguments.force, allow_terminal=arguments.csv is not None) as file:
            _export(arguments, logs, file, output)
        paths = [] if path is None else [path]
    for written in paths:
        num_bytes = written.stat().st_size
        if output.is_json:
            output.record("export", {"path": str(written), "num_bytes": num_bytes, "num_logs": len(logs)})
        else:
            output.remark(f"wrote {written}, {size(num_bytes)}, of {plural(len(logs), 'log')}")
    return coverage_of_all(logs, output)


def _readable(logs: Iterable[tuple[StoredLog, Selection]], output: Output) -> Iterator[tuple[StoredLog, Selection]]:
    """Those with a configuration, without which nothing can be folded; the others of many are named."""
    for log, selection in logs:
        with output.apart_from_others(log.path):
            log.configuration  # noqa: B018 -- it raises
            yield log, selection


def _export(arguments: argparse.Namespace, logs: _Selected, file: IO[bytes], output: Output) -> None:
    if arguments.perfetto:
        _export_trace(logs, file, output)
    elif arguments.html:
        from kvledger.adapters.tools.export.page import write_page  # noqa: PLC0415 - templates take a seventh of a second

        for piece in write_page(logs, output):
            file.write(piece.encode())
    elif arguments.csv:
        with _csv_writer(file, arguments.csv) as write:
            _export_tables(logs, {arguments.csv: write}, output)


# --- Perfetto -----------------------------------------------------------------------------------


def _export_trace(logs: _Selected, file: IO[bytes], output: Output) -> None:
    trace = TraceFile(file.write)
    opened = [_opened_at(log) for log, _ in logs]
    first = min((at for at in opened if at is not None), default=0)
    for number, ((log, selection), opened_at) in enumerate(zip(logs, opened, strict=True)):
        shift_ns = 0 if opened_at is None else opened_at - first
        label = log.path.name if len(logs) > 1 else ""
        engine = EngineTrace(trace, engine=number, label=label, shift_ns=shift_ns)
        with output.progress(log, "exporting"):
            read = read_trace(log, begin_model(log), selection, engine, output.remark)
        engine.end(read.now_ns)
    about = {
        "exported_by": "kvledger export --perfetto",
        "trace_begins_at_unix_ns": first or None,
        "logs": [_about(log, selection) for log, selection in logs],
    }
    trace.end(about)


def _about(log: StoredLog, selection: Selection) -> dict[str, object]:
    return {
        "path": str(log.path),
        "kvledger_version": log.header.get("kvledger_version"),
        "vllm_version": log.header.get("vllm_version"),
        "opened_at_unix_ns": log.header.get("opened_at_unix_ns"),
        "first_event": selection.first_sequence,
        "last_event": selection.last_sequence or log.last_sequence,
        "request_id": selection.request_id,
        "num_damaged_places": len(log.damage),
        "num_skipped": dict(log.skipped),
    }


# --- tables -------------------------------------------------------------------------------------


def _export_tables(logs: _Selected, writers: Mapping[str, WriteRow], output: Output) -> None:
    for log, selection in logs:
        tables = Tables(log.path.name, _opened_at(log), writers)
        also = [partial(tables.take_events, selection=selection)] if EVENTS in writers else []
        with output.progress(log, "exporting"):
            read_trace(log, begin_model(log), selection, tables, output.remark, *also)


def _export_all_tables(logs: _Selected, folder: Path | None, output: Output, *, overwrite: bool) -> list[Path]:
    if folder is None:
        raise CommandFailed(f"--csv {_ALL_TABLES} writes several files: name a folder with -o")
    if folder.exists() and not folder.is_dir():
        raise CommandFailed(f"{folder} is no folder; --csv {_ALL_TABLES} writes several files into one")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise CommandFailed(f"{folder}: {error.strerror}; name a folder that can be made") from error
    paths = [folder / f"{name}.csv" for name in COLUMNS]
    with contextlib.ExitStack() as files:
        writers = {
            name: files.enter_context(_csv_writer(files.enter_context(open_target(path, overwrite=overwrite)), name))
            for name, path in zip(COLUMNS, paths, strict=True)
        }
        _export_tables(logs, writers, output)
    return paths


@contextlib.contextmanager
def _csv_writer(file: IO[bytes], table: str) -> Iterator[WriteRow]:
    """RFC 4180: commas, CRLF, quotes where they are needed, and a header."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=False)
    try:
        writer = csv.writer(text)
        writer.writerow(COLUMNS[table])
        if file is sys.stdout.buffer and sys.stdout.isatty():
            yield lambda row: writer.writerow(visible(cell) if isinstance(cell, str) else cell for cell in row)
        else:
            yield writer.writerow
    finally:
        try:
            text.flush()
        finally:
            with contextlib.suppress(OSError, OutputFailed):  # it flushes once more, in vain as before
                text.detach()


def _opened_at(log: StoredLog) -> int | None:
    opened_at = log.header.get("opened_at_unix_ns")
    return opened_at if isinstance(opened_at, int) else None
