"""Speculative decoding: drafts are computed ahead and partly taken back; no rejected draft's KV is ever saved.

The model here writes the KV of every draft before it knows whether it is right, as a real one does. So what stands
behind the accepted tokens is wrong KV that somebody will write over, and a chunk saved too early would hold it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import SpeculativeConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from kvledger.adapters.lab.simulation import engine as sim_engine
from kvledger.adapters.lab.simulation.expected import chained_hash, next_token
from kvledger.adapters.lab.simulation.hashed_model import HashedModel
from kvledger.adapters.lab.simulation.tiny_model import VOCABULARY_SIZE
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

NUM_DRAFTS = 3


class DraftingModel(HashedModel):
    """A `HashedModel` that is given drafts, writes their KV, and samples one token more than it accepts."""

    def __init__(self, num_blocks: int, block_size: int, rng: random.Random, share_right: float) -> None:
        super().__init__(num_blocks, block_size)
        self.rng = rng
        self.share_right = share_right
        self.num_rejected = 0
        self.num_accepted = 0
        self._computed: dict[str, int] = {}
        """Right tokens that have KV, which the scheduler learns a step later."""

    def forward(
        self, scheduler_output: Any, excused_blocks: Any = None, num_outputs: dict[str, int] | None = None
    ) -> tuple[list[str], list[list[int]]]:
        """Compute known tokens and drafts; return what is accepted and one token more."""
        del excused_blocks, num_outputs
        new = {data.req_id: data.num_computed_tokens for data in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        told = new | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        request_ids = list(scheduler_output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in request_ids:
            sequence = self._sequences[request_id]
            fresh = request_id in new or request_id in cached.resumed_req_ids
            # With two steps in flight the scheduler counts drafts of the step before as computed; the runner knows
            # how many of them were accepted and corrects the count, as vLLM's does.
            first = told[request_id] if fresh else min(told[request_id], self._computed[request_id])
            num_drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
            num_plain = scheduler_output.num_scheduled_tokens[request_id] - num_drafts
            last = first + num_plain
            sequence.compute_to(last)
            self._check(request_id, sequence, first)
            self._write(sequence, first, last)
            if last < len(sequence.tokens):
                self._computed[request_id] = last
                sampled.append([])
                continue
            right = self._right_tokens(sequence, num_drafts)
            drafts = self._drafts(right, num_drafts)
            num_right = next((i for i in range(num_drafts) if drafts[i] != right[i]), num_drafts)
            self._write_drafts(sequence, last, drafts)
            self.num_accepted += num_right
            self.num_rejected += num_drafts - num_right
            accepted = right[: num_right + 1]
            sequence.tokens.extend(accepted)
            sequence.compute_to(last + num_right)
            self._computed[request_id] = last + num_right
            sampled.append(accepted)
        return request_ids, sampled

    def _right_tokens(self, sequence: Any, num_drafts: int) -> list[int]:
        state = sequence.kv[-1]
        right = []
        for _ in range(num_drafts + 1):
            right.append(next_token(state))
            state = chained_hash(state, right[-1])
        return right

    def _drafts(self, right: list[int], num_drafts: int) -> list[int]:
        return [
            token if self.rng.random() < self.share_right else (token + 1) % VOCABULARY_SIZE
            for token in right[:num_drafts]
        ]

    def _write_drafts(self, sequence: Any, first: int, drafts: list[int]) -> None:
        state = sequence.kv[-1]
        wrong = copy.copy(sequence)
        wrong.kv = [*sequence.kv]
        for token in drafts:
            state = chained_hash(state, token)
            wrong.kv.append(state)
        self._write(wrong, first, first + len(drafts))


MakeSpeculating = Callable[..., Any]


@pytest.fixture
def make_speculating(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> MakeSpeculating:
    """Build engines that draft; each one's log is replayed and audited in the end."""
    recorded: type[Any] = type(make_engine(num_blocks=4))
    configure = sim_engine.vllm_config
    built = []

    def speculating(**options: Any) -> Any:
        configuration = configure(**options)
        configuration.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=NUM_DRAFTS,
            prompt_lookup_max=2,
            target_model_config=configuration.model_config,
            target_parallel_config=configuration.parallel_config,
        )
        return configuration

    class SpeculatingEngine(recorded):  # type: ignore[misc]
        """Gives the scheduler drafts after every step, as the engine core does."""

        def _execute(self, scheduler_output: Any) -> ModelRunnerOutput:
            output: ModelRunnerOutput = super()._execute(scheduler_output)
            if self._max_in_flight == 1:  # with two in flight the drafts stay on the device, behind placeholders
                pairs = zip(output.req_ids, output.sampled_token_ids, strict=True)
                drafted = [request_id for request_id, tokens in pairs if tokens]
                self.drafts = DraftTokenIds(drafted, [[1] * NUM_DRAFTS for _ in drafted])
            return output

        def update(self) -> None:
            super().update()
            drafts, self.drafts = getattr(self, "drafts", None), None
            if drafts is not None:
                self.scheduler.update_draft_token_ids(drafts)

    def make(*, seed: int, share_right: float, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(sim_engine, "vllm_config", speculating)
            patch.setattr(
                sim_engine,
                "HashedModel",
                lambda num_blocks, block_size, *_more: DraftingModel(
                    num_blocks, block_size, random.Random(seed), share_right
                ),
            )
            engine = SpeculatingEngine(**{"num_blocks": 16, "host_bytes": 1 << 20, **options})
        built.append(engine)
        return engine

    yield make
    for engine in built:
        engine.check_at_end()


@pytest.mark.parametrize("share_right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("chunk_size", [8, 16])
def test_no_rejected_draft_is_ever_saved(
    make_speculating: MakeSpeculating, runner: dict[str, bool], chunk_size: int, share_right: float
) -> None:
    """Whatever is accepted: who asks for the same tokens later loads right KV, as long as what was settled."""
    engine = make_speculating(
        seed=chunk_size, share_right=share_right, chunk_size=chunk_size, enable_prefix_caching=False, **runner
    )
    for number in range(2):
        engine.add(f"writer {number}", range(100 * number, 100 * number + 30 + number), 50)
    engine.run(max_steps=400)
    assert engine.model.num_rejected or share_right == 1
    assert engine.model.num_accepted or share_right == 0
    said = {name: engine.prompts[name] + output for name, output in engine.outputs.items()}
    for name, tokens in said.items():
        engine.serve(f"{name} again", [*tokens, 7], 3, max_steps=50)
        hit = engine.check_answers(f"{name} again")[0].num_hit_tokens
        assert hit >= (len(tokens) - 1 - NUM_DRAFTS) // chunk_size * chunk_size - chunk_size
    assert {len(output) for output in engine.outputs.values()} == {50, 3}


@pytest.mark.parametrize("share_right", [0.0, 0.6])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("seed", [0, 2])
def test_a_preempted_request_that_drafts_comes_back_with_right_kv(
    make_speculating: MakeSpeculating,
    runner: dict[str, bool],
    share_right: float,
    enable_prefix_caching: bool,
    seed: int,
) -> None:
    """Preempted in the middle of drafts: what is copied out ends before the first token that may be taken back."""
    engine = make_speculating(
        seed=seed,
        share_right=share_right,
        chunk_size=8,
        num_blocks=12,
        enable_prefix_caching=enable_prefix_caching,
        **runner,
    )
    for number in range(3):
        engine.add(f"request {number}", range(100 * number, 100 * number + 37 + seed), 45)
    engine.run(max_steps=800)
    assert engine.num_preemptions
    tails = engine.logged(e.TailSaveIssued)
    for name, tokens in {name: engine.prompts[name] + output for name, output in engine.outputs.items()}.items():
        engine.serve(f"{name} again", [*tokens, 7], 3, max_steps=100)
    assert {len(output) for output in engine.outputs.values()} == {45, 3}
    assert tails or engine.logged(e.LoadIssued) or enable_prefix_caching


@pytest.mark.parametrize("when", [3, 9, 17])
def test_an_abort_in_the_middle_of_drafts(
    make_speculating: MakeSpeculating, runner: dict[str, bool], when: int
) -> None:
    """What is saved at the end are settled tokens only."""
    engine = make_speculating(seed=when, share_right=0.5, chunk_size=8, enable_prefix_caching=False, **runner)
    engine.add("gone", range(29), 60)
    for _ in range(when):
        engine.step()
    tokens = list(engine.scheduler.requests["gone"].all_token_ids)
    engine.abort("gone")
    engine.run(max_steps=20)
    engine.serve("reader", [*tokens, *range(400, 410)], 3, max_steps=20)
    assert engine.check_answers("reader")[0].num_hit_tokens >= 24
