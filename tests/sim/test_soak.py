"""A short soak; `make soak` runs the long one, which also asks whether memory is flat."""

from __future__ import annotations

import pytest

from sim.soak import Sample, Soak

pytestmark = pytest.mark.scheduler


@pytest.mark.long
def test_a_thousand_requests_leave_nothing_behind() -> None:
    """Preemptions and aborts on the way: right tokens, and no projection, adapter or worker remembers anybody."""
    soak = Soak(1000)
    soak.run()
    soak.check()
    assert len(soak.samples) == 10


@pytest.mark.parametrize(
    ("growth", "message"),
    [((0, 5_000_000, 0), "resident memory grew"), ((0, 0, 4_000), r"0\.4\d allocations a request are kept")],
)
def test_growing_memory_fails_a_soak(growth: tuple[int, int, int], message: str) -> None:
    """The bounds are of a size that a leak of one object for every third request breaks."""
    soak = Soak(0)
    soak.samples = [Sample(1000 * number, 10**8, 10**6) for number in range(1, 20)]
    last = soak.samples[-1]
    soak.samples.append(
        Sample(last.num_requests + 1000, last.resident_bytes + growth[1], last.num_allocations + growth[2])
    )
    with pytest.raises(AssertionError, match=message):
        soak.check_memory()
