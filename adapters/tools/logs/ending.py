"""How a log ended, in words."""

from __future__ import annotations

import time

from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.under_way import UnderWay
from kvledger.adapters.units import duration, milliseconds, plural
from kvledger.storage.events import HowEnded, LogEnding

_WORDS = {
    HowEnded.CLOSED: "closed",
    HowEnded.CUT_OFF: "cut off: the process ended without closing the log",
    HowEnded.OPEN: "open: a process is writing the log",
    HowEnded.UNKNOWN: "not known",
}
_SOUND = {
    HowEnded.CLOSED: "sound",
    HowEnded.CUT_OFF: "sound up to where it was cut off",
    HowEnded.OPEN: "sound so far",
    HowEnded.UNKNOWN: "sound as far as it was read",
}


def ending_text(ending: LogEnding, num_open: int | None) -> str:
    """Describe in one line how a log ended. `num_open`: requests that had not finished; None: unknown."""
    details = "" if not ending.detail else f" ({ending.detail})"
    requests = (
        "no request was open"
        if not num_open
        else f"{plural(num_open, 'request')} {'was' if num_open == 1 else 'were'} open"
    )
    text = f"{_WORDS[ending.how]}{details}" + ("" if num_open is None else f"; {requests}")
    missing = ending.missing
    return text if missing is None else f"missing: {missing.kind} {missing.segment}: {missing.detail}. {text}"


def sound_text(ending: LogEnding) -> str:
    """Return the verdict for a log in which nothing is wrong. The verdict depends on how the log ended."""
    return "sound, but its end is missing" if ending.missing is not None else _SOUND[ending.how]


def under_way_text(call: UnderWay, log: StoredLog) -> str:
    """Describe an unfinished call and when it began. If the log is open, also say how long ago it began."""
    text = f"{call.what} since event {call.sequence} ({milliseconds(call.time_ns)} ms)"
    opened_ns = log.header.get("opened_at_unix_ns")
    if log.ending.how is not HowEnded.OPEN or not isinstance(opened_ns, int):
        return f"{text}; the log does not contain the end of this call"
    return f"{text}, {duration(max(0, time.time_ns() - opened_ns - call.time_ns))} ago"
