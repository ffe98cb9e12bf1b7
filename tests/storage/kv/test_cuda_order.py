"""In which order the CUDA engine's copies happen, on a model of CUDA's streams; `make gpu-check` asks the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from copy_engines.streams import Device

from kvledger.storage.kv import HostPool, cuda, describe_blocks
from kvledger.storage.kv.cuda import CudaCopyEngine


class Bench:
    """KV of three blocks, a pool, and an engine on the model; its copies are one piece of work each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_async: bool) -> None:
        self.device = Device()
        self.kv = torch.zeros(3, 8, dtype=torch.uint8)
        layout = describe_blocks({"layer": self.kv}, num_blocks=3, block_dims={"layer": 0})
        self.pool = HostPool(3, layout.block_bytes, pin=False)
        monkeypatch.setattr(
            cuda, "torch", SimpleNamespace(cuda=self.device.as_module(), inference_mode=torch.inference_mode)
        )
        monkeypatch.setattr(cuda, "StagedMover", lambda *_arguments: self)
        self.error: Exception | None = None
        self.engine = CudaCopyEngine(layout, self.pool, is_async=is_async)

    def move(self, block_ids: Sequence[int], slots: Sequence[int], host: torch.Tensor, *, writes_slots: bool) -> None:
        """As a mover does: give the current stream the copy."""

        def copy() -> None:
            for block_id, slot in zip(block_ids, slots, strict=True):
                if writes_slots:
                    host[slot] = self.kv[block_id]
                else:
                    self.kv[block_id] = host[slot]

        self.device.current.give(copy)
        if self.error is not None:
            raise self.error

    def forward(self, value: int) -> None:
        """Give the forward's stream a kernel that writes every block."""
        self.device.forward.give(lambda: self.kv.fill_(value))

    def submitted(self) -> None:
        """Return when the engine's thread has nothing left to give."""
        if self.engine._thread is not None:
            self.engine._thread.submit(lambda: None).result()

    def run(self, *, copies_first: bool) -> None:
        """Let everything happen, in one of the two worst orders."""
        self.submitted()
        first = [s for s in self.device.streams if (s is self.device.forward) is not copies_first]
        self.device.run_until(first=first)


@pytest.fixture(params=[True, False], ids=["copies-first", "forward-first"])
def copies_first(request: pytest.FixtureRequest) -> bool:
    """Which streams go as far as they can before others move."""
    return bool(request.param)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_save_begins_after_all_that_the_caller_s_stream_was_given(
    monkeypatch: pytest.MonkeyPatch, is_async: bool, copies_first: bool
) -> None:
    """The forward that writes the blocks has been launched, and has not run."""
    bench = Bench(monkeypatch, is_async=is_async)
    bench.forward(7)
    save = bench.engine.start_save([0, 1, 2], [0, 1, 2])
    bench.submitted()
    assert not save.done()
    bench.run(copies_first=copies_first)
    assert save.done()
    assert bool((bench.pool.buffer == 7).all())
    assert bench.device.host_waits == 0


@pytest.mark.parametrize("is_async", [True, False])
def test_what_precedes_the_next_forward_does_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch, is_async: bool, copies_first: bool
) -> None:
    """A save out of blocks that the next forward overwrites: in the step by itself, asynchronously by `precede`."""
    bench = Bench(monkeypatch, is_async=is_async)
    bench.forward(1)
    save = bench.engine.start_save([0, 1, 2], [0, 1, 2])
    save.precede()
    bench.forward(2)
    bench.run(copies_first=copies_first)
    assert bool((bench.pool.buffer == 1).all())
    assert bool((bench.kv == 2).all())
    assert bench.device.host_waits == 0


def test_without_precede_an_asynchronous_save_may_read_what_the_next_forward_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the test before would show nothing."""
    bench = Bench(monkeypatch, is_async=True)
    bench.forward(1)
    bench.engine.start_save([0, 1, 2], [0, 1, 2])
    bench.forward(2)
    bench.run(copies_first=False)
    assert bool((bench.pool.buffer == 2).all())


@pytest.mark.parametrize("is_async", [True, False])
def test_a_forward_reads_what_a_load_in_front_of_it_brings(
    monkeypatch: pytest.MonkeyPatch, is_async: bool, copies_first: bool
) -> None:
    """And it does not wait on the host for it."""
    bench = Bench(monkeypatch, is_async=is_async)
    bench.pool.buffer.fill_(5)
    bench.engine.start_load([0, 1, 2], [0, 1, 2]).precede()
    seen: list[torch.Tensor] = []
    bench.device.forward.give(lambda: seen.append(bench.kv.clone()))
    bench.run(copies_first=copies_first)
    assert bool((seen[0] == 5).all())
    assert bench.device.host_waits == 0


def test_copies_of_one_direction_happen_in_their_order_and_the_other_direction_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two saves into one slot; a load next to them."""
    bench = Bench(monkeypatch, is_async=True)
    bench.kv[1] = 1
    saves = [bench.engine.start_save([block_id], [2]) for block_id in (0, 1)]
    load = bench.engine.start_load([0], [2])
    bench.submitted()
    _, load_stream = bench.device.streams[1:]
    bench.device.run_until(load.done, first=[bench.device.forward, load_stream])
    assert not saves[0].done()
    bench.run(copies_first=True)
    assert bool((bench.pool.buffer[2] == 1).all())


def test_a_caller_that_changes_its_stream_does_not_mix_up_the_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in the step share it: each is behind the one before, whatever stream that was on."""
    bench = Bench(monkeypatch, is_async=False)
    other = bench.device.new_stream()
    bench.engine.start_save([0], [0])
    with bench.device.on(other):
        second = bench.engine.start_save([1], [1])
    while other.step():
        pass
    assert not second.done()
    bench.run(copies_first=True)
    assert second.done()


@pytest.mark.parametrize("is_async", [True, False])
def test_what_no_stream_takes_has_failed_at_once_and_is_over(monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    """Part of it was given: nothing of it is under way any more when the failure is known."""
    bench = Bench(monkeypatch, is_async=is_async)
    bench.error = RuntimeError("out of memory")
    save = bench.engine.start_save([0], [0])
    bench.submitted()
    assert save.done()
    assert all(not stream.queue for stream in bench.device.streams)
    save.precede()
    with pytest.raises(RuntimeError, match="out of memory"):
        save.result()


def test_closing_waits_for_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors may be gone afterwards."""
    for is_async in (True, False):
        bench = Bench(monkeypatch, is_async=is_async)
        bench.forward(3)
        bench.engine.start_save([0], [0])
        bench.engine.close()
        assert bool((bench.pool.buffer[0] == 3).all())
