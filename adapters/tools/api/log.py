"""The function `open_log`, and the classes of its results: `Log` and `Request`.

You can read a log while an engine writes it. Reading does not change the log. To find requests in a large log, the API
builds an index in the user's cache folder, like `kvledger why`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from kvledger.adapters.tools.api import reading
from kvledger.adapters.tools.api.errors import LogUnreadable, RequestNotFound, public_errors
from kvledger.adapters.tools.api.reading import Silence, Source
from kvledger.adapters.tools.api.records import Copy, Entry, Eviction, Life, Lookup, Reason, Start, Step
from kvledger.adapters.tools.api.report import Report, Violation, verified
from kvledger.adapters.tools.logs.finding import one_request, request_ids
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.sources import EngineStart, engine_starts, find_logs
from kvledger.adapters.tools.tables.arrow import ArrowTable, data_frame
from kvledger.adapters.tools.tables.rows import read_rows
from kvledger.adapters.tools.tables.schema import table_named
from kvledger.adapters.units import plural
from kvledger.storage.extras import require

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


@attrs.frozen
class Request:
    """One request id in one engine start, with all of its lives."""

    start: str
    request_id: str
    _source: Source = attrs.field(repr=False, eq=False)
    _known_lives: tuple[Life, ...] | None = attrs.field(default=None, repr=False, eq=False)

    @cached_property
    def lives(self) -> tuple[Life, ...]:
        """The lives of this id, in the order of arrival. The first access may read the log."""
        if self._known_lives is not None:
            return self._known_lives
        return reading.lives(self._source).get(self.request_id, ())

    def why(self) -> Iterator[Reason]:
        """Yield the reasons why vLLM had to compute tokens of this request, or compute them again.

        A life that was never admitted has the reasons of its last lookup. If a life has more than 512 admissions, only
        the first 511 and the last one have reasons. The same limit applies to steps that computed tokens again.
        `docs/reasons.md` explains the codes.

        Raises:
            LogUnreadable: no copy of the log's header is intact, so the sizes of blocks and chunks are unknown.
        """
        return reading.reasons(self._source, self.request_id)


@attrs.frozen
class Log:
    """One log, or all logs of a directory. Each method reads the logs again, beginning with the oldest engine start.

    From a damaged log, methods return what can be read. `verify` reports the damage.
    """

    path: Path
    starts: tuple[Start, ...] = attrs.field(repr=lambda starts: f"({', '.join(start.name for start in starts)})")
    """The engine starts, the oldest first."""
    unreadable: tuple[LogUnreadable, ...]
    """An error for each log that could not be opened and is left out."""
    _sources: tuple[Source, ...] = attrs.field(repr=False)

    @property
    def header(self) -> Mapping[str, object]:
        """Header of the newest start's log, key → value. `starts` has the headers of the other starts."""
        return self.starts[-1].header

    def entries(self) -> Iterator[Entry]:
        """Yield every event: for each start the events of the scheduler's log, then the events of the workers' logs."""
        return itertools.chain.from_iterable(source.entries() for source in self._sources)

    def requests(self) -> Iterator[Request]:
        """Yield every request in the order of first arrival. Keeps all lives of one engine start in memory."""
        for source in self._schedulers():
            for request_id, lives in reading.lives(source).items():
                yield Request(source.start, request_id, source, lives)

    def request(self, request_id: str) -> Request:
        """Return the request with this id. A part of the id is enough if the part identifies one request.

        Raises:
            RequestNotFound: no request id equals or contains the text.
            RequestAmbiguous: several request ids contain the text, or several logs have the id.
        """
        known = []
        sources = {}
        for source in self._schedulers():
            log = source.opened()
            with public_errors(source.path):
                known.append((log, request_ids(log, request_id, Silence())))
            sources[log.path] = source
        try:
            with public_errors(self.path):
                log, found = one_request(known, request_id)
        except RequestNotFound as error:
            if self.unreadable:
                num_unread = plural(len(self.unreadable), "log")
                raise RequestNotFound(f"{error}; {num_unread} could not be read, see `unreadable`") from None
            raise
        source = sources[log.path]
        return Request(source.start, found, source)

    def lookups(self) -> Iterator[Lookup]:
        """Yield every answer to a lookup."""
        return reading.lookups(self._scheduler_entries())

    def copies(self) -> Iterator[Copy]:
        """Yield the loads and saves of each start, in the order in which they were settled, then the unsettled ones."""
        return itertools.chain.from_iterable(reading.copies(source.entries()) for source in self._schedulers())

    def steps(self) -> Iterator[Step]:
        """Yield every engine step."""
        return reading.steps(self._scheduler_entries())

    def evictions(self) -> Iterator[Eviction]:
        """Yield every eviction of chunks from the host pool."""
        return reading.evictions(self._scheduler_entries())

    def violations(self) -> Iterator[Violation]:
        """Yield the breaches of rules that `verify` finds, at most 1,000 for each log."""
        return itertools.chain.from_iterable(verified(source).violations for source in self._sources)

    def to_arrow(self, name: str) -> pa.Table:
        """Return a table with the rows of all logs. Needs `pip install 'kvledger[lake]'`.

        Args:
            name: `requests`, `lookups`, `copies`, `steps`, `evictions`, `reasons` or `violations`. `docs/tables.md`
                describes the columns. For `violations`, this method verifies the logs.

        Raises:
            ValueError: there is no table with this name.
            ModuleNotFoundError: pyarrow is not installed.
            LogUnreadable: no copy of a log's header is intact.
        """
        require("Log.to_arrow", "pyarrow")
        table = table_named(name)
        rows = ArrowTable(table)
        for source in self._sources:
            log = source.opened()
            with public_errors(source.path):
                read_rows(log, Selection(), source.start, {name: rows.add}, Silence().remark)
        return rows.result()

    def to_pandas(self, name: str) -> pd.DataFrame:
        """Return the table of `to_arrow` as a DataFrame. Columns have nullable types, so that integers stay exact.

        Raises:
            ValueError: there is no table with this name.
            ModuleNotFoundError: pyarrow or pandas is not installed. kvledger's extras do not install pandas.
            LogUnreadable: no copy of a log's header is intact.
        """
        require("Log.to_pandas", "pyarrow")
        return data_frame(self.to_arrow(name))

    def verify(self) -> Report:
        """Check whether each log keeps every rule, and whether today's code makes the decisions in the log."""
        return Report(tuple(verified(source) for source in self._sources), self.unreadable)

    def _schedulers(self) -> Iterable[Source]:
        """Return the logs of schedulers. Only schedulers' logs have requests."""
        return (source for source in self._sources if source.rank is None)

    def _scheduler_entries(self) -> Iterator[Entry]:
        return itertools.chain.from_iterable(source.entries() for source in self._schedulers())


