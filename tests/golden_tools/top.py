"""What `kvledger top` shows of the story `stats.txt` at its end."""

from __future__ import annotations

from pathlib import Path

from golden_tools.golden import MS, Golden, records
from golden_tools.story import story

STORY = story("stats")

OVERVIEW = {
    "type": "overview",
    "end": "closed",
    "silent_ns": None,  # no process writes the log
    "time_ns": 120 * MS,
    "last_sequence": 79,
    "num_running": 2,
    "num_waiting": 0,
    "num_preempted": 0,
    # The first life of `a`, and `c`.
    "num_finished": 2,
    # 13 to 17 of `a` and 5 to 8 of `b`.
    "num_blocks_held": 9,
    "num_loads": 0,
    "num_saves": 0,
    "oldest_copy_ns": None,
    # At six admissions, less what vLLM's prefix cache had: 70 + 48 + (73 - 16) + 51 + 70 + 65.
    "num_tokens_queried": 361,
    # 56 for `a` at 30 ms, 64 for `c`.
    "num_tokens_hit": 120,
    # All is recent: the log is 120 ms long.
    "num_recently_queried": 361,
    "num_recently_hit": 120,
    "recent_ns": 120 * MS,
    "num_violations": 0,
    "num_hook_failures": 0,
    "last_fault": "",
    "num_device_blocks": None,  # it is not in the header
    "worst": [
        # From 15 to 120 ms, without its blocks from 50 to 60 ms.
        {
            "request_id": "b",
            "state": "running",
            "num_preemptions": 1,
            "num_tokens": 56,
            "queued_ns": 0,
            "running_ns": 95 * MS,
            "preempted_ns": 10 * MS,
        },
        # The second life, from 80 ms on.
        {
            "request_id": "a",
            "state": "running",
            "num_preemptions": 0,
            "num_tokens": 73,
            "queued_ns": 0,
            "running_ns": 40 * MS,
            "preempted_ns": 0,
        },
    ],
}


def _overview(log: Path) -> list[dict[str, object]]:
    return [
        {name: value for name, value in record.items() if name != "path"}
        for record in records("overview", "top", log, "--once")
    ]


GOLDEN = {"top, for programs": Golden("top", STORY, _overview, [OVERVIEW])}
