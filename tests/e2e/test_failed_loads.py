"""Loads fail in a real engine: no answer comes of what was not there, now or later.

`tests/adapters/vllm/test_failed_loads.py` has the cases; here vLLM's own prefix cache, model and workers are real. Each
way to what a failed load leaves behind is gone in one engine after the other, as starting one takes most of the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from sim.broken_copies import break_copies
from sim.slow_copies import SlowCopies, slow_down

from e2e.engines import Reference, keep_two_steps_in_flight, read_sound_log
from kvledger.adapters.lab.demo.engine import RunningEngine, generate, running_engine, sampling, settle
from kvledger.adapters.lab.demo.model import FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE
from kvledger.adapters.lab.demo.workload import Workload
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.vllm

WORKLOAD = Workload(num_blocks=128, enable_prefix_caching=True)
NUM_OUTPUT_TOKENS = 20
CHANCE = random.Random(1)
BEGINNING = [CHANCE.randrange(FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE) for _ in range(256)]
SOMEBODY_ELSE, KEPT = ([CHANCE.randrange(FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE) for _ in range(64)] for _ in range(2))
PROMPTS = [*([*BEGINNING, *range(first, first + 40)] for first in (100, 200, 300)), SOMEBODY_ELSE]


@attrs.define
class Clients:
    """Requests that come while others are computed, and their answers."""

    engine: RunningEngine
    loads_beside: bool
    two_steps: bool
    answers: dict[int, list[int] | None] = attrs.field(factory=dict)
    """By prompt; None where the request ended with an error."""

    @property
    def core(self) -> Any:
        """VLLM's engine core."""
        return self.engine.llm.llm_engine.engine_core.engine_core

    def ask(self, *prompts: int) -> None:
        """One request for each prompt, by its place in `PROMPTS`."""
        for number in prompts:
            request = {"prompt_token_ids": PROMPTS[number]}
            self.engine.llm.llm_engine.add_request(str(number), request, sampling(NUM_OUTPUT_TOKENS))

    def step(self) -> None:
        """One step of the core, which may be the second in flight."""
        for output in self.engine.llm.llm_engine.step():
            if output.finished:
                answer = output.outputs[0]
                failed = answer.finish_reason == "error"
                self.answers[int(output.request_id)] = None if failed else list(answer.token_ids)

    def run(self) -> None:
        """Step until all are answered. From here on prompts are computed in pieces of two blocks."""
        self.core.scheduler.scheduler_config.long_prefill_token_threshold = 64
        while self.engine.llm.llm_engine.has_unfinished_requests():
            self.step()
        self.core.scheduler.scheduler_config.long_prefill_token_threshold = 0


def fill_blocks(engine: RunningEngine) -> None:
    """Let no block, none of which is used now, hold by chance what it held before: the same prompts come again."""

    def fill(worker: Any) -> None:
        for cache in worker.model_runner.kv_caches:
            cache.fill_(1)

    engine.llm.collective_rpc(fill)


def worker() -> Any:
    """The engine's only worker, as the wrappers of copy engines want it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    return SimpleNamespace(worker=connector, workers=[connector])


def aborted_in_the_failing_step(clients: Clients) -> set[int]:
    """The owner does not run any more when vLLM looks for whom the failure concerns, and sharers read on."""
    break_copies(worker(), "load", 1)
    clients.ask(0, 1, 2)
    clients.core.aborts_queue.put_nowait([next(iter(clients.core.scheduler.requests))])
    clients.step()
    clients.engine.llm.llm_engine.abort_request(["0"])
    clients.run()
    return set() if clients.loads_beside else {1, 2}


def computed_again_while_a_sharer_comes(clients: Clients) -> set[int]:
    """vllm#49250: vLLM lets who comes later hit blocks which the owner has not written again."""
    break_copies(worker(), "load", 1)
    clients.ask(0, 3)  # somebody else, as vLLM lets a prompt that is alone have a whole step
    clients.step()
    if clients.two_steps:  # the failure is not known yet
        clients.ask(1)
        clients.step()
    clients.core.scheduler.scheduler_config.long_prefill_token_threshold = 64
    clients.step()
    clients.ask(2, *(() if clients.two_steps else (1,)))
    clients.run()
    return {0} if clients.loads_beside or not clients.two_steps else {0, 1}


