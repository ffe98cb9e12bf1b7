"""A client goes away in the middle: its request leaves nothing behind, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.engines import Reference, read_sound_log
from kvledger.adapters.lab.demo.engine import RunningEngine, running_engine, sampling
from kvledger.adapters.lab.demo.workload import Workload
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.vllm

WORKLOAD = Workload(seed=1)

ChooseVictim = Callable[[RunningEngine], str | None]


def while_it_decodes(engine: RunningEngine) -> str | None:
    """Choose the second request once it has said something."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    decoding = (r for r in scheduler.running if r.request_id.startswith("1-") and r.num_output_tokens > 40)
    return next((request.request_id for request in decoding), None)


def while_it_waits_preempted(engine: RunningEngine) -> str | None:
    """Choose the first request that lost its blocks."""
    from vllm.v1.request import RequestStatus

    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempted = (r for r in scheduler.requests.values() if r.status is RequestStatus.PREEMPTED)
    return next((request.request_id for request in preempted), None)


def while_its_prompt_is_computed(engine: RunningEngine) -> str | None:
    """Choose the first request that has computed a part of its prompt."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    partly = (r for r in scheduler.running if 0 < r.num_computed_tokens < r.num_prompt_tokens)
    return next((request.request_id for request in partly), None)


@pytest.mark.parametrize(
    "choose",
    [
        while_it_waits_preempted,
        pytest.param(while_it_decodes, marks=pytest.mark.long),
        pytest.param(while_its_prompt_is_computed, marks=pytest.mark.long),
    ],
)
def test_an_abort_leaves_nothing_behind(
    choose: ChooseVictim, model: Path, reference: Reference, tmp_path: Path
) -> None:
    """The others say what they would have said; the aborted request is finished and released in the log."""
    expected = reference(WORKLOAD.prompts(), WORKLOAD.max_tokens)
    with running_engine(model, WORKLOAD, tmp_path) as engine:
        outputs, victim = _generate_and_abort(engine, choose)
        assert engine.generate(WORKLOAD.prompts(), WORKLOAD.max_tokens) == expected  # whatever it left in the pool
    assert victim
    index = victim.partition("-")[0]
    assert outputs == {str(i): tokens for i, tokens in enumerate(expected) if str(i) != index}
    log = read_sound_log(engine.log_path)
    (finished,) = log.life_of(victim, e.RequestFinished)
    assert finished.status == "FINISHED_ABORTED"
    assert log.life_of(victim, e.RequestReleased)
    assert log.num_requests_left == 0


def _generate_and_abort(engine: RunningEngine, choose: ChooseVictim) -> tuple[dict[str, list[int]], str]:
    """Outputs of those that finished, by request index, and the id of the one that was aborted."""
    llm_engine = engine.llm.llm_engine
    for index, prompt in enumerate(WORKLOAD.prompts()):
        llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling(WORKLOAD.max_tokens))
    outputs: dict[str, list[int]] = {}
    victim = ""
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            if output.finished:
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        chosen = None if victim else choose(engine)
        if chosen is not None:
            victim = chosen
            llm_engine.abort_request([victim.partition("-")[0]])
    return outputs, victim
