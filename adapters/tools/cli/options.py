"""Arguments that several commands share: LOG, REQUEST, the selection, and the handlers and extensions for a replay.

A selection limits only what a command shows. The command reads the log from its beginning, because the state at a
moment depends on all earlier events.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import attrs
from cyclopts import Parameter, Token

from kvledger.adapters.core import composed_core, installed_extensions
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.tools.logs.index import index_for
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.streams import StreamUrl, log_argument
from kvledger.adapters.units import read_duration_ns, read_size
from kvledger.lifecycle import ConfigurationError, Core, SequencedEvent

DEFAULT_LOG: Final = "KVLEDGER_LOG"
_NS_PER_S: Final = 1_000_000_000
_NS_PER_DAY: Final = 86_400 * _NS_PER_S
_EVERY_LOG: Final = (
    "a log directory, one *.kvlog file, a directory of logs (to read all of them), or nats://host/STREAM[/LOG_ID]"
)
_MOMENT: Final = (
    "an event number, a time since the log was opened (1.5s, 1h30m), a date and time, or a time of day. A time of day "
    "means its first occurrence in the log. A time without a UTC offset is in UTC"
)


def value(read: Callable[[str], Any], metavar: str | None = None, **about: Any) -> Parameter:  # noqa: ANN401 -- as Parameter
    """Return the parameter of an argument. `read` parses the argument's text. It raises `ValueError` for wrong text."""

    def convert(_type: object, tokens: Sequence[Token]) -> Any:  # noqa: ANN401
        return read(",".join(token.value for token in tokens))  # several tokens only if the option is repeated

    return Parameter(converter=convert, metavar=metavar, n_tokens=1, accepts_keys=False, **about)


@attrs.frozen
class Moment:
    """A point in a log: an event number, a time since the log was opened, a date and time, or a time of day (UTC)."""

    kind: Literal["event", "since_opening_ns", "unix_ns", "of_day_ns"]
    value: int
    text: str

    @property
    def last_ns(self) -> int:
        """The moment's last nanosecond. 10:30:00.101 means the whole millisecond, 10:30:00 the whole second."""
        if self.kind not in {"unix_ns", "of_day_ns"}:
            return self.value
        _, point, fraction = self.text.partition(".")
        num_digits = sum(1 for _ in itertools.takewhile(str.isdecimal, fraction))
        return self.value + (10 ** max(0, 9 - max(3, num_digits)) if point else _NS_PER_S) - 1


def moment(text: str) -> Moment:
    """Parse a moment: `90211` (an event), `1.5s`, `1h30m`, `2026-01-05T10:30:00Z` or `10:30:00.101`.

    Raises:
        ValueError: the text is not a moment.
    """
    if text.isdecimal() and int(text) > 0:
        return Moment("event", int(text), text)
    value = read_duration_ns(text)
    if value is not None:
        return Moment("since_opening_ns", value, text)
    is_of_day = text[2:3] == ":"
    try:
        at = dt.datetime.fromisoformat(f"1970-01-02T{text}" if is_of_day else text)
    except ValueError:
        message = (
            f"{text!r} is not a moment; give an event number (90211), a time since the log was opened (1.5s, 1h30m), "
            "a date and time (2026-01-05T10:30:00Z) or a time of day (10:30:00.101)"
        )
        raise ValueError(message) from None
    if at.tzinfo is None:
        at = at.replace(tzinfo=dt.UTC)
    unix_ns = (at - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1) * 1000
    return Moment("of_day_ns", unix_ns % _NS_PER_DAY, text) if is_of_day else Moment("unix_ns", unix_ns, text)


def count(text: str) -> int:
    """Parse a whole number from 0 on. Raises `ValueError`."""
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a whole number; give 0 or more")
    return int(text)


def positive(text: str) -> int:
    """Parse a whole number from 1 on. Raises `ValueError`."""
    number = count(text)
    if not number:
        raise ValueError("0 is too few; give 1 or more")
    return number


