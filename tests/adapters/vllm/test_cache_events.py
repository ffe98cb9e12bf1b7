"""KV events: what is published of the host pool can be loaded from it, and is described as vLLM describes it.

That published is exactly what can be loaded, after every step and whatever goes wrong, is held in every world
(`tests/sim/subscriber.py`); here stands what a world does not show.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sim.broken_copies import break_copies
from sim.subscriber import WHOLE_HASHES, Subscriber, assert_told
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvledger.adapters.lab.simulation.connectors import KVLEDGER_TRANSFER
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

BLOCK = 16


@pytest.fixture(autouse=True)
def _whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WHOLE_HASHES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def subscriber() -> Subscriber:
    """Who listens."""
    return Subscriber()


@pytest.fixture
def engine(make_engine: Any, subscriber: Subscriber) -> Any:
    """Chunks of two blocks, room for all."""
    return make_engine(num_blocks=40, chunk_size=2 * BLOCK, subscriber=subscriber)


def told_prompts(subscriber: Subscriber) -> set[tuple[int, ...]]:
    """Token ids of each published block."""
    return {block.token_ids for block in subscriber.on_host.values()}


def test_a_block_is_published_as_vllm_publishes_the_same_block(engine: Any, subscriber: Subscriber) -> None:
    """Hash, parent, tokens, salt and group are those of the device's event; the subscriber compares them."""
    engine.serve("salted", range(64), 2, cache_salt="tenant")
    assert len(subscriber.on_host) == 4
    assert subscriber.on_host.keys() <= subscriber.ever_on_device.keys()
    first, *others = subscriber.on_host.values()
    assert first.parent is None
    assert first.extra_keys == ("tenant",)
    assert [block.extra_keys for block in others] == [None] * 3
    assert {block.kind for block in subscriber.on_host.values()} == {"full_attention"}


@pytest.mark.parametrize("as_numbers", ["0", "1"])
def test_block_hashes_are_published_in_the_form_that_vllm_was_told(
    make_engine: Any, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch, as_numbers: str
) -> None:
    """VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES: whole hashes, or their last 64 bits as a number."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_numbers)
    engine = make_engine(num_blocks=40, chunk_size=BLOCK, subscriber=subscriber)
    request = engine.add("a", range(33), 2)
    hashes = [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes]
    engine.run()
    assert list(subscriber.on_host) == hashes


def test_a_chunk_is_published_when_every_rank_has_saved_it_and_not_before(
    make_engine: Any, subscriber: Subscriber
) -> None:
    """One rank's copy fails: nothing is published of that chunk, as nothing of it can be loaded."""
    engine = make_engine(num_blocks=40, chunk_size=2 * BLOCK, num_ranks=2, subscriber=subscriber)
    break_copies(SimpleNamespace(worker=engine.workers[1]), "save", 1)
    engine.serve("a", range(64), 2)
    engine.serve("b", range(100, 164), 2)
    assert engine.logged(e.SaveFailed)
    assert told_prompts(subscriber) == {tuple(range(start, start + BLOCK)) for start in range(100, 164, BLOCK)}


