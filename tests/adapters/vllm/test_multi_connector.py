"""Beside another connector in vLLM's `MultiConnector`: chosen or not, blocks are known and saves go on.

The other one here is a cache that has everything: it fills whatever blocks it is chosen for, at once or some steps
later, or says that it could not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.broken_copies import break_copies
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvledger.adapters.lab.simulation.connectors import KVLEDGER_TRANSFER
from kvledger.adapters.vllm import versions
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


MakeMulti = Callable[..., Any]


@pytest.fixture
def make_multi(make_engine: Any) -> MakeMulti:
    """Build engines whose connector is a `MultiConnector`; `engine.connector` is our child of it."""
    recorded: type[Any] = type(make_engine(num_blocks=4))
    built = []

    def make(
        *, ours_first: bool, theirs: dict[str, Any], children: list[dict[str, Any]] | None = None, **options: Any
    ) -> Any:
        ledger = {
            **KVLEDGER_TRANSFER,
            "kv_connector_extra_config": {
                "log_dir": None,
                "chunk_size": 16,
                "host_bytes": 1 << 20,
                "load_mode": "sync",
            },
        }
        other = {
            "kv_connector": "Neighbour",
            "kv_connector_module_path": "sim.neighbour",
            "kv_role": "kv_both",
            "kv_connector_extra_config": theirs,
        }
        engine = recorded(
            kv_transfer={"kv_connector": "MultiConnector", "kv_connector_module_path": None},
            connectors=children or ([ledger, other] if ours_first else [other, ledger]),
            **{"num_blocks": 40, "enable_prefix_caching": False, **options},
        )
        built.append(engine)
        return engine

    yield make
    for engine in built:
        engine.check_at_end()


@pytest.fixture(params=[0, 3], ids=["at-once", "some-steps-later"])
def num_steps(request: pytest.FixtureRequest) -> int:
    """How many steps the other cache needs for a load."""
    return int(request.param)


def saved_chunks(engine: Any, request_id: str) -> list[int]:
    """Every chunk that was saved for a request."""
    return [chunk for save in engine.logged(e.SaveIssued, request_id=request_id) for chunk in save.chunks]


def ask_again(engine: Any) -> None:
    """Ask for everything that was said, of our cache alone: wrong KV in it would raise `CorruptKV`."""
    said = {request_id: engine.prompts[request_id] + output for request_id, output in engine.outputs.items()}
    for request_id, tokens in said.items():
        engine.serve(f"ours, {request_id} again", tokens, 3, max_steps=200)
    engine.check_outputs()


def test_a_cold_request_is_saved_although_nobody_was_chosen(make_multi: MakeMulti, runner: dict[str, bool]) -> None:
    """vllm#46865: the children were given no blocks where nobody had a hit, and stored almost nothing."""
    engine = make_multi(ours_first=False, theirs={"num_tokens": 48}, **runner)
    engine.serve("cold", range(64), 20)
    assert saved_chunks(engine, "cold") == [0, 1, 2, 3, 4]
    ask_again(engine)
    assert [load.num_tokens for load in engine.logged(e.LoadIssued)] == [80]


def test_not_chosen_means_no_load_but_saves(make_multi: MakeMulti, runner: dict[str, bool], num_steps: int) -> None:
    """LMCache#4355, #4762, vllm#55209, #51805: the loser of a lookup loaded, or took its answer up later."""
    engine = make_multi(ours_first=False, theirs={"num_tokens": 48, "num_steps": num_steps}, **runner)
    engine.serve("writer", range(64), 2)
    engine.serve("theirs", [*range(64), *range(300, 350)], 20)
    (answer,) = engine.check_answers("theirs")
    assert (answer.num_hit_tokens, answer.num_external_tokens) == (64, 64)
    allocated = engine.logged(e.BlocksAllocated, request_id="theirs")
    assert {event.num_external_tokens for event in allocated} == {0}
    assert engine.logged(e.LoadIssued) == []
    assert engine.projections.pool.promised == {}
    assert saved_chunks(engine, "theirs") == [4, 5, 6, 7]
    ask_again(engine)


