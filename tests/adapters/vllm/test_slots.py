"""Scheduler and worker have the same slots, whatever vLLM makes of a model's layers; and say so where they have not."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from kvledger.adapters.lab.simulation.connectors import KVLEDGER_TRANSFER
from kvledger.adapters.lab.simulation.engine import allocate, vllm_config
from kvledger.adapters.vllm import KVLedgerConnector
from kvledger.adapters.vllm.groups import describe_groups
from kvledger.adapters.vllm.metadata import WorkerStart
from kvledger.lifecycle import ConfigurationError
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

BLOCK_SIZE = 16


def attention(num_kv_heads: int, head_size: int = 1, dtype: torch.dtype = torch.int64) -> KVCacheSpec:
    """A layer with keys and values."""
    return FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype)


def latent(head_size: int, **more: Any) -> KVCacheSpec:
    """A layer with one vector a token."""
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "dtype": torch.int64, **more}
    return MLAAttentionSpec(head_size=head_size, **sizes)


def layers(**of_kind: list[KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """A model's layers, in the order in which the model registers them."""
    return {
        f"model.layers.{number}.{kind}": spec for kind, specs in of_kind.items() for number, spec in enumerate(specs)
    }


MODELS = {
    "MLA with an indexer": layers(attn=[latent(9)] * 3, indexer=[latent(2, cache_role=SparseCacheRole.INDEXER)] * 3),
    "an indexer first": layers(indexer=[latent(2, cache_role=SparseCacheRole.INDEXER)] * 3, attn=[latent(9)] * 3),
    "MLA and an indexer of another precision": layers(attn=[latent(9)] * 2, indexer=[latent(2, dtype=torch.float64)]),
    "a drafter of another page size": layers(attn=[attention(2, 2)] * 4, drafter=[attention(1)]),
    "variable GQA": layers(attn=[attention(heads) for heads in (1, 8, 8, 8, 4, 4, 1)]),
    "padded pages": layers(attn=[latent(9, page_size_padded=1536)] * 3, indexer=[latent(2)] * 2),
    "layers alike": layers(attn=[attention(2)] * 3),
}
LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]


def page_bytes(specs: dict[str, KVCacheSpec]) -> int:
    """Bytes of one block over all layers."""
    return sum(spec.page_size_bytes for spec in specs.values())


def test_scheduler_and_worker_count_the_same_slots(make_engine: Any) -> None:
    """Seven layers of 1 to 8 heads: counted by the first layer alone the scheduler had 311 slots, the worker 64."""
    specs = MODELS["variable GQA"]
    host_bytes = 311 * len(specs) * specs["model.layers.0.attn"].page_size_bytes
    engine = make_engine(num_blocks=40, max_model_len=512, specs=specs, chunk_size=16, host_bytes=host_bytes)
    assert engine.worker._worker_side._pool.num_slots == engine.projections.configuration.num_slots == 64


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_slot_is_saved_to_and_loaded_from(
    make_engine: Any, model: str, layout: str, async_scheduling: bool
) -> None:
    """Three times as many blocks as there are slots, each page of each layer compared when it is read again."""
    specs = MODELS[model]
    engine = make_engine(
        num_blocks=60,
        max_model_len=512,
        specs=specs,
        layout=layout,
        chunk_size=16,
        host_bytes=20 * page_bytes(specs),
        enable_prefix_caching=False,
        async_scheduling=async_scheduling,
    )
    assert engine.projections.configuration.num_slots == 20
    for number in range(6):
        for turn in ("first", "again"):
            engine.serve(f"{number} {turn}", range(200 * number, 200 * number + 160), 4)
    engine.check_outputs()
    assert len(engine.logged(e.SaveCompleted)) >= 6
    assert len(engine.logged(e.LoadCompleted)) == 6
    assert not engine.logged(e.SaveFailed)
    assert not engine.logged(e.LoadFailed)
    assert {slot for issued in engine.logged(e.SaveIssued) for slot in issued.slots} == set(range(20))


