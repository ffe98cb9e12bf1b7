"""A copy that moves what is not there: saved blocks that are not computed, loaded blocks that nobody fills.

vllm#16928 (its silent form), vllm-ascend#5725 and #6988: a block was saved before its last tokens were computed. The
log of the recorded connector was called sound, also with digests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from sim.connectors import Example, NamedConnector, Recorded, Several
from sim.recorded import audited, said_in
from vllm.v1.request import RequestStatus

from kvledger.adapters.lab.simulation.connectors import ConnectorSetup, Offloading, SimpleCPU
from kvledger.adapters.lab.simulation.hashed_model import CorruptKV
from kvledger.adapters.recorded.payloads import Transferred

pytestmark = pytest.mark.scheduler

Record = Callable[..., tuple[Any, Any]]
NO_CACHE = {"enable_prefix_caching": False}


def named(recording: Any) -> dict[str, list[str]]:
    """Rule → what it says."""
    found: dict[str, list[str]] = {}
    for violation in audited(recording).violations:
        found.setdefault(violation.rule, []).append(f"{violation.request_id}: {violation.detail}")
    return found


def serve(engine: Any, *request_ids: str) -> None:
    """Requests with the same prompt of 100 tokens, one after the other; as a real engine, this one reads wrong KV."""
    check = engine.model._check

    def read(*arguments: Any) -> None:
        with suppress(CorruptKV):
            check(*arguments)

    engine.model._check = read
    for request_id in request_ids:
        engine.add(request_id, range(100), 1)
        engine.run()
    engine.model._check = check


def wrapped(engine: Any) -> Any:
    """The recorded connector on the scheduler's side."""
    return engine.scheduler.connector.wrapped


def saves_whole_prompts(connector: Any) -> None:
    """OffloadingConnector takes a request's prompt for computed, as far as it has blocks."""
    scheduler = connector.connector_scheduler
    offloadable = scheduler._calc_num_offloadable_tokens
    scheduler._calc_num_offloadable_tokens = lambda status, _: offloadable(status, status.req.num_prompt_tokens)


def on_metadata(connector: Any, change: Callable[[Any], None]) -> None:
    """Change what the connector hands to its workers."""
    build = connector.build_connector_meta

    def build_connector_meta(scheduler_output: Any) -> Any:
        metadata = build(scheduler_output)
        change(metadata)
        return metadata

    connector.build_connector_meta = build_connector_meta


# --- saves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("digests", ["off", "all"])
@pytest.mark.parametrize(("budget", "num_computed"), [(95, 95), (81, 81), (256, 100)])
def test_a_block_that_is_saved_before_its_last_tokens_are_computed_is_named(
    record: Record, budget: int, num_computed: int, digests: str
) -> None:
    """ExampleConnector saves six blocks in the first step of a prompt, which ends inside of the sixth."""
    setup = Recorded(inner=Example(), name="KVLedgerRecorder")
    engine, recording = record(setup=setup, max_num_batched_tokens=budget, digests=digests, **NO_CACHE)
    serve(engine, "first", "again")
    found = named(recording)
    if num_computed == 100:
        assert found == {}
        return
    (detail,) = found.pop("CHUNK_COMPLETE")
    assert detail.startswith("first: save 0 reads block 6, which holds tokens 80 to 95")
    assert detail.endswith(f"but only {num_computed} tokens of the request are computed")
    loaded = found.pop("BYTES_UNCHANGED", [])
    assert [each.split(",")[0] for each in loaded] == ["again: block 5 of the table"] * (digests == "all")
    assert found == {}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_part_of_a_block_that_offloading_connector_saves_is_named(
    record: Record, block_size: int, async_scheduling: bool
) -> None:
    """It believes that a prompt is computed as far as there are blocks; other requests compute at the same time."""
    engine, recording = record(
        Offloading(),
        max_num_batched_tokens=90,
        block_size=block_size,
        async_scheduling=async_scheduling,
        digests="all",
        **NO_CACHE,
    )
    saves_whole_prompts(wrapped(engine))
    engine.add("other", range(500, 520), 30)
    engine.step()
    serve(engine, "first", "again")
    found = named(recording)
    assert {detail.split(":")[0] for detail in found.pop("CHUNK_COMPLETE")} <= {"first", "other"}
    assert set(found) <= {"BYTES_UNCHANGED"}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("status", ["FINISHED_ERROR", "FINISHED_ABORTED"])
