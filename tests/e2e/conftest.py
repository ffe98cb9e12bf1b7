"""A tiny model, and what it says when nobody interferes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from e2e.engines import AMPLE, Reference, running_engine
from kvledger.adapters.demo.engine import ENVIRONMENT
from kvledger.adapters.demo.model import make_model

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
    """Return a function that answers what the model says without a connector and without preemption."""
    known: dict[str, list[list[int]]] = {}

    def outputs(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        key = repr((prompts, max_tokens))
        if key not in known:
            with running_engine(model, AMPLE) as engine:
                known[key] = engine.generate(prompts, max_tokens)
                assert engine.meter.num_preemptions == 0
        return known[key]

    return outputs
