"""`kvledger export`: write a log as a trace for Perfetto, an HTML page, or spans for OpenTelemetry."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import IO, Annotated

from cyclopts import Parameter

from kvledger.adapters.tools.cli.export_otlp import coverage_of_all, export_spans
from kvledger.adapters.tools.cli.finding import foldable, opened_log
from kvledger.adapters.tools.cli.options import NOTHING_CHOSEN, Deciding, Reading
from kvledger.adapters.tools.cli.output import Output, Written
from kvledger.adapters.tools.cli.target import open_target
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.tools.export.perfetto import EngineTrace, TraceFile
from kvledger.adapters.tools.export.reading import read_trace
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.reading import begin_model
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.units import plural, size

_SUFFIXES = frozenset({".html", ".json", ".gz"})
"""Suffixes of output files. A REQUEST with such a suffix was meant as the output file."""
_Selected = list[tuple[StoredLog, Selection]]


def run(
    reading: Reading,
    *,
    perfetto: Annotated[bool, Parameter(help="write a trace for ui.perfetto.dev")] = False,
    html: Annotated[bool, Parameter(help="write one HTML file that you can attach to a ticket")] = False,
    otlp: Annotated[
        str | None,
        Parameter(
            metavar="TARGET",
            allow_leading_hyphen=True,
            help="send OpenTelemetry spans to an endpoint such as http://host:4318, or write the spans as lines of "
            "JSON to a file (-: stdout)",
        ),
    ] = None,
    path: Annotated[
        Path | None, Parameter(name=("--output", "-o"), metavar="FILE", help="file to write; default: stdout")
    ] = None,
    deciding: Deciding = NOTHING_CHOSEN,
    force: Annotated[bool, Parameter(help="replace FILE if it exists")] = False,
    output: Written,
) -> ExitCode:
    """Write the selected parts of all logs into one file, or send them as spans."""
    if [perfetto, html, otlp is not None].count(True) != 1:
        raise CommandFailed("give exactly one format: --perfetto, --html or --otlp")
    if otlp is not None:
        if path is not None:
            raise CommandFailed(
                f"--otlp and -o cannot be used together, because --otlp names its own target; give only --otlp {path}"
            )
        return export_spans(otlp, reading, deciding, output, force=force)
    if path is None and Path(reading.request or "").suffix in _SUFFIXES:
        raise CommandFailed(
            f"{reading.request} was parsed as the REQUEST; to write a file of this name, give -o {reading.request}"
        )
    if output.is_json and path is None:
        raise CommandFailed(
            "--json prints a list of the written files to stdout, so the export needs a file; name a file with -o"
        )
    logs = foldable(reading, output, core=deciding.core())
    with open_target(path, overwrite=force) as file:
        if perfetto:
            _export_trace(logs, file, output)
        else:
            from kvledger.adapters.tools.export.page import write_page  # noqa: PLC0415 - templates take a seventh of a second

            for piece in write_page(logs, partial(open_again, reading=reading, deciding=deciding), output):
                file.write(piece.encode())
    if path is not None:
        num_bytes = path.stat().st_size
        if output.is_json:
            output.record("export", {"path": str(path), "num_bytes": num_bytes, "num_logs": len(logs)})
        else:
            output.remark(f"wrote {path}, {size(num_bytes)}, of {plural(len(logs), 'log')}")
    return coverage_of_all(logs, output)


def open_again(path: Path, *, reading: Reading, deciding: Deciding) -> StoredLog:
    """Open a log in another process, with the same options. Cores cannot be sent to a process, so it makes its own."""
    return opened_log(path, reading, deciding.core())


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


def _opened_at(log: StoredLog) -> int | None:
    opened_at = log.header.get("opened_at_unix_ns")
    return opened_at if isinstance(opened_at, int) else None
