"""The model of another engine serves whatever it is given: its own oracle holds, and its log is audited as sound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle.audit import Audit


@pytest.fixture(scope="module")
def example(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """docs/examples/sglang_retraction.py."""
    return load_script("docs/examples/sglang_retraction.py")


def test_retracted_requests_come_back_and_the_log_is_sound(example: ModuleType, tmp_path: Path) -> None:
    """Twenty crowds of requests, with prompts that share beginnings and with more of them than there is room for."""
    num_retracted = num_loaded = 0
    for seed in range(20):
        random = Random(seed)
        reqs = [
            example.Req(str(number), tuple(random.choices((1, 2), k=random.randint(1, 14))), random.randint(1, 16))
            for number in range(6)
        ]
        served = example.serve(tmp_path / str(seed), reqs)
        assert [len(req.output_ids) for req in reqs] == [req.max_new_tokens for req in reqs]
        num_retracted += served.num_retracted
        num_loaded += served.num_loaded
        log = open_log(tmp_path / str(seed))
        audit = Audit(log.core, log.configuration)
        audit.run(log.events())
        assert audit.is_sound, (seed, audit.violations, audit.divergences)
        assert len(audit.projections.tracker) == 0
    assert num_retracted > 20
    assert num_loaded > 100
