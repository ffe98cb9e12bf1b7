"""A wrapped connector of a recorder's log, made again, answers the recorded calls as recorded; incidents come back."""

from __future__ import annotations

import json
import random
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from sim.connectors import Example, NamedConnector, Recorded, Several
from sim.faults import CLIENT_FAULTS
from sim.recorded import events_of
from sim.settings import draw
from sim.versions import mended_in_0_33
from sim.world import World

from kvledger.adapters.lab.repro import NotRerunnable, read_recording, record, rerun
from kvledger.adapters.lab.repro.scheduler import could_be_scheduled
from kvledger.adapters.lab.simulation.connectors import ConnectorSetup, Offloading, SimpleCPU
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.recorded.payloads import CHILD, WorkersReported
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

Events = list[tuple[int, e.Event]]
WITHIN = {"load_mode": "sync", "save_mode": "sync", "max_silent_ms": 0, "digests": "off"}
FAILS = {"num_tokens": 60, "failure_share": 0.4, "seed": 1, "num_steps": 2}
THEIRS = {"num_tokens": 48, "num_steps": 2, "seed": 1}
INNER: dict[str, ConnectorSetup] = {
    "OffloadingConnector": Offloading(),
    "a cache that fails asynchronously": NamedConnector(name="Neighbour", module="sim.neighbour", options=FAILS),
    "MultiConnector": Several(
        children=(NamedConnector(name="Neighbour", module="sim.neighbour", options=THEIRS), Offloading())
    ),
}


def recorded_world(inner: ConnectorSetup, seed: int) -> tuple[Any, dict[str, Any]]:
    """What a recorder around that connector wrote in a world, and the connector's options."""
    connector = {**draw(random.Random(f"settings {seed}")).connector, **WITHIN}
    recorder = Recorded(inner=inner)
    with World(seed, setup=recorder, neighbour=recorder, faults=CLIENT_FAULTS, connector=connector) as world:
        world.run()
    connector = world.engine.scheduler.connector
    return connector.recording, connector.wrapped._kv_transfer_config.kv_connector_extra_config


def without_times_and_keys(events: Events) -> list[Any]:
    """What is to be the same: all but names of chunks, times and the engine's description."""
    names: dict[bytes, int] = {}
    found: list[Any] = []
    for sequence, event in events:
        fields = {name: getattr(event, name) for name in event.__struct_fields__ if name != "time_ns"}
        if isinstance(event, e.ExtensionObserved | e.ExtensionNoted):
            if event.name == "recording_started":
                continue
            fields["payload"] = msgspec.structs.asdict(Recorder.payload_of(event))
            fields["payload"].pop("duration_ns", None)
        elif isinstance(event, e.ChunkKeysObserved):
            fields["keys"] = [names.setdefault(key, len(names)) for key in event.keys]
            fields.pop("hash_prefixes")  # of other tokens
        if not isinstance(event, e.LogNote):
            found.append((sequence, type(event).__name__, fields))
    return found


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("OffloadingConnector", 7),
        ("a cache that fails asynchronously", 24),
        ("MultiConnector", 26),
        pytest.param("MultiConnector", 170, id="one request, two steps in flight"),
        *(
            pytest.param(name, seed, marks=pytest.mark.long, id=f"{name}-{seed}")
            for name in INNER
            for seed in range(170, 185)
        ),
    ],
)
def test_a_recorded_connector_made_again_writes_the_same_log(name: str, seed: int) -> None:
    """Event by event: what it is asked, answers and copies, and what vLLM hears. No worker is there."""
    recording, options = recorded_world(INNER[name], seed)
    events = events_of(recording)
    outcome = rerun(record(recording.log.configuration, events), run_recorded=True, extra_config=options)
    for recorded, again in zip(without_times_and_keys(events), without_times_and_keys(outcome.events), strict=False):
        assert again == recorded
    assert outcome.left_out == []
    assert outcome.other_answers == []
    assert len(without_times_and_keys(outcome.events)) == len(without_times_and_keys(events))


