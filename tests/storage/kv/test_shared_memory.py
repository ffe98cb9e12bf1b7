"""One pool for several processes: real ones, which tell each other what there is by gloo, as vLLM's workers do."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from copy_engines import KV_LAYOUTS, NUM_BLOCKS, make_kv_memory
from processes import killed_on_failure, wait_until

from kvledger.storage.kv import HostPool, Sharing, StorageError, make_copy_engine
from kvledger.storage.kv.errors import MemoryNotShared, PoolTooSmall
from kvledger.storage.kv.shared_memory import SharedFile, SharedMemory

NUM_BYTES = 1 << 16


def through_gloo(told: SharedFile | None) -> SharedFile:
    """What rank 0 says, at every rank."""
    said: list[SharedFile] = [told]  # type: ignore[list-item]
    torch.distributed.broadcast_object_list(said, src=0)
    return said[0]


def on_ranks(num_ranks: int, work: Callable[[Sharing], None], directory: Path) -> list[int]:
    """Do `work` in a process for each rank; returns exit codes: 0, 1 where it raised, or minus the signal.

    Who is done waits for the others: an end of a process is seen by those who are still talking with it.
    """
    may_leave = directory / "may leave"

    def live(rank: int) -> int:
        exit_code = 0
        try:
            torch.distributed.GroupMember.WORLD = None  # a fork has that of an engine that this process has served
            store = torch.distributed.FileStore(str(directory / "met"), num_ranks)
            torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
            meet(directory, "connected", rank, num_ranks)
            work(Sharing(rank, num_ranks, through_gloo))
        except BaseException:  # noqa: BLE001 -- nothing may return into the test's stack
            (directory / f"trouble of {rank}").write_text(traceback.format_exc())
            exit_code = 1
        (directory / f"{rank} is done").touch()
        wait_until(may_leave.exists)
        return exit_code

    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            os._exit(live(rank))
        children.append(child)
    with contextlib.ExitStack() as stack:
        for child in children:
            stack.enter_context(killed_on_failure(child))
        for rank, child in enumerate(children):
            wait_until(lambda: (directory / f"{rank} is done").exists() or is_dead(child))  # noqa: B023
        may_leave.touch()
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def is_dead(child: int) -> bool:
    """Whether it has ended; what it ended with can still be asked for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def meet(directory: Path, where: str, rank: int, num_ranks: int) -> None:
    """Return when all ranks have come here."""
    (directory / f"{where} {rank}").touch()
    wait_until(lambda: len(list(directory.glob(f"{where} *"))) == num_ranks)


def trouble(directory: Path) -> str:
    """What was raised on any rank."""
    return "\n".join(path.read_text() for path in sorted(directory.glob("trouble of *")))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_each_rank_saves_in_part_all_load_whole(num_ranks: int, is_async: bool, tmp_path: Path) -> None:
    """All hold the same blocks; each writes the slots that are its own, and every byte comes back on every rank."""
    slots = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    block_ids = list(range(NUM_BLOCKS))

    def work(sharing: Sharing) -> None:
        memory = make_kv_memory(KV_LAYOUTS["mla"], torch.bfloat16, "cpu", torch.Generator().manual_seed(0))
        right = memory.bytes().clone()
        layout = memory.layout()
        pool = HostPool(NUM_BLOCKS, layout.block_bytes, pin=False, sharing=sharing)
        engine = make_copy_engine(layout, pool, is_async=is_async)
        own = [pair for pair in zip(block_ids, slots, strict=True) if sharing.writes(pair[1])]
        assert len(own) in (NUM_BLOCKS // num_ranks, -(-NUM_BLOCKS // num_ranks))
        engine.start_save([block for block, _ in own], [slot for _, slot in own]).result()
        meet(tmp_path, "saved", sharing.rank, num_ranks)  # as the reports of all ranks come before any load
        for block_id in block_ids:
            for page in memory.pages(block_id):
                page.fill_(0)
        assert not torch.equal(memory.bytes(), right)
        engine.start_load(slots, block_ids).result()
        assert torch.equal(memory.bytes(), right)

    assert on_ranks(num_ranks, work, tmp_path) == [0] * num_ranks, trouble(tmp_path)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_leaves_no_file_and_the_others_their_memory(killed: int, tmp_path: Path) -> None:
    """The memory has no name from its first moment on, so there is nothing that anybody would have to take away."""

    def work(sharing: Sharing) -> None:
        shared = SharedMemory(NUM_BYTES, sharing)
        meet(tmp_path, "have it", sharing.rank, 3)
        if sharing.rank == killed:
            shared.memory[7] = 42
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: int(shared.memory[7]) == 42)
        mapped = [line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines()]
        # By its name alone: the checkout may be in a folder of that name.
        assert [path for (path,) in filter(None, mapped) if "kvledger" in Path(path).name] == [
            "/memfd:kvledger (deleted)"
        ]
        shared.memory[100 + sharing.rank] = 9
        assert int(shared.memory[100 + sharing.rank]) == 9

    exit_codes = on_ranks(3, work, tmp_path)
    assert exit_codes == [-signal.SIGKILL if rank == killed else 0 for rank in range(3)], trouble(tmp_path)


