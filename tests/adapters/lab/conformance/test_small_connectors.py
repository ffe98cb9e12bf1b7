"""A small connector that is right keeps everything that can be judged of it, and each mistake is named."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvledger.adapters.lab.conformance.obligations import OBLIGATIONS, Precondition
from kvledger.adapters.lab.conformance.runs import Finding, findings, played, runs, unassigned, world
from kvledger.adapters.lab.conformance.subject import Subject

pytestmark = pytest.mark.scheduler

LOST = "what is stored is lost"
PREFIX, TWICE = "a prefix that is stored", "a prefix that is stored, each lookup asked twice"
MISTAKES = {
    "counts below zero": ("answer-in-range", "aborted while it runs", False),
    "leaves no token": ("answer-in-range", "a prompt that is stored whole", False),
    "answers once": ("lookup-is-pure", TWICE, False),
    "counts sources wrongly": ("hit-sources-add-up", PREFIX, False),
    "writes into the output": ("metadata-leaves-the-output", "a plain prompt", False),
    "loads in another order": ("loaded-kv-is-right", PREFIX, False),
    "tells of everybody": ("kept-blocks-are-let-go", PREFIX, False),
    "tells of a load twice": ("load-is-reported-once", "an id used again", True),
    "never lets go": ("kept-blocks-are-let-go", "a plain prompt", False),
    "keeps a block for ever": ("blocks-come-back", "a plain prompt", False),
    "sleeps on blocks": ("steps-while-pending", "a plain prompt", False),
    "never rests": ("steps-while-pending", "a plain prompt", False),
    "wants blocks": ("abort-from-everywhere", "aborted before its first step", False),
    "forgets nothing": ("reset-forgets", "reset while idle", False),
    "hides what failed": ("failed-loads-are-reported", LOST, False),
    "hides what failed asynchronously": ("failed-loads-are-reported", LOST, True),
    "raises at the end": ("shutdown-completes", "a plain prompt", False),
}


@pytest.fixture(autouse=True)
def small_cache() -> Iterator[None]:
    """The module can be imported by the name that vLLM is given."""
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def examined(folder: Path, *names: str, seeds: range = range(0), **options: Any) -> dict[str, Finding]:
    """What these runs say of the small cache; all of them where none is named."""
    subject = Subject.named("small_cache:SmallCache", options, "small_cache:lose")
    chosen = [run for run in runs(seeds) if not names or run.name in names]
    outcomes = [played(run, subject, folder) for run in chosen]
    assert unassigned(outcomes) == []
    return {finding.obligation.name: finding for finding in findings(outcomes)}


@functools.cache
def verdicts_of_the_right_one(run_name: str, *, is_async: bool) -> dict[str, str]:
    """Its logs are not kept."""
    with tempfile.TemporaryDirectory() as folder:
        found = examined(Path(folder), run_name, is_async=is_async)
        assert not list(Path(folder).rglob("*.kvlog"))
    return {name: finding.verdict for name, finding in found.items()}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_named(mistake: str, tmp_path: Path) -> None:
    """Under its obligation, and the log is there to be read; without the mistake nothing is broken."""
    obligation, run_name, is_async = MISTAKES[mistake]
    found = examined(tmp_path, run_name, mistake=mistake, is_async=is_async)[obligation]
    assert found.verdict == "broken"
    (outcome, _), *_ = found.broken_in
    assert outcome.log is not None
    assert list(outcome.log.glob("*.kvlog"))
    verdicts = verdicts_of_the_right_one(run_name, is_async=is_async)
    assert "broken" not in verdicts.values()
    assert verdicts[obligation] == "kept"


def test_a_negative_answer_after_a_preemption_is_judged_to_the_end(tmp_path: Path) -> None:
    """Incident: the recorder stopped there. ALLOC_MATCHES_LOOKUP reported that -16 tokens are not -16."""
    found = examined(tmp_path, "preempted and resumed", mistake="counts below zero")
    assert found["answer-in-range"].verdict == "broken"
    assert found["lookup-is-pure"].verdict == "kept"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("kvledger.adapters.recorded.extension._load", "extension recorder was stopped: New.blocks_allocated raised"),
        ("kvledger.adapters.recorder.recording._within", "recording stopped in"),
    ],
)
def test_what_a_stopped_recorder_did_not_see_is_not_judged(
    place: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is broken, its log is kept, and obligations that only the simulation shows are judged."""

    def fail(*_arguments: object) -> int:
        raise ValueError

    monkeypatch.setattr(place, fail)
    (run,) = [run for run in runs(range(0)) if run.name == PREFIX]
    outcome = played(run, Subject.named("small_cache:SmallCache", {}), tmp_path)
    ((of_run, failure),) = unassigned([outcome])
    assert (of_run, failure.check) == (outcome, "EXTENSION_STOPPED")
    assert outcome.log is not None
    found = {finding.obligation.name: finding for finding in findings([outcome])}
    assert found["answer-in-range"].verdict == "not judged"
    assert found["answer-in-range"].reason.startswith(f"the log of {PREFIX} is not complete: at event {failure.event}")
    assert reason in found["answer-in-range"].reason
    assert found["metadata-leaves-the-output"].verdict == "kept"


@pytest.mark.long
@pytest.mark.parametrize("is_async", [False, True])
def test_a_connector_that_is_right_keeps_everything(is_async: bool, tmp_path: Path) -> None:
    """But what it never does, and what cannot be seen."""
    found = examined(tmp_path, seeds=range(12), is_async=is_async)
    broken = {name: finding.broken_in for name, finding in found.items() if finding.verdict == "broken"}
    assert broken == {}
    kept = {name for name, finding in found.items() if finding.verdict == "kept"}
    decoded = {
        name for name, obligation in OBLIGATIONS.items() if obligation.needs in {Precondition.COPY, Precondition.SAVE}
    }
    asynchronous = {"load-is-reported-once", "load-comes-to-its-end", "allocation-decides", "allocation-comes-twice"}
    unseen = {name for name, obligation in OBLIGATIONS.items() if not obligation.checks}
    assert OBLIGATIONS.keys() - kept == decoded | unseen | (set() if is_async else asynchronous)


def test_a_world_is_its_seed(tmp_path: Path) -> None:
    """Played again it has the same steps and events."""
    subject = Subject.named("small_cache:SmallCache", {"is_async": True})
    first, again = (played(world(7), subject, tmp_path) for _ in range(2))
    assert first.num_steps > 100
    assert (first.num_steps, first.num_events) == (again.num_steps, again.num_events)
    assert first.failures == ()
