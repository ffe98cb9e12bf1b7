"""A model small enough to make on the spot: a configuration for the scheduler, weights where a forward is wanted."""

from __future__ import annotations

import json
import os
from pathlib import Path

VOCABULARY_SIZE = 512
MAX_MODEL_LEN = 8192

_CONFIGURATION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "float32",
}


def write_configuration(directory: Path) -> Path:
    """Write only `config.json`: enough for a scheduler, which never touches weights.

    Whole or not at all, because several processes may share the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f"config.json.{os.getpid()}"
    unfinished.write_text(json.dumps(_CONFIGURATION))
    unfinished.replace(directory / "config.json")
    return directory
