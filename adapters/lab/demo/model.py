"""A Llama model so small that the demo can create it. Its output means nothing, but its arithmetic is real."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

VOCABULARY_SIZE = 512
FIRST_ORDINARY_TOKEN = 3
"""Lower ids are padding, beginning and end."""
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model(directory: Path, seed: int = 0, **sizes: int) -> bool:
    """Write a model to `directory`, unless a model is there already. `sizes` are settings of `LlamaConfig`.

    The weights are larger than transformers' default weights. With the default, the output hardly depends on earlier
    tokens, so wrong KV would not change it.

    Returns:
        Whether the model was created now.
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
        unfinished.replace(directory)  # all or nothing: an interrupted demo leaves no partial model
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True
