"""Makes the rows of the tables from a log, in one reading for all tables except `violations`.

Lives, states and copies come from `export/trace.py`, reasons from `Accounts`. This module folds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvledger.adapters.tools.export.reading import read_trace
from kvledger.adapters.tools.export.spans import CopySpan, LifeSpan, Lookup, Sink, Span, Step
from kvledger.adapters.tools.logs.clock import Clock
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.reading import begin_model
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.verification import Verification
from kvledger.adapters.tools.reasons import Accounts, RequestHistory, Sums
from kvledger.adapters.tools.tables.schema import TABLES, VIOLATIONS, EvictionRow, ReasonRow, ViolationRow
from kvledger.lifecycle import events as e
from kvledger.lifecycle import on
from kvledger.lifecycle.reader import Model, Visitor

AddRow = Callable[[Sequence[object]], object]
"""Called with the cells of one row, in the order of the table's columns."""


class Rows:
    """Makes rows from the records of one log.

    Args:
        start: name of the engine start.
        clock: the log's clock.
        add: table → function that is called with each row of this table. Tables that are not in `add` are left out.
    """

    def __init__(self, start: str, clock: Clock, add: Mapping[str, AddRow]) -> None:
        self._start = start
        self._clock = clock
        self._add = add
        self._cells = {name: TABLES[name].cells() for name in add}

    def __contains__(self, table: str) -> bool:
        """Whether the rows of this table are wanted."""
        return table in self._add

    def add(self, table: str, record: object, time_ns: int | None, sequence: int | None) -> None:
        """Add a row to a table, if the table is wanted."""
        add = self._add.get(table)
        if add is not None:
            unix_ns = self._clock.unix_ns(time_ns)
            time_us = None if unix_ns is None else unix_ns // 1000
            add((self._start, time_us, time_ns, sequence, *self._cells[table](record)))


class TraceRows(Sink):
    """Makes the rows of the tables `requests`, `copies`, `lookups` and `steps` from a trace."""

    needs_memory_gauges = False
    needs_recoveries = False

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def ended(self, span: Span) -> None:
        """Add the row of a request or a copy that has ended, or that is open at the end of the log."""
        if isinstance(span, LifeSpan):
            self._rows.add("requests", span, span.since_ns, span.sequence)
        elif isinstance(span, CopySpan):
            self._rows.add("copies", span, span.since_ns, span.sequence)

    def looked_up(self, lookup: Lookup) -> None:
        """Add the row of a lookup that was answered or deferred."""
        self._rows.add("lookups", lookup, lookup.time_ns, lookup.sequence)

    def stepped(self, step: Step) -> None:
        """Add the row of a step. All decisions that the step caused have been read."""
        self._rows.add("steps", step, step.time_ns, step.sequence)


class _Evictions(Visitor[Model]):
    """Rows of the selected evictions."""

    def __init__(self, model: Model, selection: Selection, rows: Rows) -> None:
        super().__init__(model)
        self._selection = selection
        self._rows = rows

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        sequence, time_ns = self.moment.sequence, self.moment.time_ns
        if not self._selection.concerns(sequence, event.request_id):
            return
        life = self.model.lives.of(event.ordinal)
        row = EvictionRow(
            sequence=sequence,
            time_ns=time_ns,
            request_id=event.request_id,
            ordinal=None if life is None or not life.has_known_beginning else life.ordinal,
            generation=event.generation,
            num_chunks=len(event.keys),
            cause=event.cause,
        )
        self._rows.add("evictions", row, time_ns, sequence)


