"""Every check is seen to fail: what it is for is broken on purpose, and it must say so by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from msgspec.structs import replace
from vllm.v1.request import RequestStatus

from kvledger.adapters.lab.simulation.hashed_model import BLOCK_SIZE, CorruptKV, block_bytes
from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions import saves
from kvledger.storage.events import segment_file
from sim.cached_blocks import PoisonedCache
from sim.checks import (
    CHECKS,
    check_accounting,
    check_audit,
    check_logs,
    check_nothing_left,
    check_outputs,
    check_pages,
    check_replay,
    check_rules,
)
from sim.logs import read_end
from sim.pages import WrongPages
from sim.world import World

pytestmark = pytest.mark.scheduler

ROOMY = {
    "host_bytes": block_bytes(BLOCK_SIZE) * 400,
    "chunk_size": 32,
    "save_tails": True,
    "save_mode": "sync",
}


def calm_world(faults: frozenset[str] = frozenset(), **changes: Any) -> World:
    """A world in which only memory is short, on the device, so that requests are preempted and come back."""
    settings = {
        "num_blocks": 12,
        "num_steps": 120,
        "arrival_share": 0.2,
        "max_num_seqs": 6,
        "async_scheduling": False,
        "enable_prefix_caching": False,
        "connector": ROOMY,
    }
    return World(3, faults=faults, dimensions=(), **{**settings, **changes})


@pytest.fixture
def world() -> Iterator[World]:
    """A calm world that has ended."""
    with calm_world() as world:
        world.run()
        yield world


def _replace(events: list[tuple[int, e.Event]], kind: type[e.Event], change: Callable[[Any], e.Event]) -> None:
    """Write the first event of a kind anew, as a log that lies would have it."""
    place = next(place for place, (_, event) in enumerate(events) if isinstance(event, kind))
    sequence, event = events[place]
    events[place] = (sequence, change(event))


def test_a_calm_world_passes_every_check(world: World) -> None:
    """What the other tests break was whole before, and is about something: there were preemptions, saves and loads."""
    for check in CHECKS:
        check(world)
    figures = world.side.journal.totals.figures
    assert figures.num_preemptions > 5
    assert figures.num_tokens_recovered > 100
    assert world.pages.num_pages_checked > 100


def test_a_wrong_token_is_seen(world: World) -> None:
    """A client that got another token than its prompt leads to."""
    world.lives[0].outputs[-1] ^= 1
    with pytest.raises(AssertionError, match="other tokens than its prompt leads to"):
        check_outputs(world)


def test_a_missing_token_is_seen(world: World) -> None:
    """A client that got one token too few."""
    world.lives[0].outputs.pop()
    with pytest.raises(AssertionError, match=r"got \d+ of \d+ tokens"):
        check_outputs(world)


def _flip_slot(world: World, slot: int) -> None:
    world.copies._engines[""]._pool.buffer[slot, 0] ^= 1


def _copies_that(world: World, name: str, spoil: Callable[..., None], *, before: bool) -> None:
    """Spoil something around each copy of a kind, below the eyes of the watch."""

    def around(_name: str, copy: Callable[..., Any]) -> Callable[..., Any]:
        def spoiled(*arguments: Any) -> Any:
            if before:
                spoil(*arguments)
            result = copy(*arguments)
            if not before:
                spoil(*arguments)
            return result

        return spoiled

    for call in ("start_save", "start_load"):
        delattr(world.copies._engines[""], call)
    world.copies.wrap(name, around)
    world.pages.attach(world.copies)


def test_a_save_that_writes_other_bytes_is_seen_at_once() -> None:
    """The slot does not hold what the block held; nobody has loaded it yet."""
    with calm_world() as world:
        _copies_that(world, "save", lambda _blocks, slots: _flip_slot(world, slots[0]), before=False)
        with pytest.raises(WrongPages, match=r"slot \d+, saved from block \d+, is wrong"):
            world.run()


def test_bytes_that_rot_in_the_host_pool_are_seen_when_they_are_loaded() -> None:
    """The save was right, the load brings something else."""
    with calm_world() as world:
        _copies_that(world, "load", lambda slots, _blocks: _flip_slot(world, slots[0]), before=True)
        with pytest.raises((WrongPages, CorruptKV), match="wrong KV"):
            world.run()


def test_a_save_of_blocks_that_somebody_else_has_is_seen_at_once() -> None:
    """A worker that does not copy before the forward finds other tokens in the blocks of preempted requests."""
    with calm_world() as world:
        world.worker_side.before_forward = lambda _jobs: None
        with pytest.raises(WrongPages, match=r"saves wrong KV from block \d+"):
            world.run()


def test_a_copy_that_is_no_job_is_seen(world: World) -> None:
    """A worker that copies without being told to."""
    world.copies._engines[""].start_save((1,), (0,))
    with pytest.raises(WrongPages, match="which is no job"):
        check_pages(world)


def test_a_broken_rule_is_seen() -> None:
    """A report of a job that never was, in a world where no report is doubled."""
    with calm_world() as world:
        world.side.ledger.observe(
            e.TransferReported(
                (99,), (0,), (), is_repeated=False, num_bytes=(1,), duration_ns=1, error="", withheld="", time_ns=1
            )
        )
        world.run()
        with pytest.raises(AssertionError, match="COMPLETION_ONCE"):
            check_rules(world)


def test_a_failed_hook_is_seen() -> None:
    """A hook that raised, which serving survives without a word to its clients."""
    with calm_world() as world:
        world.side.request_reader.preemption = None
        world.run()
        with pytest.raises(AssertionError, match=r"hooks failed|rules broken"):
            check_rules(world)


@pytest.mark.parametrize("name", ["tracker", "lookup_cache"])
def test_a_projection_that_does_not_forget_is_seen(name: str) -> None:
    """A projection that does not take up the release of a request keeps its entry."""
    with calm_world() as world:
        projections = world.side.ledger.projections
        part = getattr(projections, name)
        for kind in (e.RequestReleased, e.RequestFinished):
            route = projections._routes[kind]
            others = tuple(fold for fold in route.folds.others if getattr(fold, "__self__", None) is not part)
            projections._routes[kind] = route._replace(folds=route.folds._replace(others=others))
        world.run()
        with pytest.raises(AssertionError, match=f"entries of ended requests.*'{name}': [1-9]"):
            check_nothing_left(world)


def test_a_request_that_the_adapter_keeps_is_seen(world: World) -> None:
    """A live object of vLLM that nobody lets go."""
    world.side._requests["gone"] = None
    with pytest.raises(AssertionError, match=r"SchedulerSide\._requests"):
        check_nothing_left(world)


def test_a_slot_that_nobody_frees_is_seen(world: World) -> None:
    """A slot with a reference too many never becomes free."""
    slots = world.side.ledger.projections.slots
    slots.acquire(slots.candidates(1))
    with pytest.raises(AssertionError, match="slots are held by nobody"):
        check_nothing_left(world)


def test_a_frame_that_was_not_stored_is_seen(world: World) -> None:
    """A log with a hole in it."""
    frames = world.side.log.store._frames
    del frames[len(frames) // 2]
    world.log = read_end(world.side)
    with pytest.raises(AssertionError, match="sequence numbers have a hole"):
        check_logs(world)


def test_a_frame_that_was_not_appended_is_seen(world: World) -> None:
    """A log that ends before what was committed."""
    world.side.log.store._frames.pop()
    world.log = read_end(world.side)
    with pytest.raises(AssertionError, match=r"\d+ committed events are not stored"):
        check_logs(world)


def test_a_damaged_file_is_seen() -> None:
    """One bit of a log in files."""
    with _world_with_files() as world:
        world.run()
        check_logs(world)
        segment = segment_file.segment_paths(world.side.log.directory)[0]
        data = bytearray(segment.read_bytes())
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
        world.log = read_end(world.side)
        with pytest.raises(AssertionError, match=r"damaged|not stored|hole"):
            check_logs(world)


def test_a_loss_that_is_not_told_is_seen() -> None:
    """Events that a full disk cost, without a gap in the log."""
    with _world_with_files() as world:
        world.run()
        world.log = attrs.evolve(world.log, num_events_lost=3)
        with pytest.raises(AssertionError, match="known to wait or to be lost"):
            check_logs(world)


def _world_with_files() -> World:
    """A calm world whose only fault is a disk that could be full, with a seed that never lets it be."""
    for seed in range(200):
        world = World(seed, faults=frozenset({"stalling disk"}), dimensions=(), num_steps=60)
        if world.faults:
            world.faults[0]._share = 0
            return world
        world.close()
    pytest.fail("no seed has that fault")


def test_a_decision_that_was_not_taken_so_is_seen(world: World) -> None:
    """A log that tells of other slots than were chosen."""
    _replace(world.log.events, e.SaveIssued, lambda event: replace(event, slots=(*event.slots[::-1], 7)))
    with pytest.raises(AssertionError, match="replay diverges"):
        check_replay(world)


def test_a_belief_that_the_log_does_not_lead_to_is_seen(world: World) -> None:
    """A second copy of the truth that went its own way."""
    world.side.ledger.projections.costs.state.declined_until_ns = 1
    world.log = read_end(world.side)
    with pytest.raises(AssertionError, match=r"another state of \['costs'\]"):
        check_replay(world)


def test_a_live_count_that_the_log_does_not_lead_to_is_seen(world: World) -> None:
    """The connector counts while it serves, the tools count what the log has."""
    world.side.journal.totals.figures.num_lookups += 1
    world.log = read_end(world.side)
    with pytest.raises(AssertionError, match="a reader counts other totals"):
        check_replay(world)


def test_a_save_from_foreign_blocks_is_named_by_the_audit(world: World) -> None:
    """A log in which a request's chunk was copied from a block that it does not hold."""
    _replace(
        world.log.events,
        e.SaveIssued,
        lambda event: replace(event, block_ids=(11,) * len(event.block_ids)),
    )
    with pytest.raises(AssertionError, match="SRC_BLOCK_OWNED"):
        check_audit(world)