def preempted_by_a_failed_reset(clients: Clients) -> set[int]:
    """VLLM takes the blocks of all that run, finds one kept by a copy, and leaves its prefix cache as it is."""
    (copies,) = slow_down(worker(), "load" if clients.loads_beside else "save")
    if clients.loads_beside:
        clients.ask(0)
        clients.step()
    else:
        generate(clients.engine.llm, [KEPT], 1)  # and its save is still under way
        break_copies(worker(), "load", 1)
        clients.ask(0)
        clients.step()
    assert copies.pending()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        clients.engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    let_go(copies, fails=clients.loads_beside)
    clients.ask(1, 2)
    clients.run()
    return {0} if clients.loads_beside or not clients.two_steps else {0, 1, 2}


def let_go(copies: SlowCopies, *, fails: bool) -> None:
    """End what is under way; later copies are done at once."""
    copies.slow.clear()
    for copy in copies.pending():
        copy.fail() if fails else copy.finish()


Way = Callable[[Clients], set[int]]
WAYS: list[Way] = [
    aborted_in_the_failing_step,
    computed_again_while_a_sharer_comes,
    preempted_by_a_failed_reset,
]
long = pytest.mark.long


@pytest.mark.parametrize(
    ("policy", "mode", "async_scheduling"),
    [
        ("recompute", "sync", False),
        ("fail", "sync", True),
        pytest.param("fail", "sync", False, marks=long),
        pytest.param("recompute", "async", False, marks=long),
        pytest.param("fail", "async", False, marks=long),
        pytest.param("recompute", "async", True, marks=long),
        pytest.param("fail", "async", True, marks=long),
        # Not "recompute", "sync", True: that is warned of at start, as vLLM delivers a token that the second step in
        # flight computed on unfilled blocks; `load_mode` "auto" loads asynchronously then.
    ],
)
def test_all_are_answered_as_without_a_connector(
    model: Path,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    mode: str,
    async_scheduling: bool,
) -> None:
    """Who was there when a load failed, who asks again, and who is loaded once vLLM's cache is empty."""
    expected = reference(PROMPTS, NUM_OUTPUT_TOKENS)
    if async_scheduling:
        keep_two_steps_in_flight(monkeypatch)
    with running_engine(model, WORKLOAD, tmp_path, policy=policy, load_mode=mode, save_mode="async") as engine:
        engine.generate([BEGINNING], 2)
        for way in WAYS:
            settle(engine.llm)
            assert engine.llm.reset_prefix_cache()
            fill_blocks(engine)
            clients = Clients(engine, loads_beside=mode == "async", two_steps=async_scheduling)
            ended = way(clients)
            again = [engine.generate(PROMPTS, NUM_OUTPUT_TOKENS)]
            settle(engine.llm)
            assert engine.llm.reset_prefix_cache()
            fill_blocks(engine)
            again.append(engine.generate(PROMPTS, NUM_OUTPUT_TOKENS))
            assert again == [expected] * 2, way.__name__
            answers = {number: answer for number, answer in enumerate(expected) if number in clients.answers}
            if policy == "fail":
                answers |= dict.fromkeys(ended)
            assert clients.answers == answers, way.__name__
            assert clients.answers.keys() >= {1, 2}
        settle(engine.llm)
    log = read_sound_log(engine.log_path)
    assert log.num_requests_left == 0
    assert [failed.request_id[0] for failed in log.of_type(e.LoadFailed)] == ["0"] * len(WAYS)
    (aborted,) = [end for end in log.of_type(e.RequestFinished) if end.status == "FINISHED_ABORTED"]
    assert log.of_type(e.LoadFailed)[0].request_id == aborted.request_id
    assert {load.is_async for load in log.of_type(e.LoadIssued)} == {mode == "async"}
    completed = log.of_type(e.LoadCompleted)
    assert len(completed) >= len(WAYS), "after each reset what was saved anew is loaded"
