"""Models with several KV cache groups: served where all groups can be, declined with the reason where one cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vllm.v1.kv_cache_interface
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvledger.adapters.lab.simulation.connectors import KVLEDGER_TRANSFER
from kvledger.adapters.lab.simulation.engine import kv_cache_config, vllm_config
from kvledger.adapters.lab.simulation.hashed_model import block_bytes
from kvledger.adapters.vllm import KVLedgerConnector
from kvledger.adapters.vllm.groups import describe_groups
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT

pytestmark = pytest.mark.scheduler

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 1, "dtype": torch.int64}
FULL = FullAttentionSpec(**SIZES)
HISPARSE = [
    (getattr(vllm.v1.kv_cache_interface, name)(block_size=16, page_size=128, **more), name)
    for name, more in (("HiSparseHotSpec", {"blocks_per_request": 2}), ("HiSparseResidentSpec", {}))
    if hasattr(vllm.v1.kv_cache_interface, name)
]
"""From vLLM 0.33 on; only with them is an asynchronous load put off, behind a reset of the connector as well."""


def configuration(**more: Any) -> Any:
    """VLLM's configuration with our connector."""
    settings = vllm_config(
        num_blocks=20,
        kv_transfer={**KVLEDGER_TRANSFER, "kv_connector_extra_config": {"log_dir": None, "chunk_size": 16}},
    )
    for name, value in more.items():
        setattr(settings, name, value)
    return settings


def beside_full_attention(spec: Any, **group: Any) -> KVCacheConfig:
    """A model of a full attention group and one of `spec`."""
    config = kv_cache_config(20, 16, (0, 0))
    names = config.kv_cache_groups[1].layer_names
    config.kv_cache_groups[1] = KVCacheGroupSpec(names, spec, **group)
    return config


def test_vllm_hands_over_all_groups() -> None:
    """It asks the class; otherwise it would turn its hybrid KV cache manager off."""
    assert supports_hma(KVLedgerConnector)


@pytest.mark.parametrize("windows", [(0,), (0, 0), (0, 48), (48, 0), (64, 32, 0)])
def test_full_attention_and_windows_are_served(windows: tuple[int, ...]) -> None:
    """In whatever order; a window is told to the ledger, and stands in the log's header."""
    groups = describe_groups(configuration(), kv_cache_config(20, 16, windows))
    assert (groups.windows, groups.declined) == (windows, ())
    connector = KVLedgerConnector(configuration(), KVConnectorRole.SCHEDULER, kv_cache_config(20, 16, windows))
    assert connector.scheduler_side.journal.configuration.windows == windows
    assert tuple(connector.scheduler_side.log.store.header["configuration"]["windows"]) == windows  # type: ignore[attr-defined]
    connector.shutdown()


def test_groups_of_layers_with_specs_of_their_own_are_served() -> None:
    """One spec a layer, all of them full attention, or all with one window."""
    config = kv_cache_config(20, 16, (0, 48))
    names = config.kv_cache_groups[0].layer_names
    per_layer = dict(zip(names, (FULL, FULL), strict=True))
    config.kv_cache_groups[0] = KVCacheGroupSpec(
        names, UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=per_layer)
    )
    assert describe_groups(configuration(), config).declined == ()