def test_what_another_cache_loaded_is_saved_from_the_right_blocks(
    make_multi: MakeMulti, runner: dict[str, bool], num_steps: int
) -> None:
    """vllm#46951: blocks that another child fills are a request's blocks like any others."""
    engine = make_multi(ours_first=False, theirs={"num_tokens": 48, "num_steps": num_steps}, **runner)
    engine.add("theirs", range(70), 20)
    for _ in range(30):
        engine.step()
        for request in engine.scheduler.running:
            (table,) = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            assert list(engine.projections.tracker.get(request.request_id).block_ids or ()) == table
    engine.run()
    assert sorted(saved_chunks(engine, "theirs")) == [0, 1, 2, 3, 4]
    assert engine.logged(e.BlockTableObserved) == []
    ask_again(engine)


def test_chosen_before_the_other_it_loads(make_multi: MakeMulti, runner: dict[str, bool], num_steps: int) -> None:
    """The first child with a hit is the one that loads, however much the second one has."""
    engine = make_multi(ours_first=True, theirs={"num_tokens": 1000, "num_steps": num_steps}, **runner)
    engine.serve("writer", range(64), 2)
    engine.serve("theirs", [*range(64), *range(300, 350)], 20)
    assert [load.num_tokens for load in engine.logged(e.LoadIssued, request_id="theirs")] == [64]
    ask_again(engine)


@pytest.mark.parametrize("ours_first", [False, True])
def test_a_crowd_is_preempted_between_two_caches(
    make_multi: MakeMulti, runner: dict[str, bool], num_steps: int, ours_first: bool
) -> None:
    """Whoever is chosen at each return, everybody says what it says alone, and nothing is left."""
    engine = make_multi(
        ours_first=ours_first, theirs={"num_tokens": 56, "num_steps": num_steps}, num_blocks=14, **runner
    )
    for number in range(4):
        name = ("ours", "theirs")[number % 2]
        engine.add(f"{name} {number}", range(100 * number, 100 * number + 40), 50)
    engine.run(max_steps=1000)
    assert engine.num_preemptions
    assert {len(output) for output in engine.outputs.values()} == {50}
    ask_again(engine)


@pytest.mark.parametrize("num_steps_before", [1, 3, 12])
def test_an_abort_between_two_caches(
    make_multi: MakeMulti, runner: dict[str, bool], num_steps: int, num_steps_before: int
) -> None:
    """Also while the other cache is still filling the blocks: what stands in them by then is saved by nobody."""
    engine = make_multi(ours_first=False, theirs={"num_tokens": 48, "num_steps": num_steps}, **runner)
    engine.add("theirs", range(70), 20)
    for _ in range(num_steps_before):
        engine.step()
    engine.abort("theirs")
    engine.run(max_steps=100)
    engine.outputs["theirs"] = []
    ask_again(engine)


def test_an_abort_while_the_other_cache_fills_a_preempted_request_s_blocks(
    make_multi: MakeMulti, runner: dict[str, bool]
) -> None:
    """VLLM counts tokens as computed as soon as such a load begins; their blocks hold anything but them."""
    engine = make_multi(ours_first=False, theirs={"num_tokens": 64, "num_steps": 4}, **runner)
    engine.add("theirs", range(80), 40)
    for _ in range(12):
        engine.step()
    while engine._in_flight:
        engine.update()
    tokens = engine.prompts["theirs"] + engine.outputs["theirs"]
    # New weights, or just a reset: our own cache has nothing of it, so whatever it saves from now on is visible.
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.step()
    assert engine.scheduler.requests["theirs"].status.name == "WAITING_FOR_REMOTE_KVS"
    for tensor in engine.model.kv_caches.values():
        tensor.fill_(-7)
    engine.abort("theirs")
    engine.run(max_steps=100)
    engine.serve("ours", tokens, 4)
    engine.prompts.pop("theirs"), engine.outputs.pop("theirs")


@pytest.mark.parametrize("num_failures", [1, 2])
@pytest.mark.parametrize("model_runner_v2", [False, True])
def test_what_the_other_cache_could_not_load_is_not_saved(
    make_multi: MakeMulti, model_runner_v2: bool, num_failures: int, num_steps: int
) -> None:
    """The scheduler recomputes; chunks that were saved from the unfilled blocks in the same step are not offered."""
    engine = make_multi(
        ours_first=False,
        theirs={"num_tokens": 48, "num_failures": num_failures, "num_steps": num_steps},
        model_runner_v2=model_runner_v2,
    )
    engine.serve("theirs", range(70), 20, max_steps=200)
    assert len(engine.outputs["theirs"]) == 20
    assert engine.logged(e.LoadErrorsObserved)
    ask_again(engine)


