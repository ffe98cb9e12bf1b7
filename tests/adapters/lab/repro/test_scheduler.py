"""What the scheduler must have known, read back from a log, where the code under test answers otherwise."""

from __future__ import annotations

from kvledger.adapters.lab.repro.scheduler import SchedulerModel
from kvledger.lifecycle import events as e


def test_a_request_for_which_fewer_tokens_are_loaded_decodes_in_the_steps_that_do_not_name_it() -> None:
    """The log has only its last token to compute; here 16 tokens more are computed with it, once."""
    record = SchedulerModel(is_async=False)
    incarnation = record.arrived(e.RequestArrived("a", 0, 33, 1))
    incarnation.num_missing_tokens = 16
    for number, advanced in enumerate([((0, 32, 1, 33),), (), ()]):
        step = e.StepScheduled(number, 1, advanced, (), (), (), 2)
        (part,) = record.scheduled(step)
        computed = (16, 17) if advanced else (32 + number, 1)
        assert (part.num_computed_tokens, part.num_scheduled_tokens) == computed
        record.stepped(step, [part])
    assert record.num_computed_tokens(incarnation) == 35