def hold_session(log_dir: Path | None = None) -> Any:
    """A streaming session of OffloadingConnector, recorded, and others who have nothing to do with it."""
    engine = SimulatedEngine(
        setup=Recorded(inner=Offloading()), num_blocks=60, host_bytes=1 << 22, chunk_size=16, log_dir=log_dir
    )
    engine.add("session", range(45), 5, resumable=True)
    engine.add("other", range(1000, 1100), 20)
    for _ in range(6):
        engine.step()
    engine.add("session", range(300, 340), 10, resumable=True)
    for _ in range(6):
        engine.step()
    engine.shutdown()
    return engine.scheduler.connector.recording  # type: ignore[union-attr]


def checks_of(path: Path) -> dict[str, Callable[[], None]]:
    """The test functions of a written file."""
    return {name: value for name, value in runpy.run_path(str(path)).items() if name.startswith("test_")}


@mended_in_0_33
def test_repro_writes_a_test_that_fails_as_the_connector_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded answers come again, and so does the incident; requests and calls that it does not need are gone."""
    hold_session(tmp_path)
    (log,) = (log for log in tmp_path.iterdir() if "worker" not in log.name)
    test_path = tmp_path / "test_incident.py"
    assert main(["repro", str(log), "--connector", "OffloadingConnector", "-o", str(test_path)]) == 0
    assert "the test was run once and fails, as it should" in capsys.readouterr().err
    tests = checks_of(test_path)
    tests.pop("test_lookups_get_the_recorded_answers")()
    (incident,) = tests.values()
    with pytest.raises(AssertionError, match="TABLE_EQ was broken for session in build_connector_meta"):
        incident()
    recording = read_recording(test_path.with_suffix(".kvlog"))
    kinds = [type(event) for _, event in recording.observations]
    assert kinds.count(e.RequestArrived) == 1
    assert e.ExtensionNoted not in kinds, "what the workers reported is not needed"
    assert main(["verify", str(test_path.with_suffix(".kvlog"))]) == ExitCode.RULE_BROKEN


def test_answers_can_be_asked_for_where_nothing_went_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--pin`; with another answer in the recording the test fails."""
    engine = SimulatedEngine(
        setup=Recorded(inner=Offloading()),
        num_blocks=20,
        host_bytes=1 << 22,
        chunk_size=16,
        enable_prefix_caching=False,
        log_dir=tmp_path,
    )
    for request_id in ("a", "b"):
        engine.add(request_id, range(40), 3)
        engine.run()
    engine.shutdown()
    (log,) = (log for log in tmp_path.iterdir() if "worker" not in log.name)
    (of_worker,) = (other for other in tmp_path.iterdir() if other != log)
    test_path = tmp_path / "test_incident.py"
    assert main(["repro", str(of_worker), "-o", str(test_path)]) == ExitCode.USAGE
    assert "give the scheduler's log" in capsys.readouterr().err
    given = ["--run-recorded", "--pin", "--no-run", "-o", str(test_path)]
    assert main(["repro", str(log), "b", *given]) == 0
    (test,) = checks_of(test_path).values()
    test()
    recording = read_recording(test_path.with_suffix(".kvlog"))
    assert list(recording.answers.values()) == [32]
    (other,) = rerun(attrs.evolve(recording, answers={}), run_recorded=True).other_answers
    assert "b gets 32 tokens" in other


@mended_in_0_33
def test_what_was_raised_in_a_hook_is_raised_again() -> None:
    """At the same call; a reset between two steps preempts, and the next step names whom."""
    engine = SimulatedEngine(setup=Recorded(inner=Offloading()), num_blocks=20, host_bytes=1 << 22, chunk_size=16)
    engine.add("a", range(20), 10)
    for _ in range(3):
        engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    with pytest.raises(AssertionError):
        engine.step()
    log = engine.scheduler.connector.recording  # type: ignore[union-attr]
    engine.shutdown()
    outcome = rerun(record(log.log.configuration, events_of(log)), connector="OffloadingConnector")
    (trouble,) = outcome.troubles
    assert (trouble.rule, trouble.hook) == ("HOOK_FAILED", "build_connector_meta")
    assert "AssertionError" in trouble.detail


