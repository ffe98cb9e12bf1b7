"""Which observations one hook call made, by their order alone."""

from __future__ import annotations

import itertools

from kvledger.adapters.lab.repro.calls import end_of_call, hook_calls
from kvledger.lifecycle import events as e


def calls_of(*events: e.Event) -> list[tuple[str, int]]:
    """Hook and number of observations of each call; every event must belong to one."""
    calls, left_over = hook_calls(list(enumerate(events, 1)))
    assert left_over == []
    assert list(itertools.chain.from_iterable(call.observed for call in calls)) == list(enumerate(events, 1))
    return [(call.hook, len(call.observed)) for call in calls]


def step(number: int) -> e.StepScheduled:
    """A step that says nothing."""
    return e.StepScheduled(number, 0, (), (), (), (), 0)


def report(job_id: int) -> e.TransferReported:
    """One rank is done."""
    return e.TransferReported.by((0,), job_id, 0)


KEYS = e.ChunkKeysObserved("r", 0, (b"k",))
LOOKUP = e.LookupRequested("r", 0, 9, 0)
STEP = step(0)


def preempted(request_id: str) -> e.RequestPreempted:
    """A preemption."""
    return e.RequestPreempted(request_id, 8, 9, 0)


def failed(hook: str, request_id: str = "", error: str = "ValueError in f, g.py:1") -> e.HookFailed:
    """A failure."""
    return e.HookFailed(hook, request_id, error, 0)


def test_what_a_hook_notices_belongs_to_what_it_is_about() -> None:
    """Keys and preemptions come first."""
    assert calls_of(KEYS, LOOKUP, preempted("r"), KEYS, STEP) == [
        ("get_num_new_matched_tokens", 2),
        ("build_connector_meta", 3),
    ]


def test_the_next_turn_of_a_session_belongs_to_its_allocation() -> None:
    """`update_state_after_alloc` is the only hook that tells of it."""
    turn = (e.SessionContinued("r", 8, 20, 20, 0), KEYS, e.BlocksAllocated("r", (1,), 0, 0))
    assert calls_of(*turn) == [("update_state_after_alloc", 3)]


def test_preemptions_by_a_reset_belong_to_the_reset() -> None:
    """A lookup notices only that of its own request."""
    reset = (e.CacheReset(0), preempted("b"), preempted("r"), KEYS, LOOKUP)
    assert calls_of(*reset) == [("reset_cache", 3), ("get_num_new_matched_tokens", 2)]


def test_preemptions_of_the_step_after_a_reset_belong_to_the_step() -> None:
    """A step notices them in the order of their names."""
    assert calls_of(e.CacheReset(0), preempted("a"), preempted("b"), STEP) == [
        ("reset_cache", 1),
        ("build_connector_meta", 3),
    ]


def test_one_output_holds_a_report_once() -> None:
    """The same job again is another output; rollbacks belong to the load errors before them."""
    events = (
        e.LoadErrorsObserved((1,), 0),
        e.TokensRolledBack("r", 0, 0),
        report(1),
        report(2),
        report(1),
    )
    assert calls_of(*events) == [("update_connector_output", 4), ("update_connector_output", 1)]


def test_a_failure_behind_what_was_recorded_belongs_to_it() -> None:
    """A report at which the ledger failed is recorded, and so is the end of a request in the second attempt."""
    assert calls_of(report(1), failed("update_connector_output")) == [("update_connector_output", 2)]
    finished = e.RequestFinished("r", "FINISHED_ABORTED", 0, 9, 0)
    assert calls_of(failed("request_finished", "r"), finished) == [("request_finished", 2)]
    corrupt = failed("record_step", error="LedgerCorrupt: folding failed")
    assert calls_of(STEP, corrupt) == [("build_connector_meta", 2)]


def test_of_a_call_that_failed_before_anything_was_recorded_the_next_one_notices_what_it_noticed() -> None:
    """A step that could not be recorded follows one that could."""
    lost = failed("record_step")
    calls, left_over = hook_calls(list(enumerate([STEP, preempted("r"), KEYS, lost, LOOKUP], 1)))
    assert [(call.hook, len(call.observed)) for call in calls] == [
        ("build_connector_meta", 1),
        ("get_num_new_matched_tokens", 3),
    ]
    assert left_over == [(4, lost)]


def test_a_call_goes_on_without_keys() -> None:
    """The source of keys failed; the lookup was answered without."""
    assert calls_of(failed("chunk_keys", "r"), LOOKUP) == [("get_num_new_matched_tokens", 2)]


def test_what_a_start_says_of_the_log_before_belongs_to_no_call() -> None:
    """It depends on what lies in `log_dir`; any other note is named as not run again."""
    before, other = e.LogNote(f"{e.LOG_BEFORE}logs/1, was cut off", 0), e.LogNote("declined: why", 0)
    calls, left_over = hook_calls([(1, e.LogNote("connector started", 0)), (2, before), (3, other), (4, LOOKUP)])
    assert [call.hook for call in calls] == ["get_num_new_matched_tokens"]
    assert left_over == [(3, other)]


def test_an_incident_ends_with_the_call_in_which_it_happened() -> None:
    """A decision about a preemption is made in the middle of a step's call, which is made whole."""
    observations = [(1, LOOKUP), (3, preempted("a")), (9, STEP), (12, LOOKUP)]
    assert [end_of_call(observations, sequence) for sequence in (2, 3, 5, 11, 20)] == [1, 9, 9, 9, 12]