def test_where_the_first_rank_dies_before_it_has_told_the_others_fail_at_once(tmp_path: Path) -> None:
    """What it was making is gone with it; nobody waits for what will not come."""

    def work(sharing: Sharing) -> None:
        def die(_told: SharedFile | None) -> SharedFile:
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        SharedMemory(NUM_BYTES, Sharing(0, 3, die) if sharing.rank == 0 else sharing)

    assert on_ranks(3, work, tmp_path) == [-signal.SIGKILL, 1, 1]
    assert trouble(tmp_path).count("shared = sharing.from_first(None)") == 2
    assert trouble(tmp_path).count("by peer") == 2


def test_what_the_first_rank_cannot_have_every_rank_refuses_with_its_words(tmp_path: Path) -> None:
    """Nobody waits for it."""

    def work(sharing: Sharing) -> None:
        with pytest.raises(StorageError, match="lower host_bytes") as refused:
            HostPool(1 << 30, 1 << 30, pin=False, sharing=sharing)
        assert type(refused.value) is (PoolTooSmall if sharing.rank == 0 else MemoryNotShared)

    assert on_ranks(2, work, tmp_path) == [0, 0], trouble(tmp_path)


# --- what one process sees -----------------------------------------------------------------------------


def told(rank: int, file: SharedFile) -> Sharing:
    """A rank that is told of this file."""
    return Sharing(rank, 2, lambda _own: file)


def made() -> tuple[SharedMemory, SharedFile]:
    """What the first rank makes, and what it tells."""
    said: list[SharedFile] = []

    def note(file: SharedFile | None) -> SharedFile:
        assert file is not None
        said.append(file)
        return file

    return SharedMemory(NUM_BYTES, Sharing(0, 2, note)), said[0]


def test_the_memory_is_zero_and_no_file_has_a_name() -> None:
    """In this process and wherever it is mapped."""
    shared, file = made()
    assert Path(file.path).stat().st_nlink == 0
    assert int(shared.memory.count_nonzero()) == 0
    other = SharedMemory(NUM_BYTES, told(1, file))
    shared.memory[3] = 5
    assert int(other.memory[3]) == 5


def test_what_was_closed_lets_nobody_in_and_keeps_those_who_are() -> None:
    """Closing twice is harmless."""
    shared, file = made()
    other = SharedMemory(NUM_BYTES, told(1, file))
    shared.memory[3] = 5
    for _ in range(2):
        shared.close()
        other.close()
    with pytest.raises(MemoryNotShared, match=r"cannot be opened here.*run all worker processes of the machine as"):
        SharedMemory(NUM_BYTES, told(1, file))
    assert int(other.memory[3]) == 5


def test_a_pool_that_is_forgotten_closes_its_file() -> None:
    """No rank of a long process keeps one open for nobody."""
    shared, file = made()
    assert Path(file.path).exists()
    del shared
    assert not Path(file.path).exists()


def test_another_size_is_refused_with_both_figures() -> None:
    """Slots of another size would lie elsewhere."""
    shared, file = made()
    with pytest.raises(MemoryNotShared, match=f"{NUM_BYTES} bytes .* {NUM_BYTES - 8} are needed here"):
        SharedMemory(NUM_BYTES - 8, told(1, file))
    shared.close()


def test_a_file_that_took_the_place_of_the_first_rank_s_is_refused(tmp_path: Path) -> None:
    """Its process has ended, and the number belongs to another one."""
    (tmp_path / "other").write_bytes(b"1234")
    with pytest.raises(MemoryNotShared, match="the process of rank 0 has ended"):
        SharedMemory(NUM_BYTES, told(1, SharedFile(str(tmp_path / "other"), NUM_BYTES)))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_each_slot_has_one_writer_and_each_writer_its_share(num_ranks: int) -> None:
    """Neither two nor none."""
    ranks = [Sharing(rank, num_ranks, through_gloo) for rank in range(num_ranks)]
    for slot in range(50):
        assert sum(rank.writes(slot) for rank in ranks) == 1
    for rank in ranks:
        assert sum(map(rank.writes, range(24 * num_ranks))) == 24
