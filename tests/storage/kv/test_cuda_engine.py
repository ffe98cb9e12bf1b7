"""The CUDA engine keeps the contract; runs only where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from kvledger.storage.kv import HostPool, describe_blocks, make_copy_engine
from kvledger.storage.kv.cuda_engine import CudaCopyEngine
from kvledger.storage.kv.testing import CopyEngineContract

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class TestCudaCopyEnginePinned(CopyEngineContract):
    """Everything the contract asks, from and to pinned memory."""

    device = "cuda"
    pin = True


class TestCudaCopyEngineUnpinned(CopyEngineContract):
    """The same without pinning."""

    device = "cuda"


def test_cuda_tensors_get_the_cuda_engine_and_a_pinned_pool() -> None:
    """Pinning registers the allocation itself, and closing gives it back."""
    layout = describe_blocks({"layer": torch.zeros(4, 8, device="cuda")}, num_blocks=4)
    pool = HostPool(2, layout.block_bytes, pin=True)
    assert isinstance(make_copy_engine(layout, pool), CudaCopyEngine)
    assert pool.is_pinned
    assert pool.buffer.is_pinned()
    pool.close()
    assert not pool.is_pinned


def test_a_save_waits_for_what_the_current_stream_was_given() -> None:
    """A long computation queued before the save is in the saved bytes."""
    layer = torch.zeros(64, 1 << 18, device="cuda")
    layout = describe_blocks({"layer": layer}, num_blocks=64)
    pool = HostPool(64, layout.block_bytes, pin=True)
    engine = make_copy_engine(layout, pool)
    busy = torch.rand(4096, 4096, device="cuda")
    for _ in range(30):
        busy = busy @ busy / 4096
    layer.fill_(1.0)
    engine.save(range(64), range(64))
    assert bool((pool.buffer.view(torch.float32) == 1.0).all())
    layer.zero_()
    engine.load(range(64), range(64))
    assert bool((layer == 1.0).all())


def test_more_than_the_staging_buffer_holds_is_copied_in_batches() -> None:
    """192 MiB in scattered slots survive the round trip."""
    layers = {f"layer.{i}": torch.randint(0, 256, (96, 1 << 20), dtype=torch.uint8, device="cuda") for i in range(2)}
    originals = {name: layer.clone() for name, layer in layers.items()}
    layout = describe_blocks(layers, num_blocks=96)
    pool = HostPool(96, layout.block_bytes, pin=True)
    engine = make_copy_engine(layout, pool)
    slots = torch.randperm(96).tolist()
    engine.save(range(96), slots)
    for layer in layers.values():
        layer.zero_()
    engine.load(slots, range(96))
    for name, layer in layers.items():
        assert torch.equal(layer, originals[name])
