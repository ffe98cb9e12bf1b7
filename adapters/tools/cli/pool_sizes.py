"""The part of `kvledger stats` that estimates how many tokens host pools of other sizes would have loaded."""

from __future__ import annotations

import attrs

from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.pool_sizes import Estimate, PoolSize

_COLUMNS = {"pool": "left", "slots": "right", "tokens loaded, estimated": "right", "of those asked for": "right"}


def show_pool_sizes(output: Output, path: str | None, estimate: Estimate) -> None:
    """Print the estimate and its error, as a table or as a JSON object."""
    if output.is_json:
        fields = attrs.asdict(estimate)
        output.record(
            "pool_sizes", {"path": path, "pool_sizes": fields.pop("sizes"), **fields, "error": estimate.error}
        )
    elif estimate.why_not:
        output.field("pool sizes", f"not estimated: {estimate.why_not}")
    elif not estimate.num_tokens_asked:
        output.field("pool sizes", "not estimated: no request asked for tokens that a pool could hold")
    else:
        _show_table(output, estimate)


def _show_table(output: Output, estimate: Estimate) -> None:
    own = next((size.num_slots for size in estimate.sizes if size.factor == 1), None)
    # Every estimated pool has room for a chunk, so half of a tiny pool may be as large as the pool itself.
    sizes = [size for size in estimate.sizes if size.factor == 1 or own is None or size.num_slots != own]
    output.table(_COLUMNS, [_row(size, estimate) for size in sizes if size.name])
    output.line(estimate.comparison)
    if estimate.note:
        output.line(estimate.note, "yellow")


def _row(size: PoolSize, estimate: Estimate) -> list[str]:
    share = size.num_tokens_loaded / max(1, estimate.num_tokens_asked)
    num_slots = "" if size.num_slots is None else str(size.num_slots)
    return [size.name, num_slots, str(size.num_tokens_loaded), f"{share:.1%}"]
