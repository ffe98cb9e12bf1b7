"""Resets of vLLM's prefix cache that spare the connector: no hook is called, the log has them all the same.

vllm#42125, #48352, lmdeploy#4917: weights were exchanged, `reset_prefix_cache()` said True, and KV of the old weights
came back from the host. Nothing in the log said so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sim.connectors import Recorded
from sim.recorded import events_of, recordings

from kvledger.adapters.lab.simulation.connectors import Offloading
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.lab.simulation.hashed_model import block_bytes
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

RESETS = (e.CacheReset, e.PrefixCacheReset)


def resets_in(engine: Any) -> list[type[e.Event]]:
    """Kinds of resets in the log, in order."""
    return [type(event) for event in engine.logged(*RESETS)]


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_reset_that_spares_the_connector_is_recorded_in_the_next_hook(
    make_engine: Any, *, enable_prefix_caching: bool
) -> None:
    """One event for each; what was saved can still be loaded, as before."""
    engine = make_engine(num_blocks=40, chunk_size=16, enable_prefix_caching=enable_prefix_caching)
    engine.serve("first", range(100), 8)
    assert resets_in(engine) == []
    for number in (1, 2):
        assert engine.scheduler.reset_prefix_cache()
        engine.serve(f"again {number}", range(100), 8)
        assert resets_in(engine) == [e.PrefixCacheReset] * number
        assert engine.logged(e.LoadIssued, request_id=f"again {number}")


def test_a_reset_of_the_connector_is_no_reset_that_spares_it(make_engine: Any) -> None:
    """VLLM resets its own cache first, then asks the connector; a spared one before it is of no more interest."""
    engine = make_engine(num_blocks=40, chunk_size=16)
    engine.serve("first", range(100), 8)
    engine.scheduler.reset_prefix_cache()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.serve("again", range(100), 8)
    assert resets_in(engine) == [e.CacheReset]
    engine.scheduler.reset_prefix_cache()
    engine.serve("once more", range(100), 8)
    assert resets_in(engine) == [e.CacheReset, e.PrefixCacheReset]


def test_a_reset_that_vllm_refuses_is_not_recorded(make_engine: Any) -> None:
    """It answers False while a request runs, and its cache stays as it is."""
    engine = make_engine(num_blocks=40, chunk_size=16)
    engine.add("running", range(100), 20)
    for _ in range(3):
        engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert resets_in(engine) == []


def test_requests_that_a_spared_reset_preempts_are_recorded_before_it(make_engine: Any) -> None:
    """What is saved of them is as old as the rest, so their saves come first."""
    engine = make_engine(num_blocks=40, chunk_size=16)
    for name, first in (("one", 0), ("two", 200)):
        engine.add(name, range(first, first + 70), 20)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    kinds = [type(event) for event in engine.logged(e.RequestPreempted, e.PrefixCacheReset)]
    assert kinds == [e.RequestPreempted, e.RequestPreempted, e.PrefixCacheReset]


def test_why_says_that_loaded_tokens_are_from_before_a_reset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only those: what was computed and saved since is not."""
    engine = SimulatedEngine(num_blocks=40, host_bytes=1 << 20, chunk_size=16, log_dir=str(tmp_path))
    engine.add("before", range(64), 8)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.add("between", range(128), 8)
    engine.run()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("fresh", range(64), 8)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.add("long", range(128), 8)
    engine.run()
    engine.add("last", [*range(128), 7], 8)
    engine.run()
    engine.shutdown()
    (path,) = tmp_path.iterdir()
    texts = {}
    for name in ("between", "fresh", "long", "last"):
        assert main(["why", str(path), name]) == 0
        texts[name] = capsys.readouterr().out
    assert "64 of these are older than event" in " ".join(texts["between"].split())
    assert "of these are older than event" not in texts["fresh"]
    assert "64 of these are older than event" in " ".join(texts["long"].split())
    assert main(["verify", str(path)]) == 0
    assert len([event for _, event in open_log(path).trusted_events() if isinstance(event, e.PrefixCacheReset)]) == 2


def test_why_says_that_vllm_s_cache_has_tokens_from_before_a_reset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request that found them there, because another one had loaded them, answered with KV of the old weights, too.

    The same after the host pool had evicted them and saved them again from those blocks.
    """
    engine = SimulatedEngine(num_blocks=60, host_bytes=8 * block_bytes(16), chunk_size=16, log_dir=str(tmp_path))

    def serve(name: str, prompt: Any) -> None:
        engine.add(name, prompt, 4)
        engine.run()

    serve("before", range(64))
    engine.scheduler.reset_prefix_cache()
    serve("loads", [*range(64), 7])
    serve("shares", [*range(64), 8])
    serve("stranger", range(200, 330))
    serve("saves again", [*range(64), 9])
    engine.scheduler.reset_prefix_cache()
    serve("loads again", [*range(64), 9])
    engine.shutdown()
    (path,) = tmp_path.iterdir()
    for name in ("shares", "saves again", "loads again"):
        assert main(["why", str(path), name]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "64 of these are older than event" in text, name
    assert main(["why", str(path), "stranger"]) == 0
    assert "of these are older than event" not in capsys.readouterr().out
    assert main(["verify", str(path)]) == 0


def test_a_recorder_records_a_reset_that_spared_the_connector_it_wraps() -> None:
    """The wrong KV of a recorded OffloadingConnector left no trace either."""
    engine = SimulatedEngine(setup=Recorded(inner=Offloading()), num_blocks=40, host_bytes=1 << 20, chunk_size=16)
    engine.add("first", range(100), 8)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.add("again", range(100), 8)
    engine.run()
    (recording,) = recordings(engine.scheduler.connector)
    events = [event for _, event in events_of(recording)]
    engine.shutdown()
    assert [type(event) for event in events if isinstance(event, RESETS)] == [e.PrefixCacheReset]
