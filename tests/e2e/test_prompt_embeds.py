"""Prompts in which some positions take an embedding: equal token ids and tensors do not make equal KV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from e2e.engines import AMPLE, read_sound_log
from kvledger.adapters.lab.demo.engine import sampling, start
from kvledger.adapters.lab.demo.workload import connector

pytestmark = pytest.mark.vllm

NUM_TOKENS = 150
IDS = [0] * 64 + [5 + i % 400 for i in range(NUM_TOKENS - 64)]
"""Positions that take the tensor hold token 0, as vLLM writes it there; others may hold it, too."""
PLACEMENTS = {"A": range(64), "B": range(0), "C": range(32)}
"""Name -> positions that take the tensor."""


def prompts() -> dict[str, Any]:
    """Name -> prompt, all with the same token ids and the same tensor."""
    tensor = torch.randn(NUM_TOKENS, 128, generator=torch.Generator().manual_seed(1)) * 0.1
    return {
        name: {
            "prompt_embeds": tensor,
            "prompt_token_ids": IDS,
            "prompt_is_token_ids": [position not in from_tensor for position in range(NUM_TOKENS)],
        }
        for name, from_tensor in PLACEMENTS.items()
    }


def answers(llm: Any, names: str) -> list[list[int]]:
    """What each is answered, one after the other."""
    return [
        list(llm.generate([prompts()[name]], sampling(12), use_tqdm=False)[0].outputs[0].token_ids) for name in names
    ]


@contextmanager
def engine_with_embeds(
    model: Path, log_dir: Path | None = None, *, enable_prefix_caching: bool = False
) -> Iterator[tuple[Any, Path | None]]:
    """An engine that takes embeddings, and its log."""
    from vllm.distributed import cleanup_dist_env_and_memory

    workload = attrs.evolve(AMPLE, enable_prefix_caching=enable_prefix_caching)
    transfer = None if log_dir is None else connector(log_dir, chunk_size=32, host_bytes="64MiB")
    llm = start(str(model), workload, transfer, enable_prompt_embeds=True)
    core = llm.llm_engine.engine_core.engine_core
    try:
        yield llm, None if log_dir is None else core.scheduler.connector.scheduler_side.log.directory
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@pytest.mark.parametrize("enable_prefix_caching", [pytest.param(False, marks=pytest.mark.long), True])
def test_each_placement_of_embeddings_gets_its_own_answer(
    model: Path, tmp_path: Path, *, enable_prefix_caching: bool
) -> None:
    """Keys without the mask gave B and C the answer of A (vllm#56655).

    With vLLM's prefix cache on, vLLM itself mixes them up until it forgets the blocks; what it mixed up must not come
    back from the host.
    """
    with engine_with_embeds(model) as (llm, _):
        expected = answers(llm, "ABCA")
    assert len({tuple(answer) for answer in expected}) == len(PLACEMENTS)
    with engine_with_embeds(model, tmp_path, enable_prefix_caching=enable_prefix_caching) as (llm, log_path):
        if enable_prefix_caching:
            answers(llm, "ABC")
        got = []
        for name in "ABCA":
            llm.reset_prefix_cache()
            got += answers(llm, name)
    assert got == expected
    assert log_path is not None
    log = read_sound_log(log_path)
    assert bool(log.figures.num_tokens_loaded) is not enable_prefix_caching
