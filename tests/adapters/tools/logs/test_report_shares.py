"""A report about several copies is divided among them."""

from __future__ import annotations

import pytest

from kvledger.adapters.tools.logs.report_shares import shares_of
from kvledger.lifecycle import events as e


@pytest.mark.parametrize(
    ("num_bytes", "duration_ns", "expected"),
    [
        ((100,), 7, [7]),
        ((100, 0, 300), 1001, [250, 0, 751]),
        ((0, 0), 7, [3, 4]),
        ((), 7, []),
    ],
)
def test_the_time_is_divided_by_bytes_and_nothing_of_it_is_lost(
    num_bytes: tuple[int, ...], duration_ns: int, expected: list[int]
) -> None:
    """Without any bytes it is divided evenly."""
    job_ids = tuple(range(len(num_bytes)))
    report = e.TransferReported(job_ids, (0,), (), False, num_bytes, duration_ns, "", "", 1)
    assert list(shares_of(report)) == list(zip(job_ids, num_bytes, expected, strict=True))
