"""The reader's model: it tells the states around each event, and nobody who asks it reaches what decided."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from copy import copy
from types import FunctionType, ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from lifecycle_driver import Driver, play_seed
from lifecycle_driver.any_events import any_log

from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit, AuditModel, Checker, Moment, Visits
from kvledger.lifecycle.audit.violations import Violations
from kvledger.lifecycle.reader import Reader
from kvledger.lifecycle.replay import batches, fold
from kvledger.lifecycle.states import TrustRegion

JUDGED = tuple(
    f"kvledger.lifecycle.{part}"
    for part in (
        "projections",
        "decisions",
        "handlers",
        "core",
        "ledger",
        "replay",
        "turn",
    )
)


class EveryMoment(Checker):
    """Remembers the moment of each event."""

    rule = "EVERY_MOMENT"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self.moments: list[Moment] = []

    def visits(self) -> Visits:
        """All events of requests."""
        return [(event_class, self._look) for event_class in self.model.request_events]

    def _look(self, _event: e.Event) -> None:
        self.moments.append(copy(self.moment))


def walked() -> Driver:
    """A walk with every kind of event."""
    return play_seed(7, 60, chunk_size=16, block_size=16)


def test_each_moment_tells_the_states_around_its_event() -> None:
    """Checkers see the moment as it was."""
    driver = walked()
    audit = Audit(Core.standard(), driver.configuration, checkers=[EveryMoment])
    audit.run(enumerate(driver.observed, 1))
    (checker,) = audit.checkers
    assert isinstance(checker, EveryMoment)
    moments = [moment for moment in checker.moments if moment.life is not None]
    assert {moment.state_before for moment in moments if isinstance(moment.event, e.RequestArrived)} <= {
        None,
        "finished",
    }
    assert {moment.state_before for moment in moments if isinstance(moment.event, e.RequestReleased)} == {"finished"}
    preempted = [moment for moment in moments if isinstance(moment.event, e.RequestPreempted)]
    assert preempted
    assert all(moment.is_legal for moment in preempted)
    assert {moment.state_before for moment in preempted} <= {"new", "chunked_prefill", "running", "recovering"}


@pytest.mark.parametrize("seed", range(7, 12))
def test_the_model_and_the_projections_agree_on_every_life(seed: int) -> None:
    """Two that are made apart: states, generation, counts and keys, whenever an observation comes next."""
    driver = play_seed(seed, 60, chunk_size=16, block_size=16)
    audit = Audit(Core.standard(), driver.configuration)
    lives = audit.checkers[0].lives
    num_compared = 0
    for batch in batches(enumerate(driver.observed, 1)):
        audit.take_frame(batch)
        tracker = audit.projections.tracker
        assert {life.ordinal for life in lives} == {record.ordinal for record in tracker}
        for record in tracker:
            life = lives.of(record.ordinal)
            assert life is not None
            assert (life.path, life.blocks, life.generation) == (record.path, record.blocks, record.generation)
            assert life.state_since_ns == record.state_since_ns
            assert life.num_preemptions == record.num_preemptions
            assert life.num_tokens_before_preemption == record.num_tokens_before_preemption
            assert life.quarantined == (record.trust is TrustRegion.QUARANTINED)
            assert (life.num_tokens, life.num_failed_loads) == (record.num_tokens, record.num_failed_loads)
            assert lives.num_computed_tokens(life) == tracker.num_computed_tokens(record)
            assert life.keys == record.keys
            num_compared += 1
    assert num_compared


@settings(max_examples=50)
@given(any_log())
def test_the_model_and_the_projections_agree_on_what_states_refuse(
    log: tuple[LedgerConfiguration, list[e.Event]],
) -> None:
    """Of observations in any order."""
    configuration, events = log
    projections = Core.standard().new_projections(configuration)
    model = AuditModel(Core.standard().tables, configuration, Violations())
    visitor = EveryMoment(model)
    reader = Reader(model, [visitor])
    for sequence, event in enumerate(events, 1):
        subject = projections.fold(event, sequence)
        reader.take([(sequence, event)])
        if isinstance(event, e.RequestEvent):
            assert visitor.moments[-1].is_refused == subject.is_refused


def _reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Everything that hangs on these, but for what a module or a class brings along."""
    found: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in found or isinstance(each, ModuleType | type):
            continue
        found[id(each)] = each
        yield each
        if isinstance(each, FunctionType):
            waiting += [cell.cell_contents for cell in each.__closure__ or ()]
        elif isinstance(each, msgspec.Struct):  # some of them the garbage collector does not know
            waiting += msgspec.structs.astuple(each)
        else:
            waiting += gc.get_referents(each)


def _judged(roots: Iterable[Any]) -> set[str]:
    return {type(each).__qualname__ for each in _reachable(roots) if type(each).__module__.startswith(JUDGED)}


def test_no_checker_can_reach_what_decided() -> None:
    """Neither the model nor a checker holds a projection, a handler or the core, also where an audit begins midway."""
    driver, core = walked(), Core.standard()
    configuration, events = driver.configuration, driver.observed
    whole = Audit(core, configuration)
    whole.run(enumerate(events, 1))
    folded = driver.folded(len(events) // 2)
    assert len(folded.projections.tracker)
    begun = Audit(core, configuration, start=folded.start())
    assert _judged([whole.checkers, begun.checkers]) == set()


def test_the_search_finds_what_is_held_in_a_roundabout_way() -> None:
    """Or the test above would prove nothing."""
    driver = walked()
    events = driver.observed
    start = fold(Core.standard(), enumerate(events, 1), driver.configuration, at=len(events) // 2)
    for holder in (lambda: start.tracker, {"held": [start]}, start.tracker.get, start.tracker.folds):
        assert _judged([holder])