def seconds(text: str) -> float:
    """Parse a duration into seconds. Raises `ValueError`."""
    found = read_duration_ns(text)
    if found is None:
        raise ValueError(f"{text!r} is not a duration; give numbers with ms, s, m, h, d or w, as in 30d or 1h30m")
    return found / _NS_PER_S


def num_bytes(text: str) -> int:
    """Parse a size into bytes. Raises `ValueError`."""
    found = read_size(text)
    if found is None:
        raise ValueError(
            f"{text!r} is not a size; give bytes, or a number with K, M, G, T (powers of 1000) or KiB, MiB, GiB, TiB"
        )
    return found


def json_object(text: str) -> dict[str, object]:
    """Parse a JSON object.

    Raises:
        ValueError: the text is not a JSON object, or has NaN or infinity. The error does not quote the whole text,
            which may be secret.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error}); in a shell, put the JSON in single quotes (')") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")  # noqa: TRY004 -- wrong usage
    return value


def _finite(text: str) -> float:
    """Parse a finite number. Python's JSON parser alone would accept NaN, infinity and numbers that are too large.

    Raises:
        ValueError: the number is not finite.
    """
    number = float(text)
    if not math.isfinite(number):
        message = f"{text} is not a finite number"
        raise ValueError(message)
    return number


Log = Annotated[Path | StreamUrl, value(log_argument, env_var=DEFAULT_LOG, help=_EVERY_LOG)]


@Parameter(name="*")
@attrs.frozen
class Reading:
    """The log to read, and the selected part of it."""

    log: Log
    request: Annotated[str | None, Parameter(help="a request id, or a part that only one request id contains")] = None
    newest: Annotated[
        bool,
        Parameter(
            help="in a directory of logs, read only the scheduler's log of the newest engine start; `verify` also "
            "reads the worker logs of this start"
        ),
    ] = attrs.field(default=False, kw_only=True)
    mirror: Annotated[
        Path | None, Parameter(metavar="DIR", help="directory for the local copies of the logs of a NATS stream")
    ] = attrs.field(default=None, kw_only=True)
    since: Annotated[Moment | None, value(moment, "MOMENT", help=f"leave out all events before MOMENT: {_MOMENT}")] = (
        attrs.field(default=None, kw_only=True)
    )
    until: Annotated[Moment | None, value(moment, "MOMENT", help="leave out all events after MOMENT")] = attrs.field(
        default=None, kw_only=True
    )
    lenient: Annotated[
        bool, Parameter(help="skip and count events that only a newer kvledger can read, instead of refusing the log")
    ] = attrs.field(default=False, kw_only=True)
    trust_snapshots: Annotated[
        bool,
        Parameter(
            help="if the beginning of a log is missing, begin at a snapshot, even if another version of the code made "
            "the snapshot"
        ),
    ] = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """If `KVLEDGER_LOG` is set and the only argument is not a path, use this argument as the REQUEST."""
        default = os.environ.get(DEFAULT_LOG)
        if default and self.request is None and may_be_request(self.log):
            object.__setattr__(self, "request", str(self.log))
            object.__setattr__(self, "log", log_argument(default))


def may_be_request(log: Path | StreamUrl) -> bool:
    """Whether a LOG argument may be meant as a REQUEST, because it contains no slash and no file has this name."""
    return isinstance(log, Path) and os.sep not in str(log) and not os.path.lexists(log)


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Extending:
    """The extensions with which a log is read."""

    extensions: Annotated[
        Sequence[str],
        Parameter(
            metavar="MODULE:CLASS",
            help="read the log with this extension, even if the log was written without it; repeat the option for more "
            "extensions",
        ),
    ] = ()

    def core(self, *, installed: bool = False) -> Core:
        """Return the core that reads logs and makes decisions. With `installed`, it has the installed extensions, too.

        Raises:
            CommandFailed: a class cannot be imported or used.
        """
        try:
            extensions = (*(installed_extensions() if installed else ()), *self.extensions)
            return composed_core(self._handlers(), extensions)
        except ConfigurationError as error:
            raise CommandFailed(f"--{error}") from error

    def _handlers(self) -> Sequence[str]:
        return ()


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Deciding(Extending):
    """The code that reads a log and makes the decisions of this log again."""

    handlers: Annotated[
        Sequence[str],
        Parameter(
            metavar="MODULE:CLASS",
            help="use this handler class instead of kvledger's own class for the same state. The class is imported "
            "from PYTHONPATH. Repeat the option for more handlers",
        ),
    ] = ()

    def _handlers(self) -> Sequence[str]:
        return self.handlers


NO_EXTENSIONS: Final = Extending()
NOTHING_CHOSEN: Final = Deciding()


def selection_of(reading: Reading, log: StoredLog, output: Output, request_id: str | None = None) -> Selection:
    """Return the part of `log` that the options select. `request_id` is the whole id of the request.

    Raises:
        CommandFailed: the options select no event, or they need the log's opening time and the header has none.
    """
    since, until = reading.since, reading.until
    if since is None and until is None:
        return Selection(request_id=request_id)
    first = since.value if since is not None and since.kind == "event" else 1
    last = until.value if until is not None and until.kind == "event" else None
    since_ns, until_ns = _since_opening_ns(since, log), _since_opening_ns(until, log, is_end=True)
    with contextlib.ExitStack() as stack:
        index = None if since_ns is None and until_ns is None else index_for(log, output)
        if index is not None:
            stack.enter_context(contextlib.closing(index))
        if since_ns is not None:
            found = _first_from(log.events() if index is None else index.events_around(since_ns), since_ns)
            first, last = (first, 0) if found is None else (found, last)
        if until_ns is not None and last is None:
            last = _last_until(log.events() if index is None else index.events_around(until_ns), until_ns)
    if last is not None and last < first:
        asked = " ".join(f"--{name} {value.text}" for name, value in (("since", since), ("until", until)) if value)
        # If --until is before --since, no log has an event between them.
        is_reversed = since is not None and until is not None and since.kind == until.kind and until.value < since.value
        message = f"{log.path}: {asked} selects no event"
        raise CommandFailed(message, ExitCode.USAGE if is_reversed else ExitCode.NOTHING_CHECKED)
    return Selection(first, last, request_id)


def _since_opening_ns(asked: Moment | None, log: StoredLog, *, is_end: bool = False) -> int | None:
    """Return the time from the log's opening to the moment, in nanoseconds.

    A moment such as 10:30:00 lasts a second. The result is the time of its first nanosecond, or, with `is_end`,
    the time of its last nanosecond. None: no moment was asked for, or the moment is an event number.
    """
    if asked is None or asked.kind == "event":
        return None
    if asked.kind == "since_opening_ns":
        return asked.value
    opened_at = log.header.get("opened_at_unix_ns")
    if not isinstance(opened_at, int):
        message = (
            f"{log.path}: its header has no opening time; instead of {asked.text}, give a time since the log was "
            "opened, such as 90s"
        )
        raise CommandFailed(message)
    at_ns = (asked.last_ns if is_end else asked.value) - opened_at
    if asked.kind == "unix_ns":
        return at_ns
    num_days = -(-(opened_at - asked.last_ns) // _NS_PER_DAY)  # until the time of day first occurs in the log
    return at_ns + num_days * _NS_PER_DAY


def _first_from(events: Iterator[SequencedEvent], time_ns: int) -> int | None:
    """Return the sequence number of the first event at or after a time. None if there is no such event."""
    for number, event in events:
        at_ns = getattr(event, "time_ns", None)
        if at_ns is not None and at_ns >= time_ns:
            return number
    return None


def _last_until(events: Iterator[SequencedEvent], time_ns: int) -> int | None:
    """Return the sequence number of the event directly before the first event that is later than `time_ns`.

    None if no event is later than `time_ns`. Only observations are compared, because decisions have no time.
    """
    for number, event in events:
        at_ns = getattr(event, "time_ns", None)
        if at_ns is not None and at_ns > time_ns:
            return number - 1
    return None
