"""`kvledger replay`: fold a log to a moment, show the state, and say where today's code would decide otherwise."""

from __future__ import annotations

import argparse

from kvledger.adapters.tools.cli.difference import compare
from kvledger.adapters.tools.cli.finding import lives_in, selected_one
from kvledger.adapters.tools.cli.options import add_handlers, add_request
from kvledger.adapters.tools.cli.output import Output, show_divergences
from kvledger.adapters.tools.cli.state import show_state
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.tools.logs.coverage import checked
from kvledger.adapters.tools.logs.log import StoredLog, open_log
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.sources import find_logs, one_of
from kvledger.adapters.tools.logs.streams import log_argument
from kvledger.lifecycle.audit import Audit


def configure(parser: argparse.ArgumentParser) -> None:
    """What only this command has."""
    add_request(parser)
    parser.add_argument(
        "--diff",
        metavar="OTHER",
        type=log_argument,
        help="find the first event in which another log differs, times left out",
    )
    add_handlers(parser)


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Replay one log."""
    log, window = selected_one(arguments, output)
    if arguments.diff is not None:
        other = one_of(find_logs(arguments.diff, arguments.mirror), arguments.diff)
        return compare(log, open_log(other, log.core, lenient=arguments.lenient), window, output)
    audit = Audit(log.core, log.configuration, checkers=(), start=log.start())
    totals = log.totals(audit.projections)
    with output.progress(log, "replaying"):
        audit.run_frames(log.trusted_frames(), at=window.last_sequence)
    last = audit.last_sequence
    if not audit.num_events:
        return _nothing(log, window, output)
    if window.last_sequence is not None and last < window.last_sequence:
        output.remark(f"the log can be replayed up to event {last}, not to {window.last_sequence}")
    show_state(output, audit.projections, totals, last, window.request_id)
    output.damage_of(log)
    _remark_beginning(log, output)
    show_divergences(output, audit.judgement())
    if log.damage:
        return ExitCode.DAMAGED
    if not audit.is_sound:
        return ExitCode.DIVERGED
    return output.coverage_of(log, window, is_found=lives_in(log, window, output))


def _nothing(log: StoredLog, window: Selection, output: Output) -> ExitCode:
    """Of a log no event of which can be folded, or none up to the moment that was asked for."""
    output.damage_of(log)
    for remark in (*log.start_remarks, *log.other_code_remarks):
        output.remark(remark)
    reason = checked(log, window, None, is_present=True).why_nothing or "no event was replayed"
    output.nothing(log.path, f"{log.path}: nothing could be replayed: {reason}")
    return ExitCode.DAMAGED if log.damage else ExitCode.NOTHING_CHECKED


def _remark_beginning(log: StoredLog, output: Output) -> None:
    if log.start_sequence:
        output.remark(f"replayed from event {log.start_sequence + 1} on, from a snapshot")
    elif log.begins_late:
        output.remark(f"the log begins with event {log.first_sequence}; without those before nothing can be replayed")
    for remark in (*log.start_remarks, *log.other_code_remarks):
        output.remark(remark)
