"""The share of each copy in a report about several copies.

All shares together are the bytes and the time that `kvledger stats` counts for the report.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvledger.lifecycle.events import TransferReported


def shares_of(report: TransferReported) -> Iterator[tuple[int, int, int]]:
    """Yield (job id, bytes, nanoseconds) of each copy.

    Workers measure the copies of a report together. The time is therefore divided in proportion to the bytes, or evenly
    if no bytes are reported.
    """
    weights = report.num_bytes if any(report.num_bytes) else [1] * len(report.num_bytes)
    total = sum(weights)
    ends = [report.duration_ns * weight // total for weight in itertools.accumulate(weights)]
    for job_id, num_bytes, begin, end in zip(report.job_ids, report.num_bytes, [0, *ends], ends, strict=False):
        yield job_id, num_bytes, end - begin
