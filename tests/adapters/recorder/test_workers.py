"""Each worker's calls stand in a log of its own, before they are made; reading either log tells where one failed."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from sim.connectors import NamedConnector, Recorded, Several
from sim.witness import PlainWitness
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvledger.adapters.lab.simulation.connectors import Offloading
from kvledger.adapters.lab.simulation.hashed_model import layer_names
from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorded.payloads import payload_of
from kvledger.adapters.recorder.worker_recording import carries_work
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.workers import logs_of_workers
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

Record = Callable[..., tuple[Any, Any]]
WITNESS = NamedConnector(name="Witness", module="sim.witness")


class Errand(KVConnectorMetadata):
    """What the witness hands to its workers when it has something to do."""

    def __init__(self, requests: list[str]) -> None:
        self.requests = requests
        self.epoch = 3


@pytest.fixture(autouse=True)
def on_worker_hook(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """Say what the connector does first in each of its worker's hooks."""
    do: list[Callable[[str], None]] = [lambda _hook: None]
    answers: dict[str, Any] = {"get_finished": (None, None), "get_block_ids_with_load_errors": set()}
    for name in (*HOOKS, *LAYER_HOOKS):

        def hook(_self: Any, *_arguments: Any, _name: str = name, **_named: Any) -> Any:
            do[0](_name)
            return answers.get(_name)

        monkeypatch.setattr(PlainWitness, name, hook)
    monkeypatch.setattr(PlainWitness, "build_connector_meta", lambda _self, _output: Errand(["a"]))
    return lambda new: do.__setitem__(0, new)


HOOKS = (
    "register_kv_caches",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "shutdown",
)
LAYER_HOOKS = ("wait_for_layer_load", "save_kv_layer")
WRITTEN_AS = {"get_finished": "get_transfer_results"}
"""What vLLM calls of the recorder, which calls the other of the connector."""


def worker_log(log_dir: Path, rank: int = 0) -> Path:
    """Of the only engine that logs there."""
    (found,) = log_dir.glob(f"*-worker-{rank}-of-*")
    return found


def scheduler_log(log_dir: Path) -> Path:
    """Of the only engine that logs there."""
    (found,) = (path for path in log_dir.iterdir() if "-worker-" not in path.name)
    return found


def said_in(path: Path) -> list[Any]:
    """Payloads and failures, in order."""
    events = [event for _, event in open_log(path).events()]
    return [payload_of(event) if isinstance(event, e.ExtensionNoted) else event for event in events]


def use(engine: Any) -> None:
    """Every hook of a worker."""
    engine.add("a", range(20), 3)
    engine.run()
    engine.shutdown()


def verdict(path: Path) -> str:
    """What `kvledger verify` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["verify", str(path)])
    return printed.getvalue()


def test_each_call_of_a_worker_is_in_its_log_before_the_connector_has_it(
    record: Record, on_worker_hook: Any, tmp_path: Path
) -> None:
    """Read by the connector itself, in each of its hooks; of those for layers, the first of each step."""
    seen: dict[str, set[object]] = {}

    def look(hook: str) -> None:
        last = said_in(worker_log(tmp_path))[-1]
        seen.setdefault(hook, set()).add(last.hook if isinstance(last, payloads.Called) else None)

    on_worker_hook(look)
    engine, _ = record(WITNESS, log_dir=str(tmp_path))
    use(engine)
    seen["shutdown"].discard(None)  # the scheduler's side has one, too
    written = {WRITTEN_AS.get(hook, hook) for hook in HOOKS}
    assert {WRITTEN_AS.get(hook, hook): names for hook, names in seen.items() if hook not in LAYER_HOOKS} == {
        hook: {hook} for hook in written
    }
    assert {hook: seen[hook] for hook in LAYER_HOOKS} == {hook: {hook, None} for hook in LAYER_HOOKS}
    calls = [each for each in said_in(worker_log(tmp_path)) if isinstance(each, payloads.Called)]
    for hook in LAYER_HOOKS:
        in_layers = [(each.step, each.layer) for each in calls if each.hook == hook]
        assert in_layers == [(step, layer_names()[0][0]) for step in range(3)]


def test_a_workers_log_says_whose_it_is(record: Record, tmp_path: Path) -> None:
    """Its first event, its name and what the commands print."""
    engine, _ = record(WITNESS, log_dir=str(tmp_path), num_ranks=2)
    use(engine)
    for rank in (0, 1):
        path = worker_log(tmp_path, rank)
        started, *_ = said_in(path)
        assert (started.rank, started.connector) == (rank, "Witness")
        assert started.engine_id == engine.vllm_config.kv_transfer_config.engine_id
        assert open_log(path).worker_rank == rank
        assert f"recording Witness, worker {rank} of engine {started.engine_id}" in verdict(path)
        assert main(["verify", str(path)]) == main(["show", str(path)]) == main(["stats", str(path)]) == 0
    beside = logs_of_workers(open_log(scheduler_log(tmp_path)))
    assert beside == {rank: worker_log(tmp_path, rank) for rank in (0, 1)}
    assert verdict(scheduler_log(tmp_path)).endswith("verdict     sound\n")


class Broken(RuntimeError):
    """What the connector raises."""


@pytest.mark.parametrize("hook", [*HOOKS[:-1], *LAYER_HOOKS])
def test_what_a_worker_raises_reaches_vllm_and_both_logs_tell(
    record: Record, on_worker_hook: Any, hook: str, tmp_path: Path
) -> None:
    """The very exception; `verify` of the scheduler's log names rank, hook, step and layer."""
    error = Broken("of the connector")
    engines = []

    def fail(called: str) -> None:
        if called == hook:
            raise error

    on_worker_hook(fail)

    def serve() -> None:
        engines.append(record(WITNESS, log_dir=str(tmp_path))[0])
        use(engines[0])

    with pytest.raises(Broken) as caught:
        serve()
    assert caught.value is error
    on_worker_hook(lambda _hook: None)
    *_, called, failed = (
        each for each in said_in(worker_log(tmp_path)) if type(each) in (payloads.Called, e.HookFailed)
    )
    name = WRITTEN_AS.get(hook, hook)
    assert (called.hook, failed.hook) == (name, name)
    assert called.step == (-1 if hook == "register_kv_caches" else 0)
    assert called.layer == (layer_names()[0][0] if hook in LAYER_HOOKS else "")
    for engine in engines:
        engine.scheduler.connector.shutdown()
        engine.worker.shutdown()
    assert f"worker 0 raised in {name}" in verdict(scheduler_log(tmp_path))
    assert f"hook {name} raised" in verdict(worker_log(tmp_path))
    assert ", but 1 worker raised in a hook" in verdict(scheduler_log(tmp_path))
    assert "rule broken" in verdict(worker_log(tmp_path))


