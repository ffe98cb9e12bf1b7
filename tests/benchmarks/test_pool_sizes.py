"""The estimate for pools of other sizes is compared with what such pools loaded."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from benchmarks.pool_sizes import estimate_of, figures_of, serve
from benchmarks.trace_replay import Sizes, TraceRequest

pytestmark = pytest.mark.xdist_group("trace")

SMALL = Sizes(num_at_a_time=2, device_blocks=300, host_pages=600)
"""About half of the documents fit in the host pool, all in twice the size."""


def document(number: int) -> TraceRequest:
    """A document of 1,536 tokens, with a question of its own."""
    return TraceRequest(0, 3 * 512 + 100, 3, [3 * number, 3 * number + 1, 3 * number + 2, 1000 + number])


@pytest.mark.scheduler
def test_a_served_trace_says_what_twice_the_pool_loads(tmp_path: Path) -> None:
    """Ten documents, asked about twice: with 600 pages all are evicted in between, with 1,200 none is."""
    requests = [document(number) for _ in range(2) for number in range(10)]
    served = {
        factor: serve(requests, 16, attrs.evolve(SMALL, host_pages=host_pages), tmp_path / str(host_pages))
        for factor, host_pages in ((1.0, 600), (2.0, 1_200))
    }
    figures = figures_of(estimate_of(tmp_path / "600"), served)
    assert served[2.0].num_loaded_tokens >= 8 * 3 * 512 > served[1.0].num_loaded_tokens
    table = {(figure.contender, figure.what): figure.value for figure in figures}
    assert {contender for contender, _ in table} == {"as it was: 600 pages", "twice: 1,200 pages"}
    assert abs(table["twice: 1,200 pages", "error"]) < 5
