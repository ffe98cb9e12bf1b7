"""Whatever requests, steps, copies and faults come in whatever order, the core believes what is true.

A failure prints its moves and `@reproduce_failure`, which goes above the class `Moves`.
"""

from __future__ import annotations

import pytest
from lifecycle_driver.moves import Met, explore

from kvledger.lifecycle import Core, RequestState
from kvledger.lifecycle import events as e

RARE = {
    e.LoadRefused,  # where a hook fails
    *(e.PagesDigested, e.StepReported),  # a world has no bytes, and its workers no numbers of steps
    e.HooksExchanged,  # a world has no hooks
    *(e.PrefixCacheReset, e.EndRefused),  # what vLLM or another connector does without a hook
    *(e.BlockTableObserved, e.DecisionWithheld, e.HookFailed, e.LogNote, e.RequestQuarantined, e.WindowLeft),
    *(e.ExtensionObserved, e.ExtensionNoted, e.ExtensionDecided, e.ExtensionStopped),
}
"""What happens in small worlds hardly ever, or never."""


def check_reach(met: Met) -> None:
    """Examples that never recover, fail, evict or continue a session would prove nothing."""
    assert met.num_loads_checked > 20
    assert met.num_recovering > 50
    assert met.states == set(RequestState)
    played = {event for event in Core.standard().events.values() if event.id != "load.errors_observed"}
    assert played - set(met.events) <= RARE


def test_no_moves_break_an_invariant() -> None:
    """The same examples in each run."""
    check_reach(explore(max_examples=100, derandomize=True))


@pytest.mark.long
def test_no_moves_of_many_more_examples_break_an_invariant() -> None:
    """Others in each run."""
    check_reach(explore(max_examples=5000))
