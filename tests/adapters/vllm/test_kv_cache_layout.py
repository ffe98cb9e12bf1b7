"""`kv_cache_layout` is what vLLM is asked for: a block is then one run of memory, and copies of it stay exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from kvledger.adapters.lab.simulation.connectors import KVLEDGER_TRANSFER
from kvledger.adapters.lab.simulation.engine import allocate, vllm_config
from kvledger.adapters.vllm.worker_side import describe_pages
from kvledger.storage.kv import BlockLayout, HostPool, make_copy_engine

pytestmark = pytest.mark.scheduler

NUM_BLOCKS, NUM_LAYERS = 20, 5
SPECS: dict[str, KVCacheSpec] = {
    f"model.layers.{number}.attn": FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=torch.bfloat16)
    for number in range(NUM_LAYERS)
}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
}


def ours(kv_cache_layout: str | None) -> dict[str, Any]:
    """Our connector, asked for that layout."""
    settings = {"log_dir": None, "host_bytes": 1 << 20, "kv_cache_layout": kv_cache_layout}
    return {**KVLEDGER_TRANSFER, "kv_connector_extra_config": settings}


def configuration(kv_transfer: dict[str, Any]) -> VllmConfig:
    """VLLM's configuration with this connector."""
    return vllm_config(
        num_blocks=NUM_BLOCKS,
        max_model_len=256,
        kv_transfer=kv_transfer,
    )


def resolved(kv_transfer: dict[str, Any], backend: type[Any] = TritonAttentionBackend) -> str:
    """The layout that vLLM's engine core settles on, for a model on that backend."""
    supported = [layout.name for layout in get_supported_kv_cache_layouts([backend])]
    return str(resolve_kv_cache_layout(configuration(kv_transfer), [supported], SPECS.values()).name)


def registered(layout: str) -> tuple[dict[str, torch.Tensor], BlockLayout]:
    """The tensors that vLLM's worker registers in that layout, full of noise, and what we read from them."""
    _, _, (kv_caches,) = allocate(configuration(ours(None)), SPECS, layout, NUM_BLOCKS, num_ranks=1)
    generator = torch.Generator().manual_seed(20260101)
    for tensor in kv_caches.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return kv_caches, describe_pages(kv_caches, NUM_BLOCKS)


@pytest.mark.parametrize(
    ("asked", "got", "num_runs"), [("BLNHC", "BLNHC", 1), ("BLHNC", "BLHNC", 1), (None, "LBNHC", NUM_LAYERS)]
)
def test_a_block_is_one_run_in_the_layouts_that_can_be_asked_for(asked: str | None, got: str, num_runs: int) -> None:
    """Where nothing is asked for, vLLM keeps its own layout and a block has a run a layer."""
    assert resolved(ours(asked)) == got
    kv_caches, layout = registered(got)
    assert len(layout.runs()) == num_runs
    assert layout.block_bytes == sum(tensor[0].nbytes for tensor in kv_caches.values())


@pytest.mark.parametrize("layout_name", ["BLNHC", "BLHNC"])
def test_copies_of_such_blocks_are_exact(layout_name: str) -> None:
    """Into slots and back into other blocks; all that was not asked for stays what it was."""
    kv_caches, layout = registered(layout_name)
    before = {name: tensor.clone() for name, tensor in kv_caches.items()}
    pool = HostPool(8, layout.block_bytes, pin=False)
    engine = make_copy_engine(layout, pool)
    engine.start_save([3, 7, 0], [5, 1, 2]).result()
    engine.start_load([1, 5], [9, 10]).result()
    came_from = {9: 7, 10: 3}
    for name, tensor in kv_caches.items():
        for block in range(NUM_BLOCKS):
            assert torch.equal(tensor[block], before[name][came_from.get(block, block)])


def test_vllm_takes_another_layout_where_the_kernels_cannot_read_the_one_asked_for() -> None:
    """Its CPU backend reads one layout only: the engine starts all the same."""
    assert resolved(ours("BLNHC"), CPUAttentionBackend) == "LBHNC"


def test_a_layout_in_which_a_block_is_no_run_is_refused_with_those_in_which_it_is() -> None:
    """HND is a name that vLLM knows; it puts layers outermost."""
    with pytest.raises(ValueError, match="kv_cache_layout: 'HND': must be 'BLNHC' or 'BLHNC'"):
        resolved(ours("HND"))


def test_next_to_a_connector_that_requires_another_layout_vllm_refuses_to_start() -> None:
    """So nothing is asked for unless the operator does."""
    both = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    with pytest.raises(ValueError, match="KV cache layout mismatch"):
        resolved({**both, "kv_connector_extra_config": {"connectors": [ours("BLNHC"), OFFLOADING]}})
    assert resolved({**both, "kv_connector_extra_config": {"connectors": [ours(None), OFFLOADING]}}) == "LBHNC"
