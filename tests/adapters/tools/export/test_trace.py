"""The trace: what it shows a sink, where events are missing, where it goes on from a stored state, of any log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_driver import Driver, keys_of, play_seed
from lifecycle_driver.any_events import any_log
from lifecycle_driver.gaps import take_with_gap

from kvledger.adapters.tools.export.perfetto import EngineTrace, TraceFile
from kvledger.adapters.tools.export.shown import Shown
from kvledger.adapters.tools.export.spans import Gauges, Instant, Lookup, Sink, Span, Step
from kvledger.adapters.tools.export.trace import Trace
from kvledger.adapters.tools.logs.clock import Clock
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.totals import LogTotals
from kvledger.adapters.tools.tables.rows import Rows, TraceRows
from kvledger.adapters.tools.tables.schema import TABLES
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Model, Reader

CORE = Core.standard()
Numbered = Sequence[tuple[int, e.Event]]


class Kept(Sink):
    """Keeps what it is shown, as it was then."""

    def __init__(self) -> None:
        self.began_spans: list[dict[str, Any]] = []
        self.shown: list[Any] = []
        """Spans that ended, and everything else."""
        self.steps: list[Step] = []

    def began(self, span: Span) -> None:
        """Keep a span that begins."""
        self.began_spans.append(msgspec.to_builtins(span))

    def ended(self, span: Span) -> None:
        """Keep a span that is over."""
        self.shown.append((type(span).__name__, msgspec.to_builtins(span)))

    def happened(self, instant: Instant) -> None:
        """Keep an instant."""
        self.shown.append(instant)

    def looked_up(self, lookup: Lookup) -> None:
        """Keep a lookup."""
        self.shown.append(lookup)

    def stepped(self, step: Step) -> None:
        """Keep a step."""
        self.steps.append(step)
        self.shown.append(step)

    def counted(self, time_ns: int, gauges: Gauges) -> None:
        """Keep counts."""
        self.shown.append((time_ns, gauges))

    def spans(self, kind: str) -> list[dict[str, Any]]:
        """Those of a class that are over."""
        return [each[1] for each in self.shown if isinstance(each, tuple) and each[0] == kind]


def trace_of(configuration: LedgerConfiguration, sink: Sink, first_sequence: int = 1) -> tuple[Reader, Trace]:
    """A trace before the first event, and the reader that calls it."""
    model = Model(CORE.tables, configuration)
    trace = Trace(model, CORE, LogTotals(model), sink, Selection(first_sequence=first_sequence))
    return Reader(model, trace.visitors, needs=trace.also_needs), trace


def read(
    configuration: LedgerConfiguration, events: Iterable[tuple[int, e.Event]], gap: tuple[int, int] | None = None
) -> Kept:
    """What is shown of a log without the events of the gap (first and last sequence number)."""
    kept = Kept()
    reader, _ = trace_of(configuration, kept)
    take_with_gap(reader, events, gap)
    reader.finish()
    return kept


def numbered(driver: Driver) -> list[tuple[int, e.Event]]:
    """The driver's log."""
    return list(enumerate(driver.observed, 1))


