"""A model with sliding windows on real vLLM: several KV cache groups, preemptions, the outputs of a quiet engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import pytest

from e2e.engines import AMPLE, read_sound_log
from kvledger.adapters.lab.demo.engine import running_engine
from kvledger.adapters.lab.demo.model import VOCABULARY_SIZE
from kvledger.adapters.lab.demo.workload import Workload
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT

pytestmark = pytest.mark.vllm

WINDOW = 64
PATTERNS = {"sfsf": 52, "ssf": 80}
"""One letter a layer, sliding window or full attention -> blocks that are too few for all requests.

VLLM makes groups of equally many layers, here two and three.
"""


def make_hybrid_model(directory: Path, pattern: str) -> Path:
    """A Llama some of whose layers see a window; weights as wide as those of the demo's model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    configuration = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(pattern),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.1,
        dtype="float32",
        layer_types=[kinds[letter] for letter in pattern],
        sliding_window=WINDOW,
    )
    shutil.rmtree(directory, ignore_errors=True)
    LlamaForCausalLM(configuration).save_pretrained(directory)  # type: ignore[no-untyped-call]
    return directory


@pytest.mark.parametrize("pattern", ["ssf", pytest.param("sfsf", marks=pytest.mark.long)])
def test_preempted_requests_of_a_hybrid_model_say_what_they_would_have_said(tmp_path: Path, pattern: str) -> None:
    """Outputs equal to an engine without a connector in which nothing is preempted; a sound log; recovered tokens."""
    model = make_hybrid_model(tmp_path / "model", pattern)
    workload = Workload(num_blocks=PATTERNS[pattern], chunk_size=64)
    prompts = workload.prompts()
    with running_engine(model, attrs.evolve(AMPLE, num_blocks=400)) as engine:
        expected = engine.generate(prompts, workload.max_tokens)
        assert engine.counter.num_preemptions == 0
    with running_engine(model, workload, tmp_path / "logs") as engine:
        outputs = engine.generate(prompts, workload.max_tokens)
        assert engine.counter.num_preemptions > 0
        assert engine.counter.num_tokens_recomputed == 0
    log = read_sound_log(engine.log_path)
    assert outputs == expected
    assert log.num_requests_left == 0
    assert log.figures.num_tokens_recovered > 0
    loads = log.of_type(e.LoadIssued)
    assert loads
    assert all(NO_SLOT in load.slots for load in loads if load.num_tokens > 2 * WINDOW)
