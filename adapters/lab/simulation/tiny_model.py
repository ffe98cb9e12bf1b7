"""The configuration of a tiny model, for the simulation's scheduler."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
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


@functools.cache
def tiny_configuration() -> Path:
    """Return a folder that contains only `config.json`. This is enough for a scheduler, which reads no weights.

    Each process creates a folder of its own, which only the process's user can read, and removes it at exit. If the
    name were always the same, another user could place a link with this name in a shared temporary folder.
    """
    directory = Path(tempfile.mkdtemp(prefix="kvledger-tiny-"))
    (directory / "config.json").write_text(json.dumps(_CONFIGURATION))
    atexit.register(_remove, directory, os.getpid())
    return directory


def _remove(directory: Path, process: int) -> None:
    if os.getpid() == process:  # a forked process uses the folder of its parent
        shutil.rmtree(directory, ignore_errors=True)
