"""`kvledger export --otlp`: send or write logs as OpenTelemetry spans.

This module must not know the content of spans.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvledger.adapters.tools.cli.finding import lives_in, selected
from kvledger.adapters.tools.cli.options import Deciding, Reading
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.cli.target import open_target
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode, gravest
from kvledger.adapters.tools.export.reading import read_trace
from kvledger.adapters.tools.export.request_sums import RequestSums
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.reading import begin_model
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.units import plural
from kvledger.storage.extras import OTLP, require

if TYPE_CHECKING:
    from kvledger.adapters.tools.export.otlp_targets import SpanTarget


def export_spans(name: str, reading: Reading, deciding: Deciding, output: Output, *, force: bool) -> ExitCode:
    """Send the spans of the selected part of each log to the endpoint `name`, or write them to the file `name`.

    Raises:
        CommandFailed: the target cannot be used, or does not accept the spans.
        ModuleNotFoundError: OpenTelemetry is not installed.
    """
    require("kvledger export --otlp", *OTLP)
    from kvledger.adapters.tools.export.otlp_targets import SpanEndpoint, SpanFile, is_endpoint  # noqa: PLC0415 - half a second

    path = None if name == "-" else Path(name)
    with contextlib.ExitStack() as stack:
        target: SpanTarget
        if is_endpoint(name):
            target = stack.enter_context(contextlib.closing(SpanEndpoint(name)))
        elif output.is_json and path is None:
            raise CommandFailed(
                "--json prints a list of the written files to stdout, so the spans need a file; give --otlp FILE"
            )
        else:
            target = SpanFile(name, stack.enter_context(open_target(path, overwrite=force)))
        logs = list(selected(reading, output, core=deciding.core()))
        num_spans = sum(_export(log, selection, target, output) for log, selection in logs)
    if output.is_json:
        output.record("export", {"target": target.name, "num_spans": num_spans, "num_logs": len(logs)})
    elif path is not None:
        verb = "sent to" if isinstance(target, SpanEndpoint) else "wrote"
        output.remark(f"{verb} {target.name}: {plural(num_spans, 'span')} of {plural(len(logs), 'log')}")
    return coverage_of_all(logs, output)


def coverage_of_all(logs: Sequence[tuple[StoredLog, Selection]], output: Output) -> ExitCode:
    """Report each log whose selected part could not be checked; return the most severe exit code."""
    return gravest(
        output.coverage_of(log, selection, is_found=lives_in(log, selection, output)) for log, selection in logs
    )


def _export(log: StoredLog, selection: Selection, target: SpanTarget, output: Output) -> int:
    """Export one log, and return the number of its spans."""
    from kvledger.adapters.tools.export.otlp import LogSpans  # noqa: PLC0415
    from kvledger.adapters.tools.export.otlp_targets import Batches  # noqa: PLC0415

    opened_at = log.header.get("opened_at_unix_ns")
    if not isinstance(opened_at, int):
        raise CommandFailed(
            f"{log.path}: its header has no opening time, but spans need one; use --perfetto, which needs none"
        )
    batches = Batches(target)
    model = begin_model(log)
    sums = RequestSums(model, selection)
    spans = LogSpans(log, opened_at, sums, batches.add)
    with output.progress(log, "exporting"):
        read = read_trace(log, model, selection, spans, output.remark, visitors=[sums])
        spans.end(read.now_ns)
        batches.flush()
    return batches.num_spans
