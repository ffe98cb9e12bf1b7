"""How far the estimate for pools of other sizes is off: the same requests of a trace are served with such pools.

The estimate is made from the log of one size, as `kvledger stats` makes it. It is compared with the tokens that were
loaded when the trace was served with each other size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
from benchmarks.figures import CannotMeasure, Cases, Figure
from benchmarks.served import BLOCK_SIZE, ours
from benchmarks.trace_replay import Served, Sizes, TraceRequest, fitting, read_trace, serve_with

from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.reading import take_batch
from kvledger.adapters.tools.logs.sources import find_logs
from kvledger.adapters.tools.pool_sizes import Estimate, PoolSizes
from kvledger.lifecycle.reader import Model, Reader

NUM_REQUESTS = 1500
SIZES = Sizes(host_pages=60_000)
"""Of the run whose log is read."""
FACTORS = (0.5, 1.0, 2.0, 4.0, 10.0)
"""Of these sizes the trace is served with each; 1 is that run."""


def estimate_of(logs: Path) -> Estimate:
    """From the one log in a folder, without the rest of `kvledger stats`."""
    (path,) = find_logs(logs)
    log = open_log(path)
    visitor = PoolSizes(Model(log.core.tables, log.configuration))
    reader = Reader(visitor.model, [visitor])
    for batch in log.batches():
        take_batch(reader, log, batch)
    return visitor.estimate()


def serve(requests: Sequence[TraceRequest], chunk_size: int, sizes: Sizes, log_dir: Path) -> Served:
    """Serve the requests with kvledger's connector, and leave its log in a folder."""

    def transfer(folder: Path) -> Mapping[str, object]:
        return ours(sizes.host_pages, log_dir=str(folder), chunk_size=chunk_size)

    return serve_with(f"chunk {chunk_size}, {sizes.host_pages:,} pages", requests, sizes, log_dir, transfer)


def figures_of(estimate: Estimate, served: Mapping[float, Served]) -> list[Figure]:
    """The estimate beside what each size loaded: factor → what serving took with it."""
    figures = []
    for size in estimate.sizes:
        if size.factor in served:
            name, loaded = f"{size.name}: {size.num_slots:,} pages", served[size.factor].num_loaded_tokens
            figures += [
                Figure("loaded", name, loaded, ""),
                Figure("estimated", name, size.num_tokens_loaded, ""),
                Figure("error", name, 100 * (size.num_tokens_loaded / max(1, loaded) - 1), "%"),
            ]
    return figures


def _measure(trace: Path | None, num_requests: int, chunk_size: int) -> Sequence[Figure]:
    if trace is None:
        raise CannotMeasure("there is no trace; name a file in Mooncake's format with --trace FILE")
    requests = fitting(read_trace(trace, num_requests), SIZES)
    served = {}
    with tempfile.TemporaryDirectory() as folder:
        for factor in FACTORS:
            sizes = attrs.evolve(SIZES, host_pages=round(factor * SIZES.host_pages))
            served[factor] = serve(requests, chunk_size, sizes, Path(folder, str(factor)))
        return figures_of(estimate_of(Path(folder, str(1.0))), served)


def cases(*, full: bool, trace: Path | None = None, num_requests: int = NUM_REQUESTS) -> Cases:
    """Chunks of 256 tokens; in the long form also of one block."""
    return {
        f"the first {num_requests:,} requests, chunk {chunk_size}": partial(_measure, trace, num_requests, chunk_size)
        for chunk_size in ((256, BLOCK_SIZE) if full else (256,))
    }
