"""The axis of a page: idle time is folded, everything else stays in proportion."""

from __future__ import annotations

import datetime as dt
import itertools

import pytest

from kvledger.adapters.tools.export.axis import Axis
from kvledger.adapters.tools.export.clock import time_of_day

S = 10**9
HOUR = 3600 * S
NOON = int(dt.datetime(2026, 1, 5, 12, tzinfo=dt.UTC).timestamp()) * S


def test_an_hour_without_requests_takes_little_room() -> None:
    """Two minutes of work, an hour apart, share the axis; the fold between them says how long it is."""
    axis = Axis([(0, 60 * S), (HOUR, HOUR + 60 * S)])
    (fold,) = axis.folds
    assert fold.duration_ns == HOUR - 60 * S
    assert axis.share(60 * S) - axis.share(0) == pytest.approx(axis.share(HOUR + 60 * S) - axis.share(HOUR))
    assert fold.width < 0.05
    assert axis.share(60 * S) == pytest.approx(fold.share)
    assert axis.share(HOUR + 60 * S) == pytest.approx(1.0)


def test_a_short_pause_stays_in_proportion() -> None:
    """What would be narrower than the mark of a fold is drawn as it was."""
    axis = Axis([(0, 60 * S), (61 * S, 120 * S)])
    assert axis.folds == []
    assert axis.share(30 * S) == pytest.approx(0.25)


def test_many_pauses_leave_most_of_the_axis_to_the_work() -> None:
    """A thousand requests of a millisecond, ten seconds apart, are still wider than what is between them."""
    axis = Axis([(10 * S * number, 10 * S * number + S // 1000) for number in range(1000)])
    assert len(axis.folds) == 999
    assert sum(fold.width for fold in axis.folds) == pytest.approx(0.3)


def test_time_never_runs_backwards_on_an_axis() -> None:
    """Also inside a fold and outside of the axis."""
    axis = Axis([(10 * S, 11 * S), (HOUR, HOUR + S), (2 * HOUR, 2 * HOUR + 5 * S)])
    shares = [axis.share(time_ns) for time_ns in range(0, 3 * HOUR, 7 * S)]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 1


def test_ticks_are_round_and_have_room() -> None:
    """Their labels do not touch each other, and each piece that has the room begins with one."""
    axis = Axis([(NOON, NOON + 60 * S), (NOON + HOUR, NOON + HOUR + 60 * S)])
    ticks = list(axis.ticks())
    assert {NOON, NOON + HOUR} < {tick.time_ns for tick in ticks}
    assert all(right.share - left.share > 0.1 for left, right in itertools.pairwise(ticks))
    assert [time_of_day(tick) for tick in ticks][:2] == ["12:00:00", "12:00:20"]


def test_a_zoomed_axis_has_more_ticks_with_the_same_room() -> None:
    """Drawn 16 times as wide, labels are 16 times closer in time."""
    axis = Axis([(NOON, NOON + 600 * S)])
    ticks = list(axis.ticks(16))
    assert all(right.share - left.share > 0.1 / 16 for left, right in itertools.pairwise(ticks))
    assert len(ticks) > 10 * len(list(axis.ticks()))


def test_a_tick_is_as_exact_as_it_needs_to_be() -> None:
    """Milliseconds where ticks are milliseconds apart."""
    labels = [time_of_day(tick) for tick in Axis([(NOON, NOON + S // 10)]).ticks()]
    assert labels[:2] == ["12:00:00.000", "12:00:00.020"]


def test_a_piece_that_begins_at_no_round_time_is_labelled_exactly() -> None:
    """Its label would else seem to be up to a whole distance of ticks too early."""
    first, second, *_ = Axis([(NOON + 820 * S // 1000, NOON + 9 * S)]).ticks()
    assert [time_of_day(tick) for tick in (first, second)] == ["12:00:00.820", "12:00:02"]


def test_an_instant_is_an_axis_too() -> None:
    """A log with one event can be drawn."""
    axis = Axis([(5, 5)])
    assert axis.share(5) == 0
    assert [tick.time_ns for tick in axis.ticks()] == [5]
