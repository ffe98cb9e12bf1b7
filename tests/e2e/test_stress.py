"""A sample of `make stress`: two crowds for each configuration of a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.stress import CONFIGURATIONS, Configuration, expected_outputs, run

pytestmark = [pytest.mark.vllm, pytest.mark.long]

SEEDS = range(2 * len(CONFIGURATIONS))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    """What every client is told by an engine without a connector."""
    return expected_outputs(model, SEEDS)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=[each.name for each in CONFIGURATIONS])
def test_a_crowd_is_served_as_if_there_were_no_connector(
    configuration: Configuration, model: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """Outputs are equal, whatever is preempted, aborted, drafted and shared; the log passes every check."""
    seeds = SEEDS[CONFIGURATIONS.index(configuration) :: len(CONFIGURATIONS)]
    print(f"reproduce with: make stress SEEDS={len(SEEDS)}")
    log, drafts = run(configuration, model, seeds, expected, tmp_path)
    assert log.num_requests_left == 0
    assert log.figures.num_preemptions > 0
    assert log.figures.num_tokens_loaded > 0
    if "speculative_config" in configuration.more:
        assert drafts.num_accepted > 0
        assert drafts.num_rejected > 0
    else:
        assert (drafts.num_accepted, drafts.num_rejected) == (0, 0)
