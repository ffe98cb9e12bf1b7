"""`kvledger ls`: list the logs of a directory, the newest first, and how each ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from kvledger.adapters.tools.cli.options import DEFAULT_LOG
from kvledger.adapters.tools.cli.output import Written
from kvledger.adapters.tools.exit_codes import ExitCode, gravest
from kvledger.adapters.tools.logs.clock import iso
from kvledger.adapters.tools.logs.glance import Glance, glance_at
from kvledger.adapters.tools.logs.sources import find_logs
from kvledger.adapters.units import size
from kvledger.storage.events import HowEnded

_COLUMNS = {
    "log": "left",
    "by": "left",
    "model": "left",
    "opened (UTC)": "left",
    "last event": "left",
    "events": "right",
    "requests": "right",
    "size": "right",
    "ended": "left",
}
_ENDS = {
    HowEnded.CLOSED: "closed",
    HowEnded.CUT_OFF: "cut off",
    HowEnded.OPEN: "open",
    HowEnded.UNKNOWN: "not known",
}


def run(
    log: Annotated[Path, Parameter(env_var=DEFAULT_LOG, help="a directory of logs, such as your log_dir, or one log")],
    *,
    output: Written,
) -> ExitCode:
    """List the logs, and return the most severe exit code of all logs."""
    glances = [glance_at(path) for path in reversed(find_logs(log))]
    if output.is_json:
        for glance in glances:
            fields = attrs.asdict(glance, recurse=False, filter=attrs.filters.exclude("ending"))
            missing = None if glance.ending is None else glance.ending.missing
            of_end = {"end": _end_of(glance).value, "missing": None if missing is None else attrs.asdict(missing)}
            detail = "" if glance.ending is None else glance.ending.detail
            output.record("log_listed", {**fields, "path": str(glance.path), **of_end, "detail": detail})
    else:
        hidden = [name for name, said in (("model", "model"),) if not any(getattr(each, said) for each in glances)]
        output.table(_COLUMNS, [_row(glance) for glance in glances], hidden=hidden)
    for glance in glances:
        if glance.unreadable:
            output.remark(f"{glance.path}: {glance.unreadable}")
        elif glance.nothing_checked:
            output.remark(f"{glance.path}: nothing could be checked: {glance.nothing_checked}")
    return gravest(map(_exit_code, glances))


def _exit_code(glance: Glance) -> ExitCode:
    if glance.unreadable:
        return ExitCode.DAMAGED
    return ExitCode.NOTHING_CHECKED if glance.nothing_checked else ExitCode.SOUND


def _end_of(glance: Glance) -> HowEnded:
    return HowEnded.UNKNOWN if glance.ending is None else glance.ending.how


def ended(glance: Glance) -> str:
    """Return in a few words how a log ended, and whether it is damaged or cannot be checked."""
    if glance.unreadable:
        return "unreadable"
    of_end = [] if glance.ending is None or glance.ending.missing is None else ["end missing"]
    how = _ENDS[_end_of(glance)]
    if glance.ending is not None and glance.ending.how is HowEnded.OPEN and glance.ending.detail:
        how += ", events wait for the disk"
    nothing = [glance.nothing_checked] if glance.nothing_checked else []
    return ", ".join([*nothing, *(["damaged"] if glance.damage else []), *of_end, how])


def _row(glance: Glance) -> list[str]:
    opened, last = (
        "" if at is None else iso(at)[:19].replace("T", " ")
        for at in (glance.opened_at_unix_ns, glance.ended_at_unix_ns)
    )
    return [
        glance.path.name,
        glance.written_by,
        glance.model,
        opened,
        last[11:] if last[:10] == opened[:10] else last,
        "" if glance.unreadable else str(glance.num_events),
        "" if glance.num_requests is None else str(glance.num_requests),
        size(glance.num_bytes),
        ended(glance),
    ]
