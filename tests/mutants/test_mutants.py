"""Each historical mistake is named by its rule, first and alone; a connector without one leaves every checker silent.

`make mutants SEEDS=200` measures how soon; here every mutant is played until it is named once.
"""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import Phase
from lifecycle_driver.moves import explore

from kvledger.adapters.tools.cli.main import main
from kvledger.lifecycle import Core
from kvledger.lifecycle.codec import encode_events, vocabulary_header
from kvledger.lifecycle.replay import SequencedEvent
from kvledger.lifecycle.snapshots import SnapshotError
from kvledger.storage.events import SegmentEventStore
from mutants import catalogue, healthy
from mutants.detection import detect, judge, play
from mutants.mutant import MUTANTS, Mutant, Touch
from mutants.scenes import Story, Walks

pytestmark = pytest.mark.scheduler

MAX_SEEDS = 60
"""A mistake that makes no difference, or is not noticed, in so many seeds is not driven well enough."""

BY_SENTENCE = {f"{mutant.rule} where {mutant.sentence}": mutant for mutant in MUTANTS.values()}


def first_named_story(mutant: Mutant) -> Story:
    """Play seeds until the mistake is named; whoever is named first, in any of them, must be the right one."""
    for seed in range(MAX_SEEDS):
        story, touch = play(mutant, seed)
        detection = judge(mutant, story, touch, seed)
        reproduce = f"make mutants RULE={mutant.rule} SEED={seed}"
        assert not detection.unfoldable, f"{mutant.name} does not fit what it patches: {detection.unfoldable}"
        assert not detection.is_misnamed(mutant), f"{reproduce}: {detection}"
        if detection.is_named(mutant.rule):
            assert detection.touched is not None, f"named without a mistake: {reproduce}"
            return story
    pytest.fail(f"{mutant.rule} does not name {mutant.name} in {MAX_SEEDS} seeds")


@pytest.mark.parametrize("sentence", BY_SENTENCE)
def test_the_audit_names(sentence: str) -> None:
    """The first event that breaks any rule breaks this one and no other."""
    first_named_story(BY_SENTENCE[sentence])


@pytest.mark.parametrize("name", ["evicted_chunk_found", "handed_out_again", "loaded_in_another_order"])
def test_the_moves_of_a_small_world_meet_it(name: str) -> None:
    """What checks invariants, logs and pages in `lifecycle_driver.moves` can fail."""
    options = {"derandomize": True, "phases": [Phase.generate], "report_multiple_bugs": False}
    with MUTANTS[name].switched_on(Touch()), pytest.raises((AssertionError, SnapshotError)):
        explore(max_examples=200, **options)


def test_every_rule_that_a_log_can_decide_has_a_mutant() -> None:
    """A checker that no mistake sets off might as well not be there."""
    assert {mutant.rule for mutant in MUTANTS.values()} == set(Core.standard().rules)
    assert catalogue.__all__


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if isinstance(mutant.scene, Walks)])
def test_the_command_names_the_rule_first_and_ends_with_1(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvledger verify` on the log that the mutant left on disk; that decisions differ too does not hide the rule."""
    mutant = MUTANTS[name]
    log = write_log(tmp_path / "log", first_named_story(mutant))
    exit_code = main(["verify", "--json", str(log)])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    violations = [record for record in records if record["type"] == "violation"]
    assert exit_code == 1
    assert violations[0]["rule"] == mutant.rule


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_undone_behind_its_context(name: str) -> None:
    """What comes after it must be the code that everybody runs."""
    mutant = MUTANTS[name]
    patches = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in mutant.patches(Touch())]
    with mutant.switched_on(Touch()):
        assert all(getattr(owner, attribute) is not original for owner, attribute, original in patches)
    assert all(getattr(owner, attribute) is original for owner, attribute, original in patches)


@pytest.mark.parametrize(("kind", "num_seeds"), [("walks", 40), ("worlds", 6), ("hybrid", 2)])
def test_a_connector_without_mistakes_leaves_every_checker_silent(kind: str, num_seeds: int) -> None:
    """Whatever goes wrong around it; `make mutants ARGS=--healthy SEEDS=10000` plays more."""
    alarms = [health for health in healthy.alarms(kind, range(num_seeds)) if health.alarm]
    assert alarms == []


def test_a_walk_without_a_mistake_is_no_detection() -> None:
    """The measure itself: nothing touched, nothing named."""
    nothing = Mutant("RECORDED", "nothing is wrong", (), Walks(), lambda _: [])
    detection = detect(nothing, 3)
    assert detection.touched is None
    assert not detection.first_rules
    assert detection.num_events > 100


def test_the_measured_table_is_about_these_mutants() -> None:
    """A mutant that was changed or added must be measured again: `make mutants ARGS=--write`."""
    measured = json.loads((Path(__file__).parent / "measured.json").read_text())
    told = {entry["mutant"]: (entry["rule"], entry["sentence"], entry["incidents"]) for entry in measured["mutants"]}
    assert told == {m.name: (m.rule, m.sentence, list(m.incidents)) for m in MUTANTS.values()}
    for entry in measured["mutants"]:
        assert entry["num_named"]
        assert not entry["num_misnamed"]


def write_log(directory: Path, story: Story) -> Path:
    """The story as the connector would have left it, one frame per observation with its decisions."""
    header = {
        **vocabulary_header(Core.standard()),
        "configuration": attrs.asdict(story.configuration),
    }
    store = SegmentEventStore.create(directory, header, segment_bytes=1 << 20)
    frame: list[SequencedEvent] = []

    def append() -> None:
        if frame:
            store.append(encode_events([event for _, event in frame]), len(frame))
            frame.clear()

    for sequence, event in story.events:
        if not event.is_decision:
            append()
        frame.append((sequence, event))
    append()
    store.close()
    return directory
