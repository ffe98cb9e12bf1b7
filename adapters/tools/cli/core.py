"""`kvledger core`: print states, handlers, extensions, rules and transitions of this installation or of a log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvledger.adapters.core import installed_extensions
from kvledger.adapters.tools.cli.options import NOTHING_CHOSEN, Deciding, value
from kvledger.adapters.tools.cli.output import Output, Written
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.tools.logs.log import StoredLog, open_log
from kvledger.adapters.tools.logs.sources import find_logs, one_of
from kvledger.adapters.tools.logs.streams import StreamUrl, log_argument
from kvledger.lifecycle import Core
from kvledger.lifecycle.events import ExtensionStopped


def run(
    log: Annotated[Path | StreamUrl | None, value(log_argument, help="a log; default: show this installation")] = None,
    *,
    mirror: Annotated[
        Path | None, Parameter(metavar="DIR", help="directory for the local copies of the logs of a NATS stream")
    ] = None,
    deciding: Deciding = NOTHING_CHOSEN,
    output: Written,
) -> ExitCode:
    """Print one core."""
    core = deciding.core(installed=log is None)
    stopped: dict[str, int] = {}
    handlers = handlers_in(core.handler_fingerprint())
    if log is not None:
        stored = open_log(one_of(find_logs(log, mirror), log), core)
        core, stopped = stored.core, _stopped(stored, output)
        handlers = handlers_in(str(stored.header.get("handler_fingerprint", core.handler_fingerprint())))
    if output.is_json:
        output.record("core", {**described(core), "handlers": handlers, "stopped": stopped})
        return ExitCode.SOUND
    output.field("fingerprint", core.fingerprint())
    here = handlers_in(core.handler_fingerprint())
    for state in core.handlers:
        subs = sorted({dest for _, dest in _sub_states(core) if dest.startswith(f"{state}.")})
        written, read = handlers.get(state, []), here[state]
        other = (
            [] if written == read else [f"read here with {' and '.join(read)}; choose other handlers with --handlers"]
        )
        output.field(str(state), ", ".join((*written, *other, *(f"sub-state {sub}" for sub in subs))))
    output.field("events", ", ".join(core.events))
    output.field("projections", ", ".join(spec.name for spec in core.projections))
    output.field("rules", ", ".join(core.rules))
    for extension in core.extensions:
        declared = extension.declaration()
        where = "not installed here" if extension in core.absent else declared.made_by
        since = f", stopped at event {stopped[declared.name]}" if declared.name in stopped else ""
        output.field("extension", f"{declared.name} {declared.version}, {where}{since}")
        output.field("its events", ", ".join(declared.events) or "none")
        output.field("its rules", ", ".join(declared.rules) or "none")
        for source, trigger, dest in declared.rows:
            output.field("its row", f"{source} --{trigger}--> {dest}")
    for region in (*core.regions, *core.job_regions):
        for source, trigger, dest in region.flat():
            if source is not dest:
                output.field(region.name, f"{source} --{trigger}--> {dest}")
    for what, of, dest in core.gating.rows():
        output.field(what, f"{of}: {dest}")
    return ExitCode.SOUND


def described(core: Core) -> dict[str, object]:
    """Return name → part of the core, as plain values for JSON."""
    return {
        "fingerprint": core.fingerprint(),
        "events": {event_id: event.version for event_id, event in core.events.items()},
        "projections": [spec.name for spec in core.projections],
        "rules": list(core.rules),
        "extensions": [extension.declaration() for extension in core.extensions],
        "absent": [extension.name for extension in core.absent],
        "installed": list(installed_extensions()),
        "regions": {
            region.name: [[str(source), trigger, str(dest)] for source, trigger, dest in region.flat()]
            for region in (*core.regions, *core.job_regions)
        },
        "gating": [list(row) for row in core.gating.rows()],
    }


def _stopped(log: StoredLog, output: Output) -> dict[str, int]:
    """Return extension → sequence number of the event that stopped it. Only stopped extensions are included."""
    if not log.core.extensions:
        return {}
    with output.progress(log, "looking for stopped extensions"):
        return {event.extension: number for number, event in log.events() if isinstance(event, ExtensionStopped)}


def _sub_states(core: Core) -> list[tuple[str, str]]:
    return [(extension.name, row[2]) for extension in core.extensions for row in extension.declaration().rows]


def handlers_in(fingerprint: str) -> dict[str, list[str]]:
    """Return state → its handlers as "module:Class", in the order in which they are called.

    Args:
        fingerprint: a handler fingerprint of a core or of a log's header.
    """
    states = (of_state.partition("=") for of_state in fingerprint.split())
    return {state: classes.split("+") for state, _, classes in states}