@pytest.mark.parametrize("why", ["has no decoder: Foreign", "inside MultiConnector"])
def test_a_log_that_cannot_be_driven_again_says_why(why: str) -> None:
    """With the remedy: of workers' metadata that nobody reads, and of one child among several."""
    recording = hold_session()
    events = events_of(recording)
    spoilt: e.Event = e.LogNote(f"{CHILD}, so the log includes reports of other connectors", 0)
    if "Foreign" in why:
        spoilt = Recorder.noted(WorkersReported(unread="Foreign"), 0)
    with pytest.raises(NotRerunnable, match=why):
        record(recording.log.configuration, [*events, (events[-1][0] + 1, spoilt)])


def test_a_connector_that_cannot_be_made_here_is_named() -> None:
    """It is not installed, or its module is not on the path."""
    log = hold_session()
    recording = record(log.log.configuration, events_of(log))
    assert recording.wrapped is not None
    elsewhere = {**recording.wrapped.kv_transfer, "kv_connector": "Elsewhere", "kv_connector_module_path": "elsewhere"}
    gone = attrs.evolve(recording, wrapped=msgspec.structs.replace(recording.wrapped, kv_transfer=elsewhere))
    with pytest.raises(NotRerunnable, match=r"(?s)Elsewhere cannot be created here: .* put its module on PYTHONPATH"):
        rerun(gone, run_recorded=True)


def test_a_connector_on_vllms_own_blocks_is_declined() -> None:
    """Also as a child of MultiConnector."""
    simple = SimpleCPU()
    for inner in (simple, Several(children=(simple, NamedConnector(name="Witness", module="sim.witness")))):
        engine = SimulatedEngine(setup=Recorded(inner=inner), num_blocks=20, host_bytes=1 << 20, chunk_size=16)
        log = engine.scheduler.connector.recording  # type: ignore[union-attr]
        engine.shutdown()
        with pytest.raises(NotRerunnable, match="SimpleCPUOffloadConnector works on vLLM's own blocks"):
            rerun(record(log.log.configuration, events_of(log)), run_recorded=True)


def test_answers_from_where_nothing_is_made_again_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ExampleConnector looks into files that its workers wrote; the test is written for who asks for it."""
    inner = Example()
    example = Recorded(inner=inner, name="KVLedgerRecorder")
    engine = SimulatedEngine(
        setup=example,
        num_blocks=20,
        host_bytes=1 << 20,
        chunk_size=16,
        enable_prefix_caching=False,
        log_dir=tmp_path,
    )
    for request_id, num_tokens in (("a", 16), ("b", 1)):
        engine.add(request_id, range(num_tokens), 1)
        engine.run()
    engine.shutdown()
    (directory,) = inner._directories
    shutil.rmtree(directory.name)
    (log,) = (log for log in tmp_path.iterdir() if "worker" not in log.name)
    test_path = tmp_path / "test_incident.py"
    extra = ["--extra-config", json.dumps({"shared_storage_path": directory.name})]
    given = ["--connector", "ExampleConnector", *extra, "-o", str(test_path)]
    assert main(["repro", str(log), *given]) == ExitCode.USAGE
    assert "b gets 0 tokens in the lookup of event" in capsys.readouterr().err
    assert main(["repro", str(log), "--all", "--no-run", *given]) == 0
    assert "def test_last_token_holds" in test_path.read_text()


def test_calls_that_vllm_could_not_make_are_recognised() -> None:
    """Without the lookup before blocks are given, without the step that computed the first tokens."""
    log = hold_session()
    recording = record(log.log.configuration, events_of(log))
    assert could_be_scheduled(recording.observations, 16)
    is_left_out: tuple[Callable[[e.Event], bool], ...] = (
        lambda event: isinstance(event, e.LookupRequested),
        lambda event: isinstance(event, e.StepScheduled) and event.step == 0,
        lambda event: isinstance(event, e.BlocksAllocated),
    )
    for leaves_out in is_left_out:
        observations = tuple(entry for entry in recording.observations if not leaves_out(entry[1]))
        assert not could_be_scheduled(observations, 16)