@pytest.mark.parametrize("model_runner_v2", [False, True])
def test_the_policy_that_counts_is_that_of_the_parent(make_multi: MakeMulti, model_runner_v2: bool) -> None:
    """A child is shown its own policy, "fail"; the scheduler recomputes. No token on top of a failed load comes out."""
    ours = {key: value for key, value in KVLEDGER_TRANSFER.items() if key != "kv_load_failure_policy"}
    ours["kv_connector_extra_config"] = {"log_dir": None, "chunk_size": 16, "host_bytes": 1 << 20}
    engine = make_multi(
        ours_first=True, theirs={}, children=[ours], async_scheduling=True, model_runner_v2=model_runner_v2
    )
    assert engine.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    engine.serve("writer", range(64), 2)
    break_copies(engine, "load", 1)
    engine.serve("reader", range(64), 6, max_steps=200)
    assert engine.logged(e.LoadFailed, request_id="reader")
    assert len(engine.outputs["reader"]) == 6


def test_figures_of_a_child_are_found_by_its_name(make_multi: MakeMulti, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end reads them out of plain values and asks vLLM's factory for the class; a server dies without it."""
    engine = make_multi(ours_first=True, theirs={"num_tokens": 0})
    taken: list[dict[str, Any]] = []
    make_stats = engine.scheduler.make_stats

    def watch(*arguments: Any, **options: Any) -> Any:
        stats = make_stats(*arguments, **options)
        if stats is not None and stats.kv_connector_stats:
            taken.append(stats.kv_connector_stats)
        return stats

    monkeypatch.setattr(engine.scheduler, "make_stats", watch)
    engine.serve("only", range(64), 4)
    assert taken
    for plain in taken:
        read = MultiConnector.build_kv_connector_stats(plain)
        assert read is not None
        assert read.to_dict() == plain
        assert read.reduce()["KVLedgerConnector"]


def test_two_ledgers_side_by_side(make_multi: MakeMulti, tmp_path: Any) -> None:
    """Each keeps its own log and its own chunks; the first one with a hit loads, both save."""
    connectors = [
        {
            **KVLEDGER_TRANSFER,
            "kv_connector_extra_config": {
                "log_dir": str(tmp_path / name),
                "chunk_size": chunk_size,
                "host_bytes": 1 << 20,
            },
        }
        for name, chunk_size in (("fine", 8), ("coarse", 32))
    ]
    engine = make_multi(ours_first=True, theirs={"num_tokens": 0}, children=connectors)
    engine.serve("writer", range(72), 20)
    fine, coarse = engine.scheduler.connector.sub_connectors
    assert [len(child.scheduler_side.ledger.projections.pool) for child in (fine, coarse)] == [91 // 8, 91 // 32]
    engine.serve("reader", range(72), 20)
    figures = [child.scheduler_side.journal.totals.figures for child in (fine, coarse)]
    assert [figure.num_tokens_loaded for figure in figures] == [71, 0]
    assert [figure.num_violations for figure in figures] == [0, 0]
    engine.check_outputs()
    engine.check_released()
    assert len(list(tmp_path.iterdir())) == 2


def test_no_response_has_figures_next_to_another_connector(
    make_multi: MakeMulti, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`MultiConnector` raises when two of its children return the same key, as two of ours would.

    The workers of these engines know no transfer group, so they would say that each child is alone.
    """
    monkeypatch.setattr(versions, "is_alone", lambda _connector: False)
    engine = make_multi(ours_first=True, theirs={"num_tokens": 0, "num_steps": 0})
    request_finished, answers = engine.connector.request_finished_all_groups, []

    def watch(*arguments: Any) -> Any:
        answers.append(request_finished(*arguments))
        return answers[-1]

    engine.connector.request_finished_all_groups = watch
    engine.serve("a", range(40), 3, kv_transfer_params={"kvledger_figures": True})
    assert [params for _, params in answers] == [None]
