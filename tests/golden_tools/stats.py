"""What `kvledger stats` says of the story `stats.txt`, for people and for programs.

The six admissions, in tokens (known = in vLLM's cache + to be loaded + left to compute):

    a, 0 ms        70 =          70   64 new, 5 after the chunks, the last one
    b, 15 ms       48 =          48   32 new, 15 after the chunk, the last one
    a, 30 ms       73 = 16 + 56 + 1   the last one
    b, 60 ms       51 =          51   32 declined at 20 ms, 18 stale (not saved before the reset), the last one
    a, 80 ms       70 =          70   64 saved and lost to the reset, 5 after the chunks, the last one
    c, 100 ms      65 =      64 + 1   the last one; the load of the 64 fails
"""

from __future__ import annotations

from pathlib import Path

from golden_tools.golden import MS, Golden, printed, records, without
from golden_tools.story import story

STORY = story("stats")

_NEEDED = 70 + 48 + 73 + 51 + 70 + 65
_LEFT = {
    "new": 64 + 32,
    "partial_chunk": 5 + 15 + 5,
    "last_token": 6,
    "declined": 32,
    "stale": 18,
    "reset": 64,
    "load_failed": 64,
}
# `b` computes again what it had when it was preempted, 50 tokens. `a` is rolled back from 71 to 50, `c` from 65 to 0.
# Of the 65, `c` had computed one: the other 64 were to be loaded.
_RECOMPUTED = {"declined": 32, "stale": 18}
_TWICE = {"rolled_back": 21, "load_failed": 1}

# Of whole chunks: `a` 2, `b` 1, `a` 56 tokens with its tail, `b` 1, `a` 2, `c` 2.
_ASKED = 64 + 32 + 56 + 32 + 64 + 64

_FEWER_PREEMPTIONS = (
    "vLLM's KV blocks ran out; a smaller `--max-num-seqs` lets fewer requests run at the same time, "
    "and a larger `--gpu-memory-utilization` gives them more blocks"
)
_WORKER = "the worker's message `copy failed` has the error"
_NO_RESET = "reset the connector's cache together with vLLM's only if the weights have changed"

TEXT = [
    "covers 120.0 ms, 4 requests, 12 steps",
    # The second life of `a`, and `b`.
    "end closed; 2 requests were open",
    # Answers: 4, 15, 28, 39, 48, 65. They offer 56 and 64.
    "lookups 6 answered, repeats included, 1 deferral; 120 tokens offered",
    # `a` had 72 tokens: 16 are still there and 56 are loaded. `b` had 50.
    "preempted 2 times; tokens recovered 56, retained 16, recomputed 50",
    # Saves 1 and 5 of two chunks, 4 of one, the tail of none: 2048 + 512 + 1024 + 2048 = 5632 B, 1,408,000 B/s.
    "saved 5 chunks, 5.5 KiB in 4.0 ms (1.3 MiB/s)",
    "loaded 56 tokens, 2.0 KiB in 2.0 ms (1000.0 KiB/s)",
    "not saved 1 chunk declined, 0 saves failed",
    "lost 0 chunks evicted, 2 tainted, 1 load failed",
    "faults 0 broken rules and 0 failed hooks recorded by the connector",
    "",
    "within 1% count p50 p90 p99 max",
    # `c` waits 3 ms for its load, the others run at once.
    "queued 4 0.0 µs 3.0 ms 3.0 ms 3.0 ms",
    "load 1 2.0 ms 2.0 ms 2.0 ms 2.0 ms",
    "save 4 1.0 ms 1.0 ms 1.0 ms 1.0 ms",
    # `a` from 20 to 30 ms, when a step schedules it; `b` from 50 to 60 ms.
    "preempted → running again 2 10.0 ms 10.0 ms 10.0 ms 10.0 ms",
    # Up to event 7, 9, 18, 22, 31, 37, 42, 52, 56, 61, 68, 77: in order 2, 4, 4, 5, 5, 6, 7, 7, 9, 9, 9, 10.
    "events a step 12 6 9 10 10",
    "",
    "reason left to compute computed again meaning",
    "declined 32 32 not saved, because the host pool had no room or a load into their blocks had failed",
    "rolled_back 0 21 rolled back by the scheduler",
    "stale 18 18 computed before a cache reset and not saved by then",
    "load_failed 64 1 their load failed, or the previous load had failed and the request had to compute first",
    "reset 64 0 lost to a cache reset",
    "new 96 0 no request had computed them before",
    "partial_chunk 25 0 after the last whole chunk, so they have no key to be saved under",
    "last_token 6 0 the last known token is always computed, because the next one is sampled from it",
    f"all {sum(_LEFT.values())} {sum(_RECOMPUTED.values()) + sum(_TWICE.values())}",
    # 377 = 16 + 56 + 305.
    f"{_NEEDED} tokens at 6 admissions = 16 from vLLM's prefix cache + 56 loaded + 305 left to compute",
    "",
    "possible changes",
    # `a` lives from 0 to 70 and from 80 ms, `b` from 15, `c` from 100, up to 120 ms: 235 ms in all. Preempted are `a`
    # from 20 ms until its load arrives at 34 ms, `b` from 50 to 60 ms: 24 ms, more than a tenth.
    f"preempted: {_FEWER_PREEMPTIONS}",
    # A tenth of 305 + 22 is 32.7; 64 + 1 failed to load, 64 are lost to the reset.
    f"load_failed: {_WORKER}",
    f"reset: {_NO_RESET}",
    "",
    "request tokens computed again",
    "b 50",
    "",
    "pool slots tokens loaded, estimated of those asked for",
    # 6 slots are 3 chunks of 2 pages, half of it is one. When `c` asks, `a` has saved its two chunks last, `b` its one
    # before. Whatever the size, `a` gets its 56 back.
    *(
        f"{pool} {slots} {count} {count / _ASKED:.1%}"
        for pool, slots, count in [
            ("half", 3, 56 + 32),
            ("as it was", 6, 56 + 64),
            ("twice", 12, 56 + 64),
            ("4 times", 24, 56 + 64),
            ("10 times", 60, 56 + 64),
        ]
    ),
    # The load of the 64 fails: 120 / 56 = 2.143.
    f"56 of {_ASKED} tokens were loaded; the estimate for the pool's real size is 114.3% too high",
    "",
]