def open_log(path: str | os.PathLike[str], *, lenient: bool = False) -> Log:
    """Open a log, or all logs of a directory such as `log_dir`, for reading.

    Args:
        path: a log's folder, one of its segments (`*.kvlog`), or a folder of logs.
        lenient: skip events of a newer kvledger instead of refusing the log.

    Raises:
        LogNotFound: the path does not exist, or contains no log.
        LogUnreadable: no log at the path can be read.
    """
    asked = Path(path)
    with public_errors(asked):
        found = engine_starts(find_logs(asked, on_remark=Silence().remark))
    starts: list[Start] = []
    sources: list[Source] = []
    unreadable: list[LogUnreadable] = []
    for engine_start in found:
        of_start, failed = _opened(engine_start, lenient=lenient)
        unreadable += failed
        if of_start:
            starts.append(_start(engine_start, of_start))
            sources += of_start
    if not sources:
        raise unreadable[0]
    return Log(asked, tuple(starts), tuple(unreadable), tuple(sources))


def _opened(start: EngineStart, *, lenient: bool) -> tuple[dict[Source, Mapping[str, object]], list[LogUnreadable]]:
    """Return log → header for a start, the scheduler's first, and an error for each log that cannot be opened."""
    opened: dict[Source, Mapping[str, object]] = {}
    failed = []
    for path in (*([] if start.scheduler is None else [start.scheduler]), *start.workers):
        source = Source(path, start.main.name, None, lenient)
        try:
            log = source.opened()
        except LogUnreadable as error:
            failed.append(error)
        else:
            opened[attrs.evolve(source, rank=log.worker_rank)] = MappingProxyType(dict(log.header))
    return opened, failed


def _start(start: EngineStart, opened: Mapping[Source, Mapping[str, object]]) -> Start:
    main = next((source for source in opened if source.path == start.main), next(iter(opened)))
    header = opened[main]
    opened_at = header.get("opened_at_unix_ns")
    return Start(
        name=start.main.name,
        path=main.path,
        worker_paths=tuple(source.path for source in opened if source.rank is not None),
        header=header,
        opened_at_unix_ns=opened_at if isinstance(opened_at, int) else None,
    )
