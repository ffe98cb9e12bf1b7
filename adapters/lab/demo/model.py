"""A Llama small enough to be made on the spot. Its words mean nothing; its arithmetic is the real thing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

VOCABULARY_SIZE = 512
FIRST_ORDINARY_TOKEN = 3
"""Below stand padding, beginning and end."""
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model(directory: Path, seed: int = 0, **sizes: int) -> bool:
    """Write weights and configuration to `directory`, unless they are there already; `sizes` are `LlamaConfig`'s.

    The weights are drawn wider than transformers would: with its default a continuation hardly depends on what lies
    further back, and wrong KV would go unnoticed in the outputs.

    Returns:
        Whether the model was made now.
    """
    if (directory / "config.json").exists():
        return False
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    configuration = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        max_position_embeddings=4096,
        initializer_range=0.1,
        dtype="float32",
        **{**TINY, **sizes},
    )
    unfinished = directory.with_name(f"{directory.name}.{os.getpid()}")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    try:
        LlamaForCausalLM(configuration).save_pretrained(unfinished)  # type: ignore[no-untyped-call]
        unfinished.replace(directory)  # whole or not at all: an interrupted demo leaves no half model behind
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True