STATISTICS = {
    "num_logs": 1,
    "num_events": 79,
    "num_steps": 12,
    # Step by step.
    "num_tokens_scheduled": 70 + 1 + 49 + 1 + 2 + 1 + 52 + 71 + 2 + 22 + 3 + 67,
    "num_deferrals": 1,
    "num_open_requests": 2,
    "duration_ns": 120 * MS,
    "figures": {
        "num_requests": 4,
        "num_preemptions": 2,
        "num_lookups": 6,
        "num_tokens_offered": 56 + 64,
        "num_admissions": 6,
        # Beyond vLLM's own prefix hit.
        "num_tokens_queried": _NEEDED - 16,
        "num_tokens_hit": 56 + 64,
        "num_tokens_loaded": 56,
        "num_tokens_recovered": 56,
        "num_tokens_retained": 16,
        "num_tokens_recomputed": 50,
        "num_chunks_saved": 2 + 1 + 2,
        "num_chunks_evicted": 0,
        "num_chunks_declined": 1,
        "num_chunks_tainted": 2,
        "num_bytes_saved": 2048 + 512 + 1024 + 2048,
        "num_bytes_loaded": 2048,
        "save_duration_ns": 4 * MS,
        "load_duration_ns": 2 * MS,
        "num_loads_failed": 1,
        "num_saves_failed": 0,
        "num_violations": 0,
        "num_hook_failures": 0,
        "num_extension_events": 0,
        "num_extensions_stopped": 0,
    },
    "incomplete": "",
}

TOTAL = {
    "num_admissions": 6,
    "num_tokens_needed": _NEEDED,
    "num_tokens_retained": 16,
    "num_tokens_elsewhere": 0,
    "num_tokens_loaded": 56,
    "num_tokens_missed": 32 + 18 + 64 + 64,
    "missed": _LEFT,
    "num_tokens_recomputed": 50,
    "recomputed": _RECOMPUTED,
    "computed_twice": _TWICE,
    "num_tokens_offered": 56 + 64,
    "offered": {"claimed": 56 + 64},
    "to_load": {"loaded": 56, "failed": 64},
    "num_tokens_duplicated": 0,
    "duplicated": {},
    "advice": {"preempted": _FEWER_PREEMPTIONS, "load_failed": _WORKER, "reset": _NO_RESET},
}

POOL_SIZES = {
    "pool_sizes": [
        {"factor": factor, "num_slots": num_slots, "num_tokens_loaded": 56 + (64 if num_slots >= 4 else 32)}
        # A pool holds a chunk at least.
        for factor, num_slots in [
            *((0.25, 2), (0.5, 3), (0.75, 4), (1.0, 6), (1.5, 9), (2.0, 12)),
            *((3.0, 18), (4.0, 24), (6.0, 36), (8.0, 48), (10.0, 60)),
        ]
    ],
    "num_tokens_asked": _ASKED,
    "num_tokens_loaded": 56,
    "one_of": 1,
    "why_not": "",
    "note": "",
    "error": 120 / 56 - 1,
}

TOP = {"request_id": "b", "ordinal": 1, "num_tokens_recomputed": 50}


def _text(log: Path) -> list[str]:
    lines = without(printed("stats", log), "log ", "per second ", "log bytes a step ")
    return lines[: lines.index("event events bytes share of bytes")]


def _records(log: Path) -> list[dict[str, object]]:
    of_bytes = {"type", "path", "num_bytes", "rates"}
    names = ("statistics", "total", "pool_sizes", "top_request")
    found = [record for name in names for record in records(name, "stats", log)]
    return [{name: value for name, value in record.items() if name not in of_bytes} for record in found]


GOLDEN = {
    "stats": Golden("stats", STORY, _text, TEXT),
    "stats for programs": Golden("stats", STORY, _records, [STATISTICS, TOTAL, POOL_SIZES, TOP]),
}