def window(num_kv_heads: int) -> KVCacheSpec:
    """A layer that sees 48 tokens."""
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": num_kv_heads, "head_size": 1}
    return SlidingWindowSpec(sliding_window=48, dtype=torch.int64, **sizes)


SEVERAL_GROUPS = {
    "one page size": layers(attn=[attention(2)] * 2, window=[window(2)] * 4),
    "pages of one size in each group": layers(attn=[attention(1)] * 2, window=[window(2)] * 4),
    "pages of two sizes in one group": layers(attn=[attention(1), attention(2)], window=[window(2)] * 4),
    "pages of two sizes in both groups": layers(
        attn=[attention(1), attention(2)] * 2, window=[window(1), window(2)] * 4
    ),
}


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("model", [*MODELS, *SEVERAL_GROUPS])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_both_sides_come_to_the_same_from_what_each_is_given(model: str, layout: str, num_ranks: int) -> None:
    """The scheduler is not given every layer's spec. Served or declined: both, and with the same slots."""
    settings = configuration(num_ranks)
    specs = {**MODELS, **SEVERAL_GROUPS}[model]
    of_scheduler, of_workers, registered = allocate(settings, specs, layout, 200, num_ranks)
    scheduler = KVLedgerConnector(settings, KVConnectorRole.SCHEDULER, of_scheduler)
    declined = describe_groups(settings, of_scheduler).declined
    starts = {}
    for rank, (config, kv_caches) in enumerate(zip(of_workers, registered, strict=True)):
        assert describe_groups(settings, config).declined == declined
        worker = KVLedgerConnector(settings, KVConnectorRole.WORKER, config)
        worker.register_kv_caches(kv_caches)
        start = worker.get_handshake_metadata()
        assert start is not None
        assert num_ranks * start.num_slots * start.slot_bytes <= HOST_BYTES
        starts[rank] = attrs.evolve(start, rank=rank)
        worker.shutdown()
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, rank): start for rank, start in starts.items()})
    assert scheduler.scheduler_side.journal.is_disabled == bool(declined)
    scheduler.shutdown()


# --- where they do not agree --------------------------------------------------------------------------

HOST_BYTES = 1 << 20


def configuration(num_ranks: int = 1) -> Any:
    """VLLM's configuration with our connector."""
    settings = vllm_config(
        num_blocks=40,
        max_model_len=256,
        kv_transfer={
            **KVLEDGER_TRANSFER,
            "kv_connector_extra_config": {"log_dir": None, "chunk_size": 16, "host_bytes": HOST_BYTES},
        },
    )
    settings.parallel_config.world_size = num_ranks
    return settings


def scheduler_connector(num_ranks: int = 1) -> KVLedgerConnector:
    """The scheduler's half for layers alike."""
    settings = configuration(num_ranks)
    of_scheduler, _, _ = allocate(settings, MODELS["layers alike"], "LBHNC", 40, num_ranks)
    return KVLedgerConnector(settings, KVConnectorRole.SCHEDULER, of_scheduler)


def start_of(connector: KVLedgerConnector, **changes: Any) -> WorkerStart:
    """What a worker has that agrees with the scheduler, but for `changes`."""
    num_slots = connector.scheduler_side.journal.configuration.num_slots
    return attrs.evolve(WorkerStart(0, num_slots, slot_bytes=1536, copies_async=True), **changes)


def test_a_worker_with_other_slots_is_refused_at_start_with_both_figures() -> None:
    """Of two ranks the second one has a smaller pool: saves to what it lacks would fail for ever."""
    connector = scheduler_connector(num_ranks=2)
    num_slots = connector.scheduler_side.journal.configuration.num_slots
    agrees, differs = start_of(connector), start_of(connector, rank=1, num_slots=64)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): agrees})
    with pytest.raises(ConfigurationError) as caught:
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): agrees, (0, 1): differs})
    message = str(caught.value)
    assert f"rank 1 has a host pool of 64 slots (1536 bytes each), the scheduler expects {num_slots}" in message
    assert "rank 0" not in message
    assert "start all processes of the engine with the same versions" in message
    assert "host_bytes" in message


