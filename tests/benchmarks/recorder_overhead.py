"""What the recorder adds to another connector: the same one alone and recorded, in turns (`scheduler_overhead.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.figures import Cases, Figure, compared
from benchmarks.scheduler_overhead import take_turns
from benchmarks.served import NOTHING, Load, peers

_SHORT = {"256 decoding": Load(), "256 requests, 4 arrivals and ends a step": Load(num_output_tokens=(64, 64))}
_FULL = {
    **_SHORT,
    "1,024 decoding": Load(num_requests=1024),
    "1,024 requests, 16 arrivals and ends a step": Load(num_requests=1024, num_output_tokens=(64, 64)),
}


def _measure(load: Load, num_steps: int) -> Sequence[Figure]:
    alone: dict[str, Mapping[str, Any]] = {"a connector that does nothing": NOTHING, **peers(load.pool(num_steps) * 2)}

    def contenders(log_dir: Path) -> dict[str, Mapping[str, Any] | None]:
        recorded = {
            f"{name}, recorded": {
                "kv_connector": "KVLedgerRecorderHMA",
                "kv_connector_module_path": "kvledger.adapters.recorder",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"log_dir": str(log_dir), "connector": transfer},
            }
            for name, transfer in alone.items()
        }
        return {**alone, **recorded}

    turns = take_turns(load, contenders, num_steps)
    figures = []
    for name in alone:
        pair = {each: turns[each].both_us for each in (name, f"{name}, recorded")}
        figures += compared("schedule() and update_from_output()", "µs", pair, anchor=name)
        figures.append(Figure("log a step", f"{name}, recorded", turns[f"{name}, recorded"].log_bytes, "B"))
    return figures


def cases(*, full: bool) -> Cases:
    """256 requests, and 1,024 in the full form."""
    return {name: partial(_measure, load, 400 if full else 120) for name, load in (_FULL if full else _SHORT).items()}
