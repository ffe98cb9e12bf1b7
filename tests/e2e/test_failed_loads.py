"""A load within a step fails in a real engine: no answer comes of what was not there, now or later.

`tests/adapters/vllm/test_failed_loads.py` has the cases; here vLLM's own prefix cache, model and workers are real.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sim.broken_copies import break_copies

from e2e.engines import Reference, RunningEngine, read_sound_log, running_engine, sampling
from kvledger.adapters.demo.model import FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE
from kvledger.adapters.demo.workload import Workload
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.vllm

WORKLOAD = Workload(num_blocks=128, enable_prefix_caching=True)
NUM_OUTPUT_TOKENS = 20


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_owner_is_aborted_in_the_step_in_which_its_load_fails(
    model: Path, reference: Reference, tmp_path: Path, policy: str
) -> None:
    """VLLM leaves the hashes in its prefix cache and lets a sharer read on: all are answered as without a connector."""
    chance = random.Random(1)
    beginning = [chance.randrange(FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE) for _ in range(256)]
    prompts = [[*beginning, *range(first, first + 40)] for first in (100, 200, 300)]
    expected = reference(prompts, NUM_OUTPUT_TOKENS)
    with running_engine(model, WORKLOAD, tmp_path, policy=policy, load_mode="sync") as engine:
        engine.generate([beginning], 2)
        engine.settle()
        assert engine.llm.reset_prefix_cache()
        _break_next_load()
        answered = _generate_and_abort_the_first(engine, prompts)
        again = [engine.generate(prompts, NUM_OUTPUT_TOKENS)]
        engine.settle()
        assert engine.llm.reset_prefix_cache()
        again.append(engine.generate(prompts, NUM_OUTPUT_TOKENS))
    assert answered == (expected[1:] if policy == "recompute" else [None, None])
    assert again == [expected] * 2
    log = read_sound_log(engine.log_path)
    (failed,) = log.of_type(e.LoadFailed)
    (aborted,) = [end for end in log.of_type(e.RequestFinished) if end.status == "FINISHED_ABORTED"]
    assert failed.request_id == aborted.request_id
    assert log.num_requests_left == 0
    assert log.of_type(e.LoadCompleted), "after the reset what was saved anew is loaded"


def _break_next_load() -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    break_copies(SimpleNamespace(worker=get_kv_transfer_group()), "load", 1)


def _generate_and_abort_the_first(engine: RunningEngine, prompts: list[list[int]]) -> list[list[int] | None]:
    """What the others are answered, None for one that ends with an error.

    The first is aborted while its only step is computed; the core takes that up before the output of the step.
    """
    llm_engine: Any = engine.llm.llm_engine
    core = llm_engine.engine_core.engine_core
    for number, prompt in enumerate(prompts):
        llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling(NUM_OUTPUT_TOKENS))
    core.aborts_queue.put_nowait([next(iter(core.scheduler.requests))])
    outputs = llm_engine.step()
    llm_engine.abort_request(["0"])
    # One sharer computes the beginning again in pieces; vLLM would let the other read it meanwhile.
    core.scheduler.scheduler_config.long_prefill_token_threshold = 64
    while llm_engine.has_unfinished_requests():
        outputs += llm_engine.step()
    answers = {output.request_id: output.outputs[0] for output in outputs if output.finished}
    return [
        None if answers[name].finish_reason == "error" else list(answers[name].token_ids)
        for name in map(str, range(1, len(prompts)))
    ]