class _Reasons(Accounts):
    """Makes rows with the tokens by reason, for each life that ends in the selected part or is open at the part's end.

    A life's rows count the tokens of the whole life, as far as the log was read.
    """

    def __init__(self, model: Model, selection: Selection, rows: Rows) -> None:
        self._selection = selection
        self._rows = rows
        self._listed: Counter[tuple[str, str]] = Counter()
        """(kind, reason) → tokens in rows so far."""
        super().__init__(model, request_id=selection.request_id, on_end=self._add_life)

    def finish(self) -> None:
        """Add the rows of the lives that have not ended, and of loads that failed after their life had ended."""
        for history in self.histories:
            self._add_life(history)
        if self._selection.first_sequence == 1 and self._selection.request_id is None:
            total = Counter(dict(_tokens(self.sums())))
            total.subtract(self._listed)
            self._add(None, None, total)

    def _add_life(self, history: RequestHistory) -> None:
        if self.moment.sequence >= self._selection.first_sequence:
            tokens = Counter(dict(_tokens(history.sums)))
            self._listed.update(tokens)
            self._add(history.request_id, history.ordinal, tokens)

    def _add(self, request_id: str | None, ordinal: int | None, tokens: Mapping[tuple[str, str], int]) -> None:
        sequence, time_ns = self.moment.sequence, self.moment.time_ns
        for (kind, reason), num_tokens in sorted(tokens.items()):
            if num_tokens:
                row = ReasonRow(
                    sequence=sequence,
                    time_ns=time_ns,
                    request_id=request_id,
                    ordinal=ordinal,
                    kind=kind,
                    reason=reason,
                    num_tokens=num_tokens,
                )
                self._rows.add("reasons", row, time_ns, sequence)


def _tokens(sums: Sums) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield ((kind, reason), tokens)."""
    kinds = {"missed": sums.misses(), "recomputed": sums.recomputed, "computed_twice": sums.computed_twice}
    for kind, by_reason in kinds.items():
        for reason, num_tokens in by_reason.items():
            yield (kind, reason.value), num_tokens


def read_rows(
    log: StoredLog,
    selection: Selection,
    start: str,
    add: Mapping[str, AddRow],
    remark: Callable[[str], None],
) -> None:
    """Read the log and add the rows of the selected part. If `violations` is wanted, also verify the log.

    A log that is being written is read up to its present end.

    Args:
        log: the opened log.
        selection: the selected part.
        start: name of the engine start.
        add: table → function that is called with each row of this table.
        remark: called with sentences for the user.

    Raises:
        CommandFailed: no copy of the log's header is intact.
    """
    rows = Rows(start, Clock(log.header), add)
    if log.worker_rank is None and add.keys() - {VIOLATIONS}:
        model = begin_model(log)
        visitors: list[Visitor[Model]] = []
        if "reasons" in rows:
            visitors.append(_Reasons(model, selection, rows))
        if "evictions" in rows:
            visitors.append(_Evictions(model, selection, rows))
        read_trace(log, model, selection, TraceRows(rows), remark, visitors=visitors)
    if VIOLATIONS in rows:
        _read_violations(log, selection, rows)


def _read_violations(log: StoredLog, selection: Selection, rows: Rows) -> None:
    verification = Verification(log, selection)
    for batch in log.batches_so_far(selection.last_sequence):
        verification.take(batch)
    judgement = verification.findings().judgement
    counts = judgement.num_violations
    for violation in judgement.violations:
        row = ViolationRow(
            sequence=violation.sequence,
            time_ns=violation.time_ns,
            rank=log.worker_rank,
            rule=violation.rule,
            request_id=violation.request_id,
            generation=violation.generation,
            detail=violation.detail,
            evidence=tuple(violation.evidence),
            num_of_rule=counts[violation.rule],
        )
        rows.add(VIOLATIONS, row, row.time_ns, row.sequence)
    for rule in sorted(counts.keys() - {violation.rule for violation in judgement.violations}):
        row = ViolationRow(
            sequence=None,
            time_ns=None,
            rank=log.worker_rank,
            rule=rule,
            request_id="",
            generation=None,
            detail="",
            evidence=(),
            num_of_rule=counts[rule],
        )
        rows.add(VIOLATIONS, row, None, None)
