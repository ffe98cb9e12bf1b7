"""`why` gives each token that a recorded connector leaves to compute one reason; the worlds are public threads."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from sim.connectors import NamedConnector, Recorded

from kvledger.adapters.lab.simulation.connectors import KVLEDGER, ConnectorSetup, Offloading, other_transfer
from kvledger.adapters.lab.simulation.engine import SimulatedEngine

Record = Callable[..., tuple[Any, Any]]
Said = Callable[..., tuple[int, str]]
Tokens = Callable[..., dict[str, int]]
PROMPT = range(100)


@attrs.frozen
class Host(Offloading):
    """OffloadingConnector with so many blocks of host memory."""

    num_slots: int = 300
    options: tuple[tuple[str, int | bool], ...] = (("offload_prompt_only", False),)

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """It rounds a block up to a page of memory."""
        return other_transfer(
            self.name, kv_transfer, {"cpu_bytes_to_use": self.num_slots * mmap.PAGESIZE, **dict(self.options)}
        )


@pytest.fixture
def tokens(tmp_path: Path, said: Said) -> Tokens:
    """Left to compute at the request's last admission: reason → tokens; all of them have one."""

    def of(engine: SimulatedEngine, request_id: str) -> dict[str, int]:
        engine.shutdown()
        (log,) = (each for each in tmp_path.iterdir() if "worker" not in each.name)
        exit_code, out = said("why", log, request_id, "--json")
        assert exit_code == 0
        lines = [json.loads(line) for line in out.splitlines()]
        admissions = [line["sequence"] for line in lines if line["type"] == "cause" and line["what"] == "admission"]
        found: dict[str, int] = {}
        for line in lines:
            if line["type"] == "reason" and line["of"] == "admission" and line["sequence"] == admissions[-1]:
                found[line["reason"]] = found.get(line["reason"], 0) + line["num_tokens"]
        return found

    return of


def next_turn(engine: SimulatedEngine, *, between: Callable[[], object]) -> None:
    """A chat whose second prompt is the first one, its answer, and a question."""
    engine.add("turn1", PROMPT, 90)
    engine.run()
    between()
    engine.add("turn2", [*PROMPT, *engine.outputs["turn1"], *range(300, 320)], 4)
    engine.run()


def others(engine: SimulatedEngine, num_tokens: int = 200) -> Callable[[], None]:
    """Let so many other requests take the blocks of whoever was there before."""

    def serve() -> None:
        for number in range(4):
            engine.add(f"other{number}", range(1000 + 200 * number, 1000 + 200 * number + num_tokens), 2)
            engine.run()

    return serve


def test_an_answer_that_was_never_given_to_save_is_named_after_vllm_lost_it(
    record: Record, tmp_path: Path, tokens: Tokens
) -> None:
    """OffloadingConnector saves prompts only by default (maru#57), so a reset loses the answer."""
    default = Host(options=())
    engine, _ = record(default, log_dir=str(tmp_path), num_blocks=40)
    next_turn(engine, between=engine.scheduler.reset_prefix_cache)
    assert tokens(engine, "turn2") == {"reset_unsaved": 80, "new": 32, "partial_chunk": 1, "last_token": 1}


def test_what_other_requests_displaced_was_evicted_by_vllm(record: Record, tmp_path: Path, tokens: Tokens) -> None:
    """The same, with other requests between the turns."""
    engine, _ = record(Host(options=()), log_dir=str(tmp_path), num_blocks=20)
    next_turn(engine, between=others(engine))
    assert tokens(engine, "turn2") == {"evicted_unsaved": 80, "new": 32, "partial_chunk": 1, "last_token": 1}


def test_without_vllms_prefix_cache_it_was_just_never_given(record: Record, tmp_path: Path, tokens: Tokens) -> None:
    """Nobody else could have had it."""
    engine, _ = record(Host(options=()), log_dir=str(tmp_path), enable_prefix_caching=False)
    next_turn(engine, between=lambda: None)
    assert tokens(engine, "turn2") == {"never_given": 80, "new": 32, "partial_chunk": 1, "last_token": 1}


