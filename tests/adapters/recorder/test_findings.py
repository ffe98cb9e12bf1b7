"""What docs/findings.md says of vLLM 0.32's own connectors, each as the few calls that it takes.

On the unmodified connector and vLLM's scheduler, with the recorder and without: what is raised is the connector's, and
the log names it. Whoever reads here because a test fails: vLLM has mended something, and the page wants to say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.connectors import Example, NamedConnector, Recorded, Several
from sim.recorded import audited, events_of, said_in
from sim.versions import mended_in_0_33

from kvledger.adapters.lab.repro import record, rerun
from kvledger.adapters.lab.simulation.connectors import ConnectorSetup, Offloading, SimpleCPU
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.lab.simulation.hashed_model import CorruptKV, block_bytes
from kvledger.adapters.recorded.payloads import LookupReturned, TransferredFor
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

Story = Callable[[Any], None]


def reset_running(engine: Any) -> None:
    """A request whose first block is saved is preempted by a reset that the connector is not told of."""
    engine.add("a", range(20), 10)
    engine.step()
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()


def reset_twice(engine: Any) -> None:
    """Everything is to be forgotten while a copy is under way, and once more before the next step."""
    engine.add("a", range(20), 10)
    engine.step()
    for _ in range(2):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def reuse_after_copies(engine: Any) -> None:
    """An id ends, and arrives again before the step that would have told the connector of its end."""
    engine.add("a", range(20), 2)
    engine.step()
    engine.step()
    engine.add("a", range(100, 120), 3)
    engine.run()


def reuse_during_copies(engine: Any) -> None:
    """The same, while a copy of the one that ended is under way."""
    engine.add("a", range(20), 1)
    engine.step()
    engine.add("a", range(100, 120), 3)
    engine.step()
    engine.step()


def longer_by_a_block(engine: Any) -> None:
    """Three blocks are stored; who has the same ones, another one, and one token is looked up and loads."""
    for request_id, num_tokens in (("a", 50), ("b", 65)):
        engine.add(request_id, range(num_tokens), 1)
        engine.run()


def prefill_in_parts(engine: Any) -> None:
    """A prompt is stored in its first step, which computes a part of it, and is loaded as if it were whole."""
    for request_id in ("a", "b"):
        engine.add(request_id, range(100), 1)
        engine.run()


CASES: dict[str, tuple[ConnectorSetup, dict[str, Any], Story, type[BaseException], str]] = {
    story.__name__: (inner, options, story, error, where)
    for inner, options, story, error, where in (
        (Offloading(), {}, reset_running, AssertionError, "build_connector_meta"),
        (Offloading(), {}, reset_twice, AssertionError, "reset_cache"),
        (Offloading(), {}, reuse_after_copies, KeyError, "build_connector_meta"),
        (Offloading(), {}, reuse_during_copies, KeyError, "update_connector_output"),
        (Example(), {"enable_prefix_caching": False}, longer_by_a_block, FileNotFoundError, ""),
        (
            Example(),
            {"enable_prefix_caching": False, "max_num_batched_tokens": 48},
            prefill_in_parts,
            RuntimeError,
            "",
        ),
    )
}


MENDED = {"reset_running": mended_in_0_33}


def cases(*names: str) -> list[Any]:
    """To parametrize with."""
    return [pytest.param(name, marks=MENDED.get(name, ())) for name in names]


def started(inner: ConnectorSetup, options: dict[str, Any], *, is_recorded: bool) -> Any:
    """A small engine with that connector."""
    recorder = "KVLedgerRecorder" if isinstance(inner, Example) else "KVLedgerRecorderHMA"
    setup = Recorded(inner=inner, name=recorder) if is_recorded else inner
    return SimulatedEngine(setup=setup, num_blocks=20, host_bytes=1 << 22, chunk_size=16, **options)


@pytest.mark.parametrize("name", cases(*CASES))
def test_a_finding_is_the_connectors_own(name: str) -> None:
    """The same is raised with the recorder and without."""
    inner, options, story, error, _ = CASES[name]
    for is_recorded in (False, True):
        engine = started(inner, options, is_recorded=is_recorded)
        with pytest.raises(error):
            story(engine)
        engine.shutdown()


@pytest.mark.parametrize("name", cases(*(name for name, case in CASES.items() if case[4])))
def test_the_log_names_the_hook_and_is_driven_again(name: str) -> None:
    """The recorded calls, made again without an engine, raise the same in the same hook."""
    inner, options, story, error, hook = CASES[name]
    engine = started(inner, options, is_recorded=True)
    with pytest.raises(error):
        story(engine)
    recording = engine.scheduler.connector.recording
    engine.shutdown()
    (found,) = [violation for violation in audited(recording).violations if violation.rule == "RECORDED"]
    assert found.detail.startswith(f"hook {hook} raised: {error.__name__}")
    troubles = rerun(record(recording.log.configuration, events_of(recording)), run_recorded=True).troubles
    assert found.detail in {trouble.detail for trouble in troubles}


def test_example_connector_offers_less_than_nothing_for_one_token() -> None:
    """Once a prompt of at most a block has been stored, as no tokens; LAST_TOKEN names the answer."""
    engine = started(Example(), {"enable_prefix_caching": False}, is_recorded=True)
    for request_id, num_tokens in (("a", 16), ("b", 1)):
        engine.add(request_id, range(num_tokens), 1)
        engine.run()
    recording = engine.scheduler.connector.recording
    engine.shutdown()
    assert [told.num_external_tokens for told in said_in(recording, LookupReturned)] == [0, -16]
    assert "LAST_TOKEN" in {violation.rule for violation in audited(recording).violations}


@mended_in_0_33
def test_a_sibling_loads_into_a_block_that_offloading_connector_still_saves() -> None:
    """It is told of the blocks that are given for another child's load, and overlooks them (vllm#46951)."""
    theirs = NamedConnector(
        name="Neighbour", module="sim.neighbour", options={"num_tokens": 48, "num_steps": 2, "seed": 1}
    )
    setup = Recorded(inner=Several(children=(Offloading(), theirs)))
    engine: Any = SimulatedEngine(setup=setup, num_blocks=5, host_bytes=1 << 22, chunk_size=16, max_model_len=64)
    engine.add("a", range(20), 13)  # its last step fills its second block
    for _ in range(13):
        engine.step()
    engine.add("theirs", range(100, 150), 2)
    engine.step()
    recording = engine.scheduler.connector.recording
    engine.shutdown()
    (found,) = audited(recording).violations
    assert (found.rule, found.request_id) == ("BLOCK_REUSE_FENCED", "a")
    assert "goes to another request while save 0/1 still reads it" in found.detail


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_a_siblings_failed_load_left_is_stored_by_offloading_connector(policy: str) -> None:
    """And loaded by who comes with the same prompt; the log says that the load failed, and no rule names the store."""
    theirs = NamedConnector(name="Neighbour", module="sim.neighbour", options={"num_tokens": 32, "num_failures": 1})
    engine: Any = SimulatedEngine(
        setup=Recorded(inner=Several(children=(Offloading(), theirs))),
        num_blocks=20,
        host_bytes=1 << 22,
        chunk_size=16,
        enable_prefix_caching=False,
        kv_transfer={"kv_load_failure_policy": policy},
    )
    engine.add("theirs", range(40), 1)
    engine.run()
    assert engine.finish_reasons == {"theirs": "length" if policy == "recompute" else "error"}
    engine.add("ours", range(40), 1)
    with pytest.raises(CorruptKV, match="ours reads wrong KV"):
        engine.run()
    recording = engine.scheduler.connector.recording
    assert [event.request_id for _, event in events_of(recording) if isinstance(event, e.LoadFailed)] == ["theirs"]
    assert audited(recording).violations == []


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_lazy_engine_is_never_idle(is_recorded: bool) -> None:
    """Two prompts of two blocks in a pool of three, and a host pool of two: each empty step stores a block again."""
    inner = SimpleCPU(is_lazy=True, num_questions=1)
    engine: Any = SimulatedEngine(
        setup=Recorded(inner=inner) if is_recorded else inner,
        num_blocks=4,
        host_bytes=3 * block_bytes(16),
        chunk_size=16,
        max_model_len=64,
    )
    for request_id, first in (("a", 0), ("b", 200)):
        engine.add(request_id, range(first, first + 32), 1)
    num_steps = 100
    for _ in range(num_steps):
        assert engine.scheduler.has_requests()
        engine.step()
    assert not engine.scheduler.requests
    assert engine.finish_reasons.keys() == {"a", "b"}
    connector = engine.scheduler.connector
    assert connector.has_pending_push_work()
    if is_recorded:
        stored = [told.copy for told in said_in(connector.recording, TransferredFor) if not told.copy.is_load]
        assert len(stored) > num_steps * 0.9
        assert len({tuple(copy.block_ids) for copy in stored}) <= 3
        assert audited(connector.recording).violations == []
