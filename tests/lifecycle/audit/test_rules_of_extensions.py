"""A rule of an extension that raises is not judged; the rest of the log is, and nothing is silent about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lifecycle_driver import Driver, keys_of
from starvation_guard import StarvationGuard, StarvingKept

from kvledger.lifecycle import Core, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import AuditModel, Visits

NUM_RULES = len(Core.standard().rules) - 1
"""Without EVICTION_ORDER: the extension says what is evicted last."""


class RaisesWhenMade(StarvingKept):
    """Cannot begin."""

    def __init__(self, _model: AuditModel) -> None:
        raise KeyError("a prompt")


class RaisesWhenAsked(StarvingKept):
    """Does not say what it looks at."""

    def visits(self) -> Visits:
        """Nothing comes of it."""
        raise KeyError("a prompt")


class RaisesAtAnEvent(StarvingKept):
    """Knows no preemptions. What it has found at this event does not count either."""

    @on(e.RequestPreempted)
    def _preempted(self, _event: e.RequestPreempted) -> None:
        self.broken("broken")
        raise KeyError("a prompt")


class Yields(StarvingKept):
    """Is a generator, which nobody runs."""

    @on(e.RequestPreempted)
    def _preempted(self, _event: e.RequestPreempted) -> Iterator[str]:
        yield "broken"


class RaisesWhenItBegins(StarvingKept):
    """Cannot take over."""

    def begin(self) -> None:
        """What is there."""
        raise KeyError("a prompt")


def core_with(checker: type[StarvingKept]) -> Core:
    """The guard with another checker."""
    kind = type("Altered", (StarvationGuard,), {"rules": {StarvingKept.rule: checker}})
    return Core.standard().extended(kind())


def preempted_while_it_computes(core: Core) -> Driver:
    """A request that is preempted; at the end a settled chunk is not saved, which breaks another rule."""
    driver = Driver(chunk_size=16, core=core)
    driver.start("a", keys_of("a", 2), 33, (1, 2, 3))
    driver.step(settled=[("a", 0, 32)])
    driver.settle_all()
    driver.preempt("a", 32)
    return driver


@pytest.mark.parametrize(
    ("checker", "error"),
    [
        (RaisesWhenMade, "KeyError in __init__, "),
        (RaisesWhenAsked, "KeyError in visits, "),
        (RaisesAtAnEvent, "KeyError in _preempted, "),
        (Yields, "TypeError in _call, "),
    ],
)
def test_a_rule_that_raises_is_not_judged_and_says_why(checker: type[StarvingKept], error: str) -> None:
    """Its error, without what that quotes; every other rule and all decisions are judged to the end."""
    driver = preempted_while_it_computes(core_with(StarvingKept))
    extra = (len(driver.observed) + 1, e.LoadCompleted("a", 0, 0, 77, 1))
    for events in (None, [*enumerate(driver.observed, 1), extra]):
        audit = driver.audited(core=core_with(checker), events=events)
        assert audit.unfoldable is None
        reason = audit.judgement().not_judged[StarvingKept.rule]
        assert f"its checker raised {error}" in reason
        assert "a prompt" not in reason
        assert len(audit.judgement().judged) == NUM_RULES
        assert StarvingKept.rule not in audit.judgement().judged
        assert audit.num_events == len(driver.observed) + bool(events)
        assert bool(audit.num_violations) is bool(events), "the other rules are silent"


def test_one_that_cannot_begin_in_the_middle_is_not_judged() -> None:
    """Where a log's beginning was retired."""
    driver = preempted_while_it_computes(core_with(StarvingKept))
    for checker, is_judged in ((StarvingKept, True), (RaisesWhenItBegins, False)):
        core = core_with(checker)
        audit = driver.audited(core=core, events=[], start=driver.folded(core=core).start())
        assert (StarvingKept.rule in audit.judgement().judged) is is_judged


def test_the_rules_of_an_extension_end_where_it_is_stopped() -> None:
    """It keeps nothing from there on, so nothing can be held against that; also where the audit begins behind it."""
    core = core_with(StarvingKept)
    driver = preempted_while_it_computes(core)
    events = list(enumerate(driver.observed, 1))
    stop = (len(events) + 1, e.ExtensionStopped("starvation", 1, "keeps", "KeyError", events[-1][0]))
    whole = driver.audited(core=core, events=[*events, stop])
    assert whole.is_sound
    assert whole.judgement().not_judged == {StarvingKept.rule: f"its extension was stopped at event {stop[0]}"}
    folds = driver.folded(core=core)
    folds.take([stop])
    begun = driver.audited(core=core, events=[], start=folds.start())
    assert begun.judgement().not_judged == whole.judgement().not_judged
    other = e.ExtensionStopped("other", 1, "keeps", "KeyError", events[-1][0])
    assert driver.audited(core=core, events=[*events, (stop[0], other)]).judgement().not_judged == {}