def test_a_connector_that_saves_and_never_offers_is_told_from_one_that_saves_nothing(
    record: Record, tmp_path: Path, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hit rate of 0 % that nobody can explain (vllm#51198): what is saved is not found."""
    engine, recording = record(Host(), log_dir=str(tmp_path), enable_prefix_caching=False)
    del recording
    wrapped = engine.scheduler.connector.wrapped
    monkeypatch.setattr(wrapped, "get_num_new_matched_tokens", lambda *_: (0, False))
    next_turn(engine, between=lambda: None)
    assert tokens(engine, "turn2") == {"never_offered": 176, "new": 32, "partial_chunk": 1, "last_token": 1}


def test_what_was_offered_once_and_not_again_may_have_been_evicted(
    record: Record, tmp_path: Path, tokens: Tokens
) -> None:
    """A host memory that is too small; when the connector evicts is not in the log."""
    engine, _ = record(Host(num_slots=8), log_dir=str(tmp_path), enable_prefix_caching=False)
    for request_id in ("a", "b"):
        engine.add(request_id, PROMPT, 2)
        engine.run()
    others(engine, num_tokens=64)()
    engine.add("c", PROMPT, 2)
    engine.run()
    assert tokens(engine, "c") == {"not_offered": 96, "partial_chunk": 3, "last_token": 1}


def test_what_was_offered_once_stays_so_when_it_is_saved_again(record: Record, tmp_path: Path, tokens: Tokens) -> None:
    """The connector evicts it, saves it anew, and evicts it again: it does find what it saves."""
    engine, _ = record(Host(num_slots=8), log_dir=str(tmp_path), enable_prefix_caching=False)
    for request_id in ("a", "b"):
        engine.add(request_id, PROMPT, 2)
        engine.run()
    for request_id in ("c", "d"):
        others(engine, num_tokens=64)()
        engine.add(request_id, PROMPT, 2)
        engine.run()
    assert tokens(engine, "d") == {"not_offered": 96, "partial_chunk": 3, "last_token": 1}


def test_less_than_a_unit_of_matching_is_named(record: Record, tmp_path: Path, tokens: Tokens) -> None:
    """A shared prefix that ends within a unit is found up to the unit before (vllm#54607: the floor is not shown)."""
    units = Host(options=(("offload_prompt_only", False), ("blocks_per_chunk", 4)))
    engine, _ = record(units, log_dir=str(tmp_path), enable_prefix_caching=False)
    engine.add("a", range(129), 2)
    engine.run()
    engine.add("b", [*range(80), *range(500, 549)], 2)
    engine.run()
    assert tokens(engine, "b") == {"short_of_unit": 16, "new": 48, "last_token": 1}


def test_a_prompt_that_is_shorter_than_a_block_has_no_chunk_to_be_found_by(
    record: Record, tmp_path: Path, tokens: Tokens
) -> None:
    """Asked for twice, and computed twice (vllm#54607)."""
    engine, _ = record(Host(), log_dir=str(tmp_path))
    for request_id in ("a", "b"):
        engine.add(request_id, range(12), 1)
        engine.run()
    assert tokens(engine, "b") == {"partial_chunk": 11, "last_token": 1}


@pytest.mark.parametrize("setup", [Recorded(inner=Host()), KVLEDGER], ids=["recorded", "kvledger"])
def test_another_salt_shares_nothing_and_says_so(
    record: Record, tmp_path: Path, tokens: Tokens, setup: ConnectorSetup
) -> None:
    """The same prompt under two salts."""
    engine, _ = record_of(record, setup, tmp_path)
    for request_id in ("a", "b"):
        engine.add(request_id, PROMPT, 2, cache_salt=request_id)
        engine.run()
    assert tokens(engine, "b") == {"salted": 96, "partial_chunk": 3, "last_token": 1}


@pytest.mark.parametrize("setup", [Recorded(inner=Host()), KVLEDGER], ids=["recorded", "kvledger"])
def test_a_request_that_reads_no_cached_tokens_is_no_miss(
    record: Record, tmp_path: Path, tokens: Tokens, setup: ConnectorSetup
) -> None:
    """In vLLM's figures it is one with nothing hit (vllm#57596)."""
    engine, _ = record_of(record, setup, tmp_path)
    engine.add("a", PROMPT, 2)
    engine.run()
    engine.add("b", PROMPT, 2, reads_prefix_cache=False)
    engine.run()
    assert tokens(engine, "b") == {"skipped": 96, "partial_chunk": 3, "last_token": 1}


def test_what_another_request_is_still_computing_is_no_loss(record: Record, tmp_path: Path, tokens: Tokens) -> None:
    """Two requests with one prompt arrive together, and vLLM's prefix cache is off."""
    options = {"enable_prefix_caching": False, "long_prefill_token_threshold": 32}
    engine, _ = record(Host(), log_dir=str(tmp_path), **options)
    engine.add("a", PROMPT, 2)
    engine.add("b", PROMPT, 2)
    engine.run()
    assert tokens(engine, "b") == {"computing": 96, "partial_chunk": 3, "last_token": 1}


def test_a_connector_without_a_decoder_has_no_reason_but_what_is_new(
    record: Record, tmp_path: Path, tokens: Tokens
) -> None:
    """Which copies it gives to its workers is not in the log."""
    silent = NamedConnector(name="PlainWitness", module="sim.witness")
    setup = Recorded(inner=silent, name="KVLedgerRecorder")
    engine, _ = record(setup=setup, log_dir=str(tmp_path), enable_prefix_caching=False)
    next_turn(engine, between=lambda: None)
    assert tokens(engine, "turn2") == {"recorded": 176, "new": 32, "partial_chunk": 1, "last_token": 1}


def record_of(record: Record, setup: ConnectorSetup, tmp_path: Path) -> Sequence[Any]:
    """An engine, and its recording if it has one."""
    if isinstance(setup, Recorded):
        return record(setup=setup, log_dir=str(tmp_path))
    options = {"num_blocks": 60, "host_bytes": 1 << 22, "chunk_size": 16}
    return SimulatedEngine(setup=setup, log_dir=str(tmp_path), **options), None