def test_what_is_stored_is_published_after_the_log_says_so(
    engine: Any, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that was begun in time is completed while nothing is written: its blocks are published afterwards."""
    is_behind = True
    journal = engine.connector.scheduler_side.journal
    monkeypatch.setattr(journal, "is_behind", lambda: is_behind and engine.num_steps > 1)
    engine.serve("a", range(64), 4)
    assert len(engine.projections.pool)
    assert not subscriber.on_host
    is_behind = False
    engine.serve("b", range(100, 104), 2)
    assert len(subscriber.on_host) == 4


def test_prompts_that_part_within_a_chunk_share_its_first_block(make_engine: Any, subscriber: Subscriber) -> None:
    """A block of several chunks is published with the first of them and removed with the last."""
    engine = make_engine(num_blocks=40, chunk_size=2 * BLOCK, subscriber=subscriber)
    engine.serve("a", [*range(16), *range(100, 116)], 2)
    engine.serve("b", [*range(16), *range(200, 216)], 2)
    assert subscriber.num_stored == len(subscriber.on_host) == 3
    for key, num_left in zip(list(engine.projections.pool), (2, 0), strict=True):
        engine.connector.scheduler_side.journal.follow(e.LogNote("", 0), (e.ChunksTainted((key,), 0),))
        subscriber.publish(SimpleNamespace(events=engine.connector.take_events()))
        assert len(subscriber.on_host) == num_left


def test_a_reset_removes_what_the_host_has_and_says_nothing_of_the_device(
    engine: Any, monkeypatch: pytest.MonkeyPatch, subscriber: Subscriber
) -> None:
    """AllBlocksCleared names no medium, so it is left to vLLM, whose own blocks it speaks of."""
    engine.serve("a", range(64), 2)
    published: list[Any] = []
    monkeypatch.setattr(
        engine.scheduler, "kv_event_publisher", SimpleNamespace(publish=published.append, shutdown=list)
    )
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    events = list(engine.connector.take_events())
    assert [type(event) for event in events] == [BlockRemoved]
    assert set(events[0].block_hashes) == set(subscriber.on_host)
    assert engine.connector.take_events() == []
    engine.serve("b", range(100, 104), 2)
    assert [type(event) for batch in published for event in batch.events] == [AllBlocksCleared]


def test_where_nothing_is_decided_any_more_everything_is_removed(
    make_engine: Any, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corrupt ledger loads nothing, so nobody is to be sent here for it."""
    engine = make_engine(replays=False, num_blocks=40, chunk_size=BLOCK, subscriber=subscriber)
    engine.serve("a", range(64), 2)
    assert subscriber.on_host
    monkeypatch.setattr(engine.projections.tracker, "fold", None, raising=False)
    monkeypatch.setattr(engine.projections, "fold", _fail)
    engine.serve("b", range(100, 164), 2)
    assert engine.connector.scheduler_side.journal.is_disabled
    assert not subscriber.on_host


def _fail(*_arguments: object) -> None:
    message = "as a defect would"
    raise RuntimeError(message)


def test_a_request_that_cannot_be_described_costs_the_events_and_nobody_s_cache(
    engine: Any, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    """What is read of a request is vLLM's to change: then routers are told that nothing is there, and people why."""
    engine.serve("a", range(64), 2)
    monkeypatch.setattr("kvledger.adapters.vllm.cache_events.maybe_convert_block_hash", _fail)
    engine.serve("b", range(100, 164), 2)
    assert not subscriber.on_host
    assert "KV events of the host pool stop" in told.text
    assert engine.scheduler.reset_prefix_cache()
    engine.serve("b again", range(100, 164), 2)
    assert engine.logged(e.LoadIssued, request_id="b again")


def test_without_kv_events_nothing_is_followed(make_engine: Any) -> None:
    """It costs nothing where nobody listens."""
    engine = make_engine(num_blocks=40, chunk_size=BLOCK)
    engine.serve("a", range(64), 2)
    assert engine.connector.scheduler_side.journal.follow is None
    assert not engine.connector.take_events()


def test_chunks_within_a_block_are_not_published_and_people_are_told(
    make_engine: Any, subscriber: Subscriber, told: pytest.LogCaptureFixture
) -> None:
    """Events name whole blocks; a router would be promised more than a lookup finds."""
    engine = make_engine(num_blocks=40, chunk_size=BLOCK // 2, subscriber=subscriber)
    engine.serve("a", range(64), 2)
    assert not subscriber.on_host
    assert "set chunk_size to a multiple of the block size" in told.text


def test_token_ids_are_kept_no_longer_than_the_save_takes(engine: Any) -> None:
    """The log has none, and what the connector keeps of what it has published are hashes."""
    engine.serve("a", range(64), 2)
    events = engine.connector.scheduler_side._cache_events
    assert not events._saving
    assert not events._stored
    assert all(isinstance(each, bytes) for hashes in events._published.values() for each in hashes)


def test_multi_connector_passes_them_on(make_engine: Any, subscriber: Subscriber) -> None:
    """Ours beside another, in vLLM's `MultiConnector`."""
    recorded: type[SimulatedEngine] = type(make_engine(num_blocks=4))
    ours = {"log_dir": None, "chunk_size": BLOCK, "host_bytes": 1 << 20, "load_mode": "sync", "offer": "always"}
    theirs = {"kv_connector": "Neighbour", "kv_connector_module_path": "sim.neighbour", "kv_role": "kv_both"}
    engine: Any = recorded(
        num_blocks=40,
        subscriber=subscriber,
        kv_transfer={"kv_connector": "MultiConnector", "kv_connector_module_path": None},
        connectors=[
            {**KVLEDGER_TRANSFER, "kv_connector_extra_config": ours},
            {**theirs, "kv_connector_extra_config": {"num_tokens": 0}},
        ],
    )
    engine.serve("a", range(64), 2)
    assert_told(subscriber, engine.connector.scheduler_side)
    assert len(subscriber.on_host) == 4
    engine.check_at_end()
