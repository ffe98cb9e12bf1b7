"""A tiny model, and what it says when nobody interferes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from e2e.engines import AMPLE, Reference
from kvledger.adapters.lab.demo.engine import ENVIRONMENT, running_engine
from kvledger.adapters.lab.demo.model import make_model

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model made on the spot."""
    directory = tmp_path_factory.mktemp("model") / "tiny-llama"
    make_model(directory)
    return directory


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    """Return a function that answers what the model says without a connector and without preemption.

    It is greedy: what it says in fewer tokens is the beginning of what it says in more.
    """
    known: dict[str, tuple[int, list[list[int]]]] = {}

    def outputs(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        key = repr(prompts)
        if known.get(key, (0, []))[0] < max_tokens:
            with running_engine(model, AMPLE) as engine:
                known[key] = max_tokens, engine.generate(prompts, max_tokens)
                assert engine.counter.num_preemptions == 0
        return [said[:max_tokens] for said in known[key][1]]

    return outputs