@pytest.mark.parametrize("budget", [40, 48])
def test_what_is_saved_of_a_request_that_ended_in_the_middle_of_its_prompt_was_computed(
    record: Record, budget: int, status: str, async_scheduling: bool
) -> None:
    """OffloadingConnector 0.32 takes the whole prompt of a request that ended with an error for computed.

    Of one that was aborted it saves what was computed (`offloading/scheduler.py`, _build_store_jobs). A later request
    loads the rest of the last block, which nobody has computed.
    """
    engine, recording = record(
        Offloading(), max_num_batched_tokens=budget, async_scheduling=async_scheduling, **NO_CACHE
    )
    engine.add("first", range(100), 1)
    engine.step()
    engine.scheduler.finish_requests("first", RequestStatus[status])
    engine.run()
    found = named(recording)
    if status == "FINISHED_ABORTED" or budget % 16 == 0:
        assert found == {}
        return
    (detail,) = found.pop("CHUNK_COMPLETE")
    assert "reads block 3, which holds tokens 32 to 47, but only 40 tokens of the request are computed" in detail
    assert found == {}
    engine.add("again", range(100), 1)
    with pytest.raises(CorruptKV, match="again reads wrong KV"):
        engine.run()


@pytest.mark.parametrize(("budget", "is_named"), [(40, True), (48, False)])
def test_a_part_of_a_block_that_nixl_copies_in_the_middle_of_a_prompt_is_named(
    record: Record, budget: int, is_named: bool
) -> None:
    """With a host buffer NIXL 0.32 copies the new blocks of each step, and never again the rest of one filled in part.

    The last block of the prompt is copied in part, too, which is right.
    """
    engine, recording = record(
        NamedConnector(name="PullWithoutWorker", module="sim.nixl"), max_num_batched_tokens=budget
    )
    wrapped(engine).connector_scheduler.use_host_buffer = True
    request = engine.add("first", range(100), 1)
    request.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
    for _ in range(3):
        engine.step()
    saves = [copy for copy in said_in(recording, Transferred) if not copy.is_load]
    assert sum(len(copy.block_ids) for copy in saves) == 7
    details = named(recording).get("CHUNK_COMPLETE", [])
    assert bool(details) is is_named
    if is_named:
        assert "block 3, which holds tokens 32 to 47, but only 40 tokens of the request are computed" in details[0]


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_what_is_saved_of_a_request_that_lost_its_blocks_was_computed(record: Record, end: str) -> None:
    """Aborted, or preempted by a reset, when 40 of 100 tokens are computed."""
    engine, recording = record(Offloading(), max_num_batched_tokens=40, **NO_CACHE)
    engine.add("first", range(100), 1)
    engine.step()
    connector = wrapped(engine)
    blocks = list(engine.scheduler.kv_cache_manager.get_block_ids("first")[0])
    on_metadata(connector, lambda metadata: save(metadata, blocks))
    if end == "abort":
        engine.abort("first")
    else:
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    engine.scheduler.schedule()
    (detail,) = named(recording)["CHUNK_COMPLETE"]
    assert "which holds tokens 32 to 47, but only 40 tokens of the request are computed" in detail


