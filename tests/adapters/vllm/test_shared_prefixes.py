"""A burst of requests whose common prefix is on the host and no longer on the device: it is loaded once.

vllm#29087 loads it once per request: the copies fill the device and cause preemptions. OffloadingConnector makes a
lookup wait while the same blocks are being loaded; a burst may not take much longer with kvledger.
"""

from __future__ import annotations

from random import Random
from typing import Any

import attrs
import pytest
from sim.connectors import NoConnector
from sim.slow_copies import delay, slow_down
from vllm.sampling_params import SamplingParams

from kvledger.adapters.lab.simulation.connectors import KVLEDGER, Offloading
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.lab.simulation.hashed_model import block_bytes
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


@attrs.frozen
class Burst:
    """Requests with one prefix, and room on the device for the prefix once and for what each has of its own."""

    num_prefix_tokens: int = 320
    num_requests: int = 8
    num_own_tokens: int = 16
    num_output_tokens: int = 40
    num_spare_blocks: int = 6
    num_steps_to_load: int = 3
    num_steps_between: int = 0
    """Engine steps from one arrival to the next."""
    chunk_size: int = 16
    two_steps: bool = False
    load_mode: str = "async"
    num_history_tokens: int = 0
    """Tokens after the prefix that only this request has and that are on the host, as of a conversation."""
    num_parts: int = 1
    """With 3, every third request has a third of the prefix, the next one two thirds."""

    @property
    def num_blocks(self) -> int:
        """Blocks on the device."""
        num_own = -(-(self.num_own_tokens + self.num_output_tokens) // 16) + 1 + self.num_history_tokens // 16
        return self.num_prefix_tokens // 16 + self.num_requests * num_own + self.num_spare_blocks

    @classmethod
    def drawn(cls, seed: int) -> Burst:
        """One of many."""
        draw = Random(seed)
        return cls(
            16 * draw.randint(4, 30),
            draw.randint(2, 12),
            draw.choice([4, 16, 40]),
            draw.choice([8, 24, 40, 64]),
            draw.randint(0, 12),
            draw.randint(1, 12),
            draw.choice([0, 0, 1, 3]),
            draw.choice([16, 16, 32]),
            draw.random() < 0.5,
            draw.choice(["async", "async", "auto", "sync"]),
            draw.choice([0, 0, 16 * draw.randint(1, 40)]),
            draw.choice([1, 1, 3]),
        )

    def cached(self, number: int) -> list[int]:
        """What the host has of a request."""
        num_tokens = self.num_prefix_tokens * (1 + number % self.num_parts) // self.num_parts
        return [*range(num_tokens), *[600 + number] * self.num_history_tokens]

    def serve(self, setup: Any, **connector: Any) -> tuple[int, int]:
        """Engine steps and preemptions of the burst."""
        engine = SimulatedEngine(
            setup=setup,
            num_blocks=self.num_blocks,
            host_bytes=1200 * block_bytes(16),
            chunk_size=self.chunk_size,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            max_model_len=2048,
            async_scheduling=self.two_steps,
            **connector,
        )
        if setup is KVLEDGER:
            delay(engine, self.num_steps_to_load)
        for number in range(self.num_requests if self.num_history_tokens else self.num_parts):
            engine.add(f"earlier {number}", [*self.cached(number), 900], 2)
            engine.run()
        engine.scheduler.reset_prefix_cache()
        start, num_arrived, num_earlier = engine.num_steps, 0, engine.num_preemptions
        while engine.scheduler.has_requests() or num_arrived < self.num_requests:
            while num_arrived < self.num_requests and num_arrived * self.num_steps_between <= engine.num_steps - start:
                own = [500 - num_arrived] * self.num_own_tokens
                engine.add(f"request {num_arrived}", self.cached(num_arrived) + own, self.num_output_tokens)
                num_arrived += 1
            engine.step()
        return engine.num_steps - start, engine.num_preemptions - num_earlier

    def check(self) -> None:
        """No more preemptions than without a connector, and no more than 1.25 times OffloadingConnector's steps."""
        _, most_preemptions = self.serve(NoConnector())
        most_steps, _ = self.serve(Offloading(num_questions=self.num_steps_to_load))
        num_steps, num_preemptions = self.serve(KVLEDGER, load_mode=self.load_mode, offer="always")
        assert num_preemptions <= most_preemptions, self
        assert num_steps <= 1.25 * most_steps, self


@pytest.mark.parametrize("two_steps", [False, True])
@pytest.mark.parametrize("load_mode", ["sync", "async", "auto"])
def test_a_burst_with_one_prefix_preempts_nobody(load_mode: str, *, two_steps: bool) -> None:
    """The prefix was loaded eight times: 76 steps and 4 preemptions, 46 and none with OffloadingConnector."""
    Burst(load_mode=load_mode, two_steps=two_steps).check()


@pytest.mark.parametrize("two_steps", [False, True])
@pytest.mark.parametrize("num_history_tokens", [352, 704])
def test_conversations_with_one_system_prompt_load_it_once(num_history_tokens: int, *, two_steps: bool) -> None:
    """Each loaded it for itself, because it was less than half: 89 steps and a preemption, 49 with Offloading."""
    Burst(num_history_tokens=num_history_tokens, two_steps=two_steps).check()


@pytest.mark.parametrize("num_requests", [3, 9])
def test_prompts_of_which_one_continues_the_other_load_their_common_part_once(num_requests: int) -> None:
    """Where the longer one is more than twice as long, it was loaded again."""
    Burst(num_prefix_tokens=960, num_parts=3, num_requests=num_requests).check()


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 200))])
def test_a_random_burst_with_one_prefix_preempts_nobody(seed: int) -> None:
    """Prefixes, bursts, pools, latencies, arrivals and modes are drawn."""
    Burst.drawn(seed).check()