@pytest.mark.parametrize("killed_in", ["wait_for_save", "wait_for_layer_load"])
def test_a_worker_that_is_killed_in_a_hook_leaves_the_call_behind(
    record: Record, on_worker_hook: Any, killed_in: str, tmp_path: Path
) -> None:
    """In a process of its own, which nothing ends but the signal."""

    def die(hook: str) -> None:
        if hook == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        on_worker_hook(die)
        engine, _ = record(WITNESS, log_dir=str(tmp_path))
        use(engine)
        os._exit(1)  # it should not come here
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    layer = f" for {layer_names()[0][0]}" * (killed_in in LAYER_HOOKS)
    told = f"worker 0 never returned from {killed_in}{layer} of step 0"
    for path in (scheduler_log(tmp_path), worker_log(tmp_path)):
        print(verdict(path))
        assert told in verdict(path)
        assert "sound up to where it was cut off, but 1 worker" in verdict(path)
        page = tmp_path / f"{path.name}.html"
        assert main(["export", str(path), "--html", "-o", str(page)]) == 0
        assert told in page.read_text()


def test_a_step_that_hands_nothing_over_is_not_written(
    record: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor does it cost a write; what raises in one is, with the step."""
    monkeypatch.setattr(PlainWitness, "build_connector_meta", lambda _self, _output: Errand([]))
    engine, _ = record(WITNESS, log_dir=str(tmp_path))
    engine.add("a", range(20), 3)
    before = engine.worker.worker_recording.log.ledger.next_sequence
    engine.run()
    assert engine.num_steps > 2
    assert engine.worker.worker_recording.log.ledger.next_sequence == before


@pytest.mark.parametrize(
    ("metadata", "is_work"),
    [(Errand([]), False), (Errand(["a"]), True), (KVConnectorMetadata(), False), (object(), True)],
)
def test_work_is_what_is_in_lists(metadata: object, is_work: bool) -> None:
    """An epoch alone is none; what cannot be looked into is."""
    assert carries_work(metadata) is is_work


def test_children_of_a_multi_connector_write_a_log_each(record: Record, tmp_path: Path) -> None:
    """Told apart by whom they wrap."""
    children = (Recorded(inner=Offloading()), Recorded(inner=WITNESS))
    engine, _ = record(setup=Several(children=children), log_dir=str(tmp_path))
    engine.add("a", range(20), 3)
    engine.run()
    engine.shutdown()
    found = {}
    for path in tmp_path.iterdir():
        log = open_log(path)
        if log.worker_rank is None:
            ((rank, of_worker),) = logs_of_workers(log).items()
            found[log.header["connector"]] = open_log(of_worker).header["connector"], rank
    assert found == {"OffloadingConnector": ("OffloadingConnector", 0), "Witness": ("Witness", 0)}


@attrs.define
class _Fails:
    """Raises at the n-th event that is observed."""

    left: int


@pytest.mark.parametrize("number", [1, 2, 5])
def test_where_writing_a_workers_log_fails_its_calls_are_forwarded(
    record: Record, on_worker_hook: Any, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The connector and the engine notice nothing."""
    calls: list[list[str]] = []
    outputs = []
    for is_broken in (False, True):
        calls.append([])
        on_worker_hook(calls[-1].append)
        engine, _ = record(WITNESS, log_dir=str(tmp_path / str(is_broken)))
        if is_broken:
            log, fails = engine.worker.worker_recording.log, _Fails(number)
            monkeypatch.setattr(log, "observe", _failing(log.observe, fails))
        use(engine)
        outputs.append(engine.outputs)
        assert not is_broken or log.is_ended
    assert calls[0] == calls[1]
    assert outputs[0] == outputs[1]


def _failing(observe: Callable[[e.Event], Any], fails: _Fails) -> Callable[[e.Event], Any]:
    def fail(event: e.Event) -> Any:
        fails.left -= 1
        if not fails.left:
            message = "of the recorder"
            raise ArithmeticError(message)
        return observe(event)

    return fail