def test_pages_of_different_groups_that_overlap_decline_the_model() -> None:
    """What one group saves would be part of what another one saves, and loading one would spoil the other."""
    config = kv_cache_config(20, 16, (0, 48))
    config.kv_cache_tensors[0].block_stride *= 2
    (reason,) = describe_groups(configuration(), config).declined
    assert "overlap" in reason


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,)), "MambaSpec"),
        (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=32), "ChunkedLocalAttentionSpec"),
        (EncoderOnlyAttentionSpec(**SIZES), "EncoderOnlyAttentionSpec"),
        (CrossAttentionSpec(**SIZES), "CrossAttentionSpec"),
        (SlidingWindowSpec(**SIZES, sliding_window=48, extra_retained_tokens=2), "different windows"),
        (FullAttentionSpec(**{**SIZES, "block_size": 32}), "blocks of 32 tokens, but group 0 has blocks of 16"),
        *HISPARSE,
    ],
)
def test_a_group_that_cannot_be_served_declines_the_model(
    spec: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log and the people are told which group and why; both sides start, and nothing is promised or kept."""
    config = beside_full_attention(spec)
    (declined,) = describe_groups(configuration(), config).declined
    assert declined.startswith("group 1 (")
    assert reason in declined
    connector = KVLedgerConnector(configuration(), KVConnectorRole.SCHEDULER, config)
    side = connector.scheduler_side
    assert side.journal.is_disabled
    assert any("declined: group 1" in record.getMessage() or reason in record.getMessage() for record in caplog.records)
    worker = KVLedgerConnector(configuration(), KVConnectorRole.WORKER, config)
    worker.register_kv_caches({})
    worker.shutdown()
    connector.shutdown()


@pytest.mark.parametrize(
    ("group", "reason"),
    [({"host_resident": True}, "host memory"), ({"enable_kv_transfer": False}, "excluded from KV transfer")],
)
def test_a_group_that_lives_elsewhere_declines_the_model(group: dict[str, Any], reason: str) -> None:
    """A replica that is rebuilt, or memory that is not the device's."""
    (declined,) = describe_groups(configuration(), beside_full_attention(FULL, **group)).declined
    assert reason in declined


def test_a_model_that_sees_only_windows_is_declined() -> None:
    """There is no group along which a prefix could be counted."""
    (declined,) = describe_groups(configuration(), kv_cache_config(20, 16, (64, 32))).declined
    assert "every group sees only a window" in declined
    assert "--disable-hybrid-kv-cache-manager" in declined


def test_speculation_with_windows_is_declined() -> None:
    """A draft that is taken back may need what the window has left."""
    speculating = configuration(speculative_config=object())
    (declined,) = describe_groups(speculating, kv_cache_config(20, 16, (0, 48))).declined
    assert "speculative" in declined
    assert describe_groups(speculating, kv_cache_config(20, 16)).declined == ()


def test_the_bytes_of_a_block_are_counted_once_for_all_groups(make_engine: Any) -> None:
    """The groups lie on the same memory, and scheduler and worker agree on how much of it a slot takes."""
    engine = make_engine(num_blocks=40, windows=(0, 48, 0), chunk_size=16, host_bytes=10 * block_bytes(16))
    assert engine.projections.configuration.num_slots == 10
    assert engine.worker._worker_side._pool.slot_bytes == block_bytes(16)


def test_a_declined_model_is_served_as_without_a_connector(make_engine: Any) -> None:
    """Requests run, nothing is saved, and the log says why."""
    engine = make_engine(num_blocks=20, windows=(48, 48), chunk_size=16)
    engine.add("a", range(60), 20)
    engine.serve("b", range(60), 20)
    engine.check_outputs()
    assert [type(event) for _, event in engine.events()] == [e.LogNote, e.LogNote]
    assert "declined: every group" in engine.logged(e.LogNote)[1].text


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("model_runner_v2", [False, True])
def test_a_preempted_request_of_a_hybrid_model_recovers(
    make_engine: Any, async_scheduling: bool, model_runner_v2: bool
) -> None:
    """Nothing of what it had computed is computed again, and what it reads in either group is right."""
    engine = make_engine(
        num_blocks=34,
        windows=(48, 0),
        chunk_size=32,
        enable_prefix_caching=False,
        async_scheduling=async_scheduling,
        model_runner_v2=model_runner_v2,
        max_deferred_lookups=100,
    )
    for number in range(3):
        engine.add(f"r{number}", range(100 * number, 100 * number + 90), 50)
    engine.run()
    engine.check_outputs()
    engine.check_released()
    assert engine.figures.num_preemptions
    assert engine.figures.num_tokens_recovered > 80
    assert engine.figures.num_tokens_recomputed == 0
    loads = engine.logged(e.LoadIssued)
    assert all(load.is_async for load in loads)
    assert any(NO_SLOT in load.slots for load in loads)
    assert not engine.logged(e.BlockTableObserved), "nulled blocks are no difference"


def test_a_load_that_fails_costs_its_request_and_not_the_engine(make_engine: Any) -> None:
    """VLLM cannot be told of blocks here, so the request is told of; it recomputes."""
    engine = make_engine(num_blocks=34, windows=(0, 48), chunk_size=32, enable_prefix_caching=False)

    def broken(*_arguments: Any) -> Any:
        message = "the host is gone"
        raise RuntimeError(message)

    engine.worker._worker_side._async_engine.start_load = broken
    for number in range(3):
        engine.add(f"r{number}", range(100 * number, 100 * number + 90), 50)
    engine.run()
    engine.check_outputs()
    engine.check_released()
    assert engine.figures.num_loads_failed


def test_a_prompt_can_be_loaded_up_to_its_last_whole_chunk(make_engine: Any) -> None:
    """Its middle was freed before it was settled; the next turn of a conversation comes back for it."""
    engine = make_engine(num_blocks=60, windows=(0, 48), chunk_size=32, enable_prefix_caching=False)
    engine.serve("first", range(150), 2)
    engine.serve("next turn", [*range(150), *engine.outputs["first"], *range(300, 320)], 2)
    (answer,) = engine.logged(e.LookupAnswered, request_id="next turn")
    assert answer.num_external_tokens == 128


def test_a_step_without_the_request_ends_what_can_be_known(make_engine: Any) -> None:
    """VLLM may have freed pages on the way to finding no room for it, and others may have written them."""
    engine = make_engine(num_blocks=60, windows=(0, 48), chunk_size=32)
    engine.add("a", range(150), 30)
    engine.step()
    reader = engine.connector.scheduler_side._step_reader
    assert reader._processed == {"a": (0, 0)}
    engine.step()
    assert [event.num_settled_tokens for event in engine.logged(e.WindowLeft)] == [0]
    reader._processed_before, reader._processed = {}, {}
    engine.run()
    assert len(engine.logged(e.WindowLeft)) < 1 + len([s for s in engine.logged(e.StepScheduled) if s.settled])


def test_a_step_has_how_many_tokens_are_really_settled(make_engine: Any) -> None:
    """Not in whole chunks: 150 tokens in one step leave blocks 6 to 9 of a window of 48, and 5 for token 128."""
    engine = make_engine(num_blocks=60, windows=(0, 48), chunk_size=32)
    engine.serve("a", range(150), 4)
    step = next(event for event in engine.logged(e.StepScheduled) if event.settled)
    assert step.settled == ((0, 0, 150, 0),)
    save = engine.logged(e.SaveIssued)[0]
    assert save.before_forward
    assert [slot == NO_SLOT for slot in save.slots[1::2]] == [True] * 5 + [False] * 3


def test_a_model_without_any_kv_cache_group_is_declined(make_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As an instance that only encodes images has none: it starts, serves, and says why nothing is cached."""
    engine = make_engine(num_blocks=20, windows=(), enable_prefix_caching=False)
    assert "the model has no KV cache" in caplog.text
    assert engine.connector.get_num_new_matched_tokens(engine.add("image", range(20), 1), 0) == (0, False)
    engine.run()
    assert engine.finish_reasons == {"image": "length"}
    assert [note.text for note in engine.logged(e.LogNote)][1] == "declined: the model has no KV cache"