def test_a_figure_that_the_scheduler_does_not_confirm_is_seen(world: World) -> None:
    """Our log may not call fewer tokens recomputed than were."""
    world.meter.num_tokens_recomputed += 1
    with pytest.raises(AssertionError, match=r"\d+ tokens were computed again, our log says \d+"):
        check_accounting(world)


def test_tokens_that_nobody_accounts_for_are_seen(world: World) -> None:
    """A token that was lost and is neither won back nor recomputed nor given up."""
    world.meter.num_tokens_to_win_back += 1
    with pytest.raises(AssertionError, match="are accounted for"):
        check_accounting(world)


def test_recovered_tokens_that_were_not_are_seen(world: World) -> None:
    """Our log may not call more tokens recovered than the scheduler was spared."""
    world.side.journal.totals.figures.num_tokens_recovered += 1
    with pytest.raises(AssertionError, match=r"\d+ tokens were won back, our log says \d+"):
        check_accounting(world)


def test_tokens_computed_again_without_need_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that forgets tails, with room for everything: correct, and not what it promises."""
    monkeypatch.setattr(saves, "save_tail_from", lambda _turn, _source: None)
    with calm_world() as world:
        world.run()
        check_outputs(world)
        with pytest.raises(AssertionError, match="computed again without need"):
            check_accounting(world)


def test_a_cached_block_that_holds_something_else_is_seen() -> None:
    """VLLM's prefix cache offers garbage, which nobody has hit yet."""
    with calm_world(enable_prefix_caching=True) as world:
        pool = world.engine.scheduler.kv_cache_manager.block_pool
        while not (cached := [block.block_id for block in pool.blocks if block.block_hash is not None]):
            world.step()
        world.engine.model.kv_caches["model.layers.0.self_attn.attn"][cached[0], 0, 0, 0] += 1
        with pytest.raises(PoisonedCache, match="holds other KV than it is hashed as"):
            world.cached_blocks.look(world.alive)


def test_a_wrong_token_is_seen_when_it_is_delivered() -> None:
    """A client that got another token than its prompt leads to, in the very step."""
    with calm_world() as world:
        while not any(life.outputs for life in world.alive):
            world.step()
        life = next(life for life in world.alive if life.outputs)
        life.outputs.append(-1)
        with pytest.raises(AssertionError, match="got a wrong token"):
            world.step()


def test_a_save_from_a_failed_load_that_is_taken_up_is_seen() -> None:
    """The copy may be made in the step of the failure, when nobody can know; it must not count."""
    with calm_world() as world:
        world.pages._unusable = dict.fromkeys(range(1, 1000), "as if its load had failed")
        with pytest.raises(WrongPages, match=r"job \d+ is taken up as saved"):
            world.run()


def test_a_request_that_vllm_may_not_end_is_missed() -> None:
    """With the policy "fail" a request ends early only if it held what a load did not fill."""
    with calm_world() as world:
        world.step()
        while not world.alive:
            world.step()
        life = world.alive[0]
        world.engine.scheduler.finish_requests(life.request_id, RequestStatus.FINISHED_ERROR)
        world.run()
        with pytest.raises(AssertionError, match=r"got \d+ of \d+ tokens"):
            check_outputs(world)