def save(metadata: Any, block_ids: list[int]) -> None:
    """One save of these blocks of "first", as OffloadingConnector hands them to its workers."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    spec = GPULoadStoreSpec(block_ids, group_sizes=[len(block_ids)], block_indices=[0])
    metadata.store_jobs[99] = TransferJob("first", spec, spec)


def test_the_save_of_a_block_that_was_cached_or_loaded_is_sound(record: Record) -> None:
    """A session, preemptions, loads and shared prefixes in a small pool, saved lazily and at once."""
    for inner in (SimpleCPU(num_questions=2), SimpleCPU(is_lazy=True, num_questions=2), Offloading(num_questions=2)):
        engine, recording = record(inner, num_blocks=16, max_num_batched_tokens=40, digests="all", max_model_len=200)
        for number in range(12):
            engine.add(f"r{number}", range(number % 3 * 500, number % 3 * 500 + 50 + 7 * number), 9)
            if number % 4 == 3:
                engine.step()
                engine.abort(f"r{number}")
        engine.run(2000)
        assert named(recording) == {}


# --- loads -------------------------------------------------------------------------------------


def loads_too_little(metadata: Any) -> None:
    """The last block of each load is left out; of ExampleConnector the whole load."""
    for part in getattr(metadata, "metadata", (metadata,)):
        match type(part).__name__:
            case "OffloadingConnectorMetadata":
                for job in part.load_jobs.values():
                    job.dst_spec.block_ids = job.dst_spec.block_ids[:-1]
                    job.src_spec.block_ids = job.src_spec.block_ids[:-1]
                    job.dst_spec.group_sizes = [job.dst_spec.group_sizes[0] - 1]
            case "SimpleCPUOffloadMetadata":
                del part.load_gpu_blocks[-1:], part.load_cpu_blocks[-1:]
            case "ExampleConnectorMetadata":
                part.requests[:] = [request for request in part.requests if request.is_store]


CONNECTORS: dict[str, tuple[Callable[[], ConnectorSetup], dict[str, Any]]] = {
    "offloading": (Offloading, {}),
    "offloading-late": (lambda: Offloading(num_questions=3), {"async_scheduling": True}),
    "simple": (SimpleCPU, {}),
    "simple-late": (lambda: SimpleCPU(num_questions=3), {"async_scheduling": True}),
    "example": (Example, NO_CACHE),
    "multi": (lambda: Several(children=(SimpleCPU(), Offloading())), {}),
}


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize("name", CONNECTORS)
def test_a_load_of_fewer_blocks_than_were_claimed_is_named(record: Record, name: str, is_partial: bool) -> None:
    """The connector reports the load as done, or, within the step, reports no block as failed."""
    make, options = CONNECTORS[name]
    recorder = "KVLedgerRecorder" if name == "example" else "KVLedgerRecorderHMA"
    engine, recording = record(setup=Recorded(inner=make(), name=recorder), max_model_len=512, **options)
    serve(engine, "first")
    engine.scheduler.reset_prefix_cache()
    if is_partial:
        on_metadata(wrapped(engine), loads_too_little)
    serve(engine, "again")
    engine.shutdown()
    found = named(recording)
    assert set(found) == ({"LOAD_COMPLETE"} if is_partial else set())
    assert all(detail.startswith("again: vLLM counts") for detail in found.get("LOAD_COMPLETE", ()))


def test_a_load_within_a_step_that_ends_the_engine_is_named_too(record: Record) -> None:
    """The step reads wrong KV, and the engine ends before the workers report anything."""
    engine, recording = record(setup=Recorded(inner=Example(), name="KVLedgerRecorder"), **NO_CACHE)
    serve(engine, "first")
    on_metadata(wrapped(engine), loads_too_little)
    engine.add("again", range(100), 1)
    with pytest.raises(CorruptKV):
        engine.run()
    engine.shutdown()
    (detail,) = named(recording)["LOAD_COMPLETE"]
    assert detail.startswith("again: vLLM counts 6 blocks as loaded")


@pytest.mark.parametrize(("failed", "is_named"), [(0, False), (3, False), (5, True)])
def test_blocks_behind_one_that_is_reported_as_failed_need_no_load(record: Record, failed: int, is_named: bool) -> None:
    """They are computed again. Block 5 is left out, and the first failed one is before, or is behind it."""
    engine, recording = record(Offloading(), kv_transfer={"kv_load_failure_policy": "recompute"})
    serve(engine, "first")
    engine.scheduler.reset_prefix_cache()

    def leave_out_the_fifth(metadata: Any) -> None:
        for job in metadata.load_jobs.values() if not reported else ():
            blocks = list(job.dst_spec.block_ids)
            reported.append(int(blocks[failed]))
            job.dst_spec.block_ids = job.dst_spec.block_ids[[0, 1, 2, 3, 5]]
            job.src_spec.block_ids = job.src_spec.block_ids[[0, 1, 2, 3, 5]]
            job.dst_spec.group_sizes = [5]

    reported: list[int] = []
    on_metadata(wrapped(engine), leave_out_the_fifth)
    engine.on_output = lambda output: output.invalid_block_ids.update(reported[:1] if output.finished_recving else ())
    serve(engine, "again")
    assert set(named(recording)) == ({"LOAD_COMPLETE"} if is_named else set())


def test_loads_of_a_connector_without_a_decoder_are_not_judged(record: Record) -> None:
    """Nor are those of such a child next to one with a decoder."""
    neighbour = NamedConnector(
        name="Neighbour", module="sim.neighbour", options={"num_tokens": 48, "num_steps": 2, "seed": 1}
    )
    for setup in (Recorded(inner=neighbour), Recorded(inner=Several(children=(Offloading(), neighbour)))):
        engine, recording = record(setup=setup)
        engine.add("theirs", range(100), 5)
        engine.run()
        assert named(recording) == {}