def test_what_other_connectors_say_at_start_is_not_ours() -> None:
    """`MultiConnector` hands the first child's answer to every child."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

    class Theirs(KVConnectorHandshakeMetadata):
        """Of another connector."""

    connector = scheduler_connector()
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): Theirs()})
    assert not connector.scheduler_side.journal.is_disabled
    connector.shutdown()


@pytest.fixture
def among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's connector is another one, of which ours is a child."""
    monkeypatch.setattr("vllm.distributed.kv_transfer.kv_transfer_state._KV_CONNECTOR_AGENT", object())


@pytest.mark.usefixtures("among_others")
def test_among_other_connectors_the_first_step_reports_and_ours_declines(
    make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """There vLLM would hand our answer to the others in place of their own, so nothing is said at start."""
    engine = make_engine(num_blocks=40, chunk_size=16)
    assert engine.worker.get_handshake_metadata() is None
    worker_side = engine.worker._worker_side
    worker_side._start_to_report = attrs.evolve(worker_side._start_to_report, num_slots=64)
    for turn in ("first", "again"):
        engine.serve(turn, range(100), 8)
    engine.check_outputs()
    assert engine.connector.scheduler_side.journal.is_disabled
    (note,) = (note for note in engine.logged(e.LogNote) if note.text.startswith("declined"))
    for told in (note.text, caplog.text):
        assert "64 slots" in told
        assert "start all processes" in told
    assert not engine.logged(e.LoadIssued)


@pytest.mark.usefixtures("among_others")
def test_what_agrees_is_reported_in_the_first_step_and_never_again(make_engine: Any) -> None:
    """And is no event."""
    engine = make_engine(num_blocks=40, chunk_size=16)
    told: list[WorkerStart] = []
    engine.on_output = lambda output: told.extend(getattr(output.kv_connector_worker_meta, "starts", ()))
    engine.serve("a", range(100), 8)
    assert [start.num_slots for start in told] == [engine.projections.configuration.num_slots]
    assert not engine.connector.scheduler_side.journal.is_disabled


@pytest.mark.parametrize("says", ["at start", "in the first step"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_where_the_worker_declines_the_model_nobody_is_served(
    make_engine: Any, request: pytest.FixtureRequest, says: str, async_scheduling: bool
) -> None:
    """A layer that the scheduler is not shown keeps something else than KV."""
    if says == "in the first step":
        request.getfixturevalue("among_others")
    hidden = HiddenStateCacheSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=3, dtype=torch.int64)
    engine = make_engine(
        num_blocks=40,
        max_model_len=512,
        chunk_size=16,
        specs=layers(attn=[latent(9)] * 2, hidden=[hidden]),
        async_scheduling=async_scheduling,
        load_mode="async",
        save_mode="async",
    )
    for turn in ("first", "again"):
        engine.serve(turn, range(100), 8)
    engine.check_outputs()
    assert engine.connector.scheduler_side.journal.is_disabled
    assert "declined: group 0 (HiddenStateCacheSpec, MLAAttentionSpec)" in engine.logged(e.LogNote)[1].text
    assert not engine.logged(e.LoadIssued)


def test_a_slot_that_cannot_be_written_fails_one_save_and_not_every_one(make_engine: Any) -> None:
    """While others are free it is not tried again."""
    engine = make_engine(num_blocks=60, chunk_size=16, save_mode="sync", enable_prefix_caching=False)
    copies = engine.worker._worker_side._engine
    save = copies.start_save

    def failing(block_ids: Any, slots: Any) -> Any:
        if 3 in slots:
            message = "slot 3 is broken"
            raise RuntimeError(message)
        return save(block_ids, slots)

    copies.start_save = failing
    for number in range(10):
        engine.serve(str(number), range(100 * number, 100 * number + 70), 2)
    engine.check_outputs()
    assert len(engine.logged(e.SaveFailed)) == 1
    assert len(engine.logged(e.SaveCompleted)) >= 9
