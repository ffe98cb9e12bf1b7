"""Each report says when its copy began and ended; a copy out of order, or none at all, is named."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from lifecycle_driver import Driver

from kvledger.lifecycle import events as e
from kvledger.lifecycle.copy_moments import CopyMoments, Hook, Moment
from kvledger.lifecycle.replay import SequencedEvent

Change = Callable[[CopyMoments], CopyMoments]
SAVED, SAVED_BEFORE_FORWARD, LOADED = 0, 1, 2
"""Which report of the story is of which kind of copy."""


def reports_of(driver: Driver) -> list[int]:
    """Places of the reports in the log."""
    return [place for place, (_, event) in enumerate(driver.events()) if isinstance(event, e.TransferReported)]


def with_moments(driver: Driver, which: int, change: Change) -> list[SequencedEvent]:
    """The log in which one report has other moments."""
    events = driver.events()
    place = reports_of(driver)[which]
    sequence, event = events[place]
    assert isinstance(event, e.TransferReported)
    moments = CopyMoments.of_fields(event.moments)
    assert moments is not None
    events[place] = sequence, msgspec.structs.replace(event, moments=change(moments).as_fields())
    return events


def in_hook(began: Hook, ended: Hook) -> Change:
    """The copy began and ended in these hooks of its step."""
    return lambda moments: CopyMoments(moments.began._replace(hook=began), moments.ended._replace(hook=ended))


def ended_in(hook: Hook, steps_later: int = 0) -> Change:
    """The copy ended in that hook, of its step or of a later one."""
    return lambda moments: moments._replace(
        ended=Moment(moments.ended.delivered + steps_later, moments.ended.number, hook)
    )


def a_step_later(moments: CopyMoments) -> CopyMoments:
    """All of it, as if with the metadata of another step."""
    return CopyMoments(*(moment._replace(delivered=moment.delivered + 1) for moment in moments))


@pytest.mark.parametrize(
    ("which", "change", "detail"),
    [
        (SAVED_BEFORE_FORWARD, in_hook(Hook.START_LOAD_KV, Hook.START_LOAD_KV), "not in handle_preemptions"),
        (SAVED_BEFORE_FORWARD, ended_in(Hook.WAIT_FOR_SAVE), "its step did not wait for it"),
        (LOADED, in_hook(Hook.WAIT_FOR_SAVE, Hook.WAIT_FOR_SAVE), "began in wait_for_save of its step"),
        (LOADED, in_hook(Hook.HANDLE_PREEMPTIONS, Hook.HANDLE_PREEMPTIONS), "began in handle_preemptions"),
        (LOADED, ended_in(Hook.OUTPUT), "ended in output of that step"),
        (SAVED, in_hook(Hook.START_LOAD_KV, Hook.START_LOAD_KV), "not in wait_for_save"),
        (SAVED, ended_in(Hook.WAIT_FOR_SAVE, steps_later=9), "ended in wait_for_save of event"),
        (SAVED, a_step_later, "was handed out with event"),
    ],
)
def test_a_copy_that_is_not_made_in_time_is_named(ordered: Driver, which: int, change: Change, detail: str) -> None:
    """And nothing else is."""
    audit = ordered.audited(with_moments(ordered, which, change))
    assert {violation.rule for violation in audit.violations} == {"COPY_IN_TIME"}
    assert detail in audit.violations[0].detail


def test_copies_made_in_time_are_sound(ordered: Driver) -> None:
    """The story itself."""
    assert ordered.audited().is_sound


def test_moments_that_were_not_recorded_are_not_judged(ordered: Driver) -> None:
    """Of an older log, of a report in the workers' place, or of other code."""
    events = [
        (sequence, msgspec.structs.replace(event, moments=()) if isinstance(event, e.TransferReported) else event)
        for sequence, event in ordered.events()
    ]
    assert ordered.audited(events).is_sound


def without_settlement(driver: Driver, which: int, ranks: tuple[int, ...]) -> tuple[list[SequencedEvent], int]:
    """The log in which only these ranks report a copy, so that nothing is decided upon it; and its next step's output.

    Without ranks there is no report.
    """
    events = driver.events()
    sequence, report = events[reports_of(driver)[which]]
    output = next(its for its, event in events if its > sequence and isinstance(event, e.StepReported))
    reported = [(sequence, msgspec.structs.replace(report, ranks_done=ranks))] if ranks else []
    before = [each for each in events if each[0] < sequence]
    return [*before, *reported, *(each for each in events if each[0] >= output)], output


@pytest.mark.parametrize("which", [SAVED_BEFORE_FORWARD, LOADED])
def test_a_copy_that_a_step_waits_for_and_that_is_not_reported_with_it_is_named(ordered: Driver, which: int) -> None:
    """A server: 15 loads were issued, 6 completed, and the log was called sound."""
    events, output = without_settlement(ordered, which, ())
    violation = ordered.audited(events).violations[0]
    assert (violation.rule, violation.sequence) == ("COPY_IN_TIME", output)
    assert "is not among the reports of ranks [0, 1]" in violation.detail


def test_a_rank_that_leaves_a_copy_out_is_named_alone(ordered: Driver) -> None:
    """The other rank has made it."""
    events, output = without_settlement(ordered, LOADED, (0,))
    violation = ordered.audited(events).violations[0]
    assert (violation.rule, violation.sequence) == ("COPY_IN_TIME", output)
    assert "is not among the reports of ranks [1]" in violation.detail


def test_a_copy_that_the_device_keeps_in_order_may_be_reported_later(ordered: Driver) -> None:
    """On CUDA a step does not wait for the bytes: what it computes comes after them."""
    events, output = without_settlement(ordered, LOADED, ())
    job_id = ordered.all_of(e.LoadIssued)[0].job_id
    late = [
        (sequence, msgspec.structs.replace(event, under_way=(job_id,)) if sequence == output else event)
        for sequence, event in events
        if sequence <= output
    ]
    assert ordered.audited(late).violations == []