@pytest.mark.parametrize("seed", [3, 7, 12])
def test_a_trace_goes_on_from_its_stored_state(seed: int) -> None:
    """The part that follows is shown as it is in one reading."""
    driver = play_seed(seed, 60, chunk_size=16, block_size=16)
    log = numbered(driver)
    cut = next(at for at, event in log[len(log) // 2 :] if not event.is_decision) - 1
    whole = Kept()
    reader, _ = trace_of(driver.configuration, whole)
    reader.take(log[:cut])
    num_before = len(whole.shown)
    stored = reader.capture(CORE.fingerprint())
    reader.take(log[cut:])
    reader.finish()
    kept = Kept()
    resumed, trace = trace_of(driver.configuration, kept, cut + 1)
    resumed.resume(stored, CORE.fingerprint())
    assert trace.state.states
    resumed.take(log[cut:])
    resumed.finish()
    assert kept.shown == whole.shown[num_before:]


def test_what_is_open_over_a_gap_ends_where_an_event_says_so() -> None:
    """A copy by its number, a request by its id; of blocks and slots nothing is claimed."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 2), 33, (1, 2, 3))
    driver.start("b", keys_of("b", 2), 33, (4, 5, 6))
    driver.finish("b", 33, 34)
    (save,) = driver.all_of(e.SaveIssued)
    num_before = len(driver.observed)
    for _ in range(3):
        driver.step()
    num_missing = len(driver.observed) - num_before
    driver.settle_all()
    driver.step()
    driver.finish("a", 33, 34)
    driver.settle_all()
    kept = read(driver.configuration, numbered(driver), (num_before + 1, num_before + num_missing))
    first_copy, _ = kept.spans("CopySpan")
    assert (first_copy["job_id"], first_copy["outcome"]) == (save.job_id, "completed")
    assert [life["until_ns"] is not None for life in kept.spans("LifeSpan")] == [True, True]
    before, after = kept.steps[1].gauges, kept.steps[-1].gauges
    assert (before.num_blocks_held, after.num_blocks_held) == (6, 0)
    assert before.num_requests["running"] == after.num_requests["running"] == 1


def test_a_part_begins_with_what_is_open_there() -> None:
    """Each span with its true beginning, a life before its state."""
    driver = Driver(chunk_size=16)
    driver.start("a", keys_of("a", 2), 33, (1, 2, 3))
    driver.settle_all()
    driver.step()
    kept = Kept()
    reader, _ = trace_of(driver.configuration, kept, len(driver.observed))
    reader.take(numbered(driver))
    first = kept.began_spans[0]
    assert (first["sequence"], "state" in first) == (1, False)
    assert [span["state"] for span in kept.began_spans if "state" in span] == ["running"]
    assert len(kept.steps) == 1


class Several(Sink):
    """Shows everything to all that an export may be."""

    def __init__(self) -> None:
        written: list[object] = []
        tables = TraceRows(Rows("log", Clock({}), dict.fromkeys(TABLES, written.append)))
        self.sinks = (EngineTrace(TraceFile(written.append)), tables, Shown(), Kept())

    def began(self, span: Span) -> None:
        """Show it."""
        for sink in self.sinks:
            sink.began(span)

    def ended(self, span: Span) -> None:
        """Show it."""
        for sink in self.sinks:
            sink.ended(span)

    def happened(self, instant: Instant) -> None:
        """Show it."""
        for sink in self.sinks:
            sink.happened(instant)

    def looked_up(self, lookup: Lookup) -> None:
        """Show it."""
        for sink in self.sinks:
            sink.looked_up(lookup)

    def stepped(self, step: Step) -> None:
        """Show it."""
        for sink in self.sinks:
            sink.stepped(step)

    def counted(self, time_ns: int, gauges: Gauges) -> None:
        """Show it."""
        for sink in self.sinks:
            sink.counted(time_ns, gauges)

    def idle(self, time_ns: int) -> None:
        """Show it."""
        for sink in self.sinks:
            sink.idle(time_ns)


@settings(max_examples=50)
@given(log=any_log(), data=st.data())
def test_no_order_of_events_makes_an_export_raise(
    log: tuple[LedgerConfiguration, list[e.Event]], data: st.DataObject
) -> None:
    """Neither with all events nor where some are missing, whatever they say: a log may come from elsewhere."""
    configuration, events = log
    shuffled = data.draw(st.permutations(events))
    first = data.draw(st.integers(1, max(1, len(events))))
    last = data.draw(st.integers(first, max(first, len(events))))
    for order in (events, shuffled):
        for gap in (None, (first, last)):
            reader, _ = trace_of(configuration, Several())
            take_with_gap(reader, enumerate(order, 1), gap)
            reader.finish()