PREFIX = list(range(64))


def bursting(make_engine: Any, **options: Any) -> tuple[Any, Any]:
    """Two requests, of which the first loads their prefix; its copy goes on until a test ends it."""
    settings = {"num_blocks": 60, "chunk_size": 16, "load_mode": "async", "offer": "always"}
    engine = make_engine(**(settings | options))
    engine.add("earlier", [*PREFIX, 400], 2)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    copies = slow_down(engine, "load")[0]
    for name in ("first", "second"):
        engine.add(name, [*PREFIX, *([ord(name[0])] * 8)], 6)
    for _ in range(12):
        engine.step()
    return engine, copies


def finish(engine: Any, copies: Any) -> None:
    """End the copies that wait, and let those that come run as they do."""
    copies.slow.clear()
    for copy in copies.pending():
        copy.finish()
    engine.run()


def loads_of(engine: Any, request_id: str) -> list[Any]:
    """The loads of a request."""
    found: list[Any] = engine.logged(e.LoadIssued, request_id=request_id)
    return found


def test_the_second_waits_and_loads_nothing(make_engine: Any) -> None:
    """Longer than `max_deferred_lookups` steps, because a load ends by itself."""
    engine, copies = bursting(make_engine)
    (load,) = engine.logged(e.LoadIssued)
    deferred = engine.logged(e.LookupDeferred, request_id="second")
    assert len(deferred) > 8
    assert {(each.job_id, each.num_deferred) for each in deferred} == {(load.job_id, 1)}
    finish(engine, copies)
    assert loads_of(engine, "second") == []
    (answer, *_) = engine.check_answers("second")
    assert answer.num_computed_tokens == 64


def test_without_a_prefix_cache_the_second_loads_for_itself(make_engine: Any) -> None:
    """Blocks are not shared then, so waiting gains nothing."""
    engine, copies = bursting(make_engine, enable_prefix_caching=False)
    assert engine.logged(e.LookupDeferred) == []
    assert len(engine.logged(e.LoadIssued)) == 2
    finish(engine, copies)


def test_the_second_loads_for_itself_when_the_first_is_aborted(make_engine: Any) -> None:
    """The blocks of an aborted request do not come into the prefix cache."""
    engine, copies = bursting(make_engine)
    engine.abort("first")
    for _ in range(3):
        engine.step()
    assert len(loads_of(engine, "second")) == 1
    finish(engine, copies)


def test_the_second_computes_when_the_load_of_the_first_fails(make_engine: Any) -> None:
    """It is released, and what could not be loaded is not offered."""
    engine, copies = bursting(make_engine)
    for copy in copies.pending():
        copy.fail()
    finish(engine, copies)
    assert loads_of(engine, "second") == []


def test_who_does_not_read_the_prefix_cache_does_not_wait(make_engine: Any) -> None:
    """Whatever the connector answers, vLLM lets such a request compute everything."""
    engine, copies = bursting(make_engine)
    engine.add_with("third", [*PREFIX, 7], SamplingParams(max_tokens=4, skip_reading_prefix_cache=True))
    assert "third" in engine.step().num_scheduled_tokens
    finish(engine, copies)
    assert engine.logged(e.InvariantViolated) == []


def test_who_shares_nothing_is_served_meanwhile(make_engine: Any) -> None:
    """Only requests that lack the same chunks wait."""
    engine, copies = bursting(make_engine)
    engine.add("stranger", range(900, 930), 4)
    assert "stranger" in engine.step().num_scheduled_tokens
    finish(engine, copies)
