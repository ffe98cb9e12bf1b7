"""The figures of one request in its response, through vLLM's own scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

import kvledger
from kvledger.adapters.figures import ADDS
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

ASKS = {"kvledger_figures": True}


def responses(engine: Any) -> dict[str, Any]:
    """Request id -> what vLLM puts into `kv_transfer_params` of its response, filled while the engine runs."""
    found: dict[str, Any] = {}
    update = engine.scheduler.update_from_output

    def watch(*arguments: Any) -> Any:
        outputs = update(*arguments)
        for of_client in outputs.values():
            for output in of_client.outputs:
                if output.finish_reason is not None:
                    found[output.request_id] = output.kv_transfer_params
        return outputs

    engine.scheduler.update_from_output = watch
    return found


def crowd(make_engine: Any, **options: Any) -> Any:
    """Three requests that do not fit into the blocks, so that some are preempted and recovered."""
    return make_engine(
        **({"num_blocks": 14, "chunk_size": 8, "enable_prefix_caching": False, "host_bytes": 1 << 14} | options)
    )


def add(engine: Any, number: int, params: Any = ASKS) -> None:
    """One of the three."""
    engine.add(str(number), range(100 * number, 100 * number + 40), 50, kv_transfer_params=params)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_figures_of_all_requests_add_up_to_the_totals(make_engine: Any, tmp_path: Path, mode: str) -> None:
    """Each request has its own part; its time is what the log's reader says."""
    engine = crowd(make_engine, log_dir=str(tmp_path), load_mode=mode, save_mode=mode)
    found = responses(engine)
    for number in range(3):
        add(engine, number)
    engine.run()
    told = {request_id: params["kvledger"] for request_id, params in found.items()}
    assert sorted(told) == ["0", "1", "2"]
    state = engine.connector.scheduler_side.journal.totals.state
    for figure, total in (
        ("num_loaded_tokens", state.figures.num_tokens_loaded),
        ("num_preemptions", state.figures.num_preemptions),
    ):
        assert sum(figures[figure] for figures in told.values()) == total > 0, figure
    for figure, by_reason in (
        ("num_missed_tokens", state.num_tokens_missed_by),
        ("num_recomputed_tokens", state.num_tokens_recomputed_by),
    ):
        for reason, total in by_reason.items():
            assert sum(figures[figure].get(reason, 0) for figures in told.values()) == total, (figure, reason)
    engine.connector.shutdown()
    for request in kvledger.open_log(tmp_path).requests():
        (life,) = request.lives
        figures = told[request.request_id]
        assert (figures["queued_ms"], figures["running_ms"], figures["preempted_ms"]) == (
            life.queued_ns / 1e6,
            life.running_ns / 1e6,
            life.preempted_ns / 1e6,
        )


def test_cached_tokens_are_those_of_vllms_prefix_cache_when_it_was_admitted(make_engine: Any) -> None:
    """The second request has two blocks of sixteen in common with the first."""
    engine = make_engine(num_blocks=20, chunk_size=16, enable_prefix_caching=True)
    found = responses(engine)
    engine.serve("a", range(40), 1, kv_transfer_params=ASKS)
    engine.serve("b", range(40), 1, kv_transfer_params=ASKS)
    assert [found[name]["kvledger"]["num_cached_tokens"] for name in ("a", "b")] == [0, 32]
    assert sum(found["b"]["kvledger"]["num_missed_tokens"].values()) == 8


@pytest.mark.parametrize("params", [None, {}, {"kvledger_figures": False}, {"kvledger_figures": "yes"}, {"other": 1}])
def test_a_request_that_does_not_ask_gets_nothing(make_engine: Any, params: Any) -> None:
    """Next to one that does."""
    engine = crowd(make_engine)
    found = responses(engine)
    add(engine, 0)
    add(engine, 1, params)
    engine.run()
    assert found["1"] is None
    assert found["0"]["kvledger"]["num_preemptions"] == 0


def test_an_id_that_is_used_again_begins_anew(make_engine: Any) -> None:
    """The figures are those of one life."""
    engine = crowd(make_engine)
    found = responses(engine)
    engine.serve("0", range(40), 50, kv_transfer_params=ASKS)
    first = found["0"]["kvledger"]
    engine.serve("0", range(500, 540), 50, kv_transfer_params=ASKS)
    second = found["0"]["kvledger"]
    assert sum(first["num_missed_tokens"].values()) == sum(second["num_missed_tokens"].values()) == 40


def test_counting_that_fails_costs_the_figures_and_nothing_else(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are served, and nobody gets figures any more."""

    def fail(*_arguments: object) -> None:
        raise KeyError("a mistake of ours")

    engine = crowd(make_engine)
    found = responses(engine)
    monkeypatch.setitem(ADDS, e.LookupAnswered, fail)
    add(engine, 0)
    add(engine, 1)
    engine.run()
    assert found == {"0": None, "1": None}
    assert not engine.logged(e.HookFailed)
    assert not engine.connector.scheduler_side.journal.is_disabled
    assert attrs.asdict(engine.figures)["num_requests"] == 2
