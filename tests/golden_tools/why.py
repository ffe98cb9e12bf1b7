"""What `kvledger why` says of `essay` in the story `why.txt`, for people and for programs.

First life: chunks 0 and 1 hold 128 of its 150 tokens. Token 149 is the last one, so 149 - 128 = 21 are after the
chunks. It comes back with 153 tokens, 152 of which had settled. 64 are loaded. The other 89 are 64 of chunk 1, the
last token, and 24 between them.

Second life: 128 tokens are claimed and not loaded, 21 + 1 are left. A step has counted 150 when all are taken back;
it computed the 22.
"""

from __future__ import annotations

from pathlib import Path

from golden_tools.golden import MS, Golden, picked, printed, records
from golden_tools.story import story

STORY = story("why")

_LAST = "the last known token is always computed, because the next one is sampled from it"
_AFTER_CHUNKS = "after the last whole chunk, so they have no key to be saved under"
_NEW = "no request had computed them before"
_ASKED = "looked up"
_LARGER_POOL = (
    "a larger `host_bytes` keeps more chunks; `kvledger stats` estimates how many more tokens would be loaded"
)
_ROOM = "a larger `host_bytes` makes room, if the host pool was full"
_FEWER_PREEMPTIONS = (
    "vLLM's KV blocks ran out; a smaller `--max-num-seqs` lets fewer requests run at the same time, "
    "and a larger `--gpu-memory-utilization` gives them more blocks"
)
_WORKER = "the worker's message `copy failed` has the error"
_SMALLER_CHUNKS = "a smaller `chunk_size` leaves fewer tokens after the last whole chunk"
_TABLE = "reason left to compute computed again meaning"

TEXT = [
    "essay, 2025-06-15T15:06:40.000Z",
    "life 1 of 2",
    # Its first step is at 1 ms. It is preempted at 30 ms, and what it loads has arrived at 44 ms.
    "took 60.0 ms: 1.0 ms queued, 45.0 ms running, 14.0 ms preempted (once)",
    "15:06:40.000 0.000 1 arrived with 150 prompt tokens",
    f"15:06:40.001 1.000 3–4 {_ASKED} 150 tokens: 0 are saved, 0 offered; the next chunk is not in the pool",
    f"tokens 0–127: {_NEW}",
    f"tokens 128–148: {_AFTER_CHUNKS}",
    f"token 149: {_LAST}",
    "15:06:40.001 1.000 5 admitted with 150 tokens: 150 left to compute",
    # Steps begin at 1, 10, 20 and 30 ms: the fourth is number 3. `essay` is not in it, and `rival` gets block 1.
    (
        "15:06:40.030 30.000 19 preempted with 152 settled tokens. In step 3 (event 21) 1 request ran 1 token, and "
        "blocks went to rival (1). vLLM takes a running request's blocks when another request needs one and none is "
        "free; inferred: vLLM took this request's blocks for that request"
    ),
    "15:06:40.030 30.000 20 1 settled chunk from chunk 2 on not saved: the host pool had no room",
    f"15:06:40.040 40.000 26–27 {_ASKED} 153 tokens: 64 are saved, 64 offered; the next chunk is not in the pool",
    # Evicted at 30 ms and saved at 12 ms; now it is 40 ms.
    (
        "tokens 64–127 (chunk 1): evicted for a save of request rival at event 22, 10.0 ms before; it had been saved "
        "by the request itself at event 11, 28.0 ms before"
    ),
    (
        "tokens 128–151 (chunk 2): not saved by the request itself at event 20, 10.0 ms before, because the host pool "
        "had no room"
    ),
    f"token 152: {_LAST}",
    "15:06:40.040 40.000 28 admitted with 153 tokens: 64 to be loaded, 89 left to compute",
    # Below 152, from 64 on.
    "15:06:40.040 40.000 30 computed 88 tokens again: 64 tokens evicted, 24 tokens declined",
    "15:06:40.044 44.000 32 load 3 has arrived",
    "15:06:40.060 60.000 39 finished (FINISHED_STOPPED) with 155 tokens",
    "",
    _TABLE,
    "evicted 64 64 saved and evicted",
    "declined 24 24 not saved, because the host pool had no room or a load into their blocks had failed",
    f"new 128 0 {_NEW}",
    f"partial_chunk 21 0 {_AFTER_CHUNKS}",
    f"last_token 2 0 {_LAST}",
    # 64 + 24 + 128 + 21 + 2.
    "all 239 88",
    "303 tokens at 2 admissions = 0 from vLLM's prefix cache + 64 loaded + 239 left to compute",
    "",
    "possible changes",
    # A tenth of 60 ms is 6: it was preempted for 14, and queued for less than half.
    f"preempted: {_FEWER_PREEMPTIONS}",
    # A tenth of 239 is 23.9: 64 are evicted, 24 declined; 21 are too few.
    f"evicted: {_LARGER_POOL}",
    f"declined: {_ROOM}",
    "life 2 of 2",
    # From 70 to 90 ms; its load is reported at 73 ms.
    "took 20.0 ms: 3.0 ms queued, 17.0 ms running",
    "15:06:40.070 70.000 41 arrived with 150 prompt tokens",
    f"15:06:40.071 71.000 43–44 {_ASKED} 150 tokens: 128 are saved, 128 offered; nothing is missing",
    f"tokens 128–148: {_AFTER_CHUNKS}",
    f"token 149: {_LAST}",
    "15:06:40.071 71.000 45 admitted with 150 tokens: 128 to be loaded, 22 left to compute",
    (
        "tokens 0–127 (chunks 0–1): their load failed, or the previous load had failed and the request had to compute "
        "first (event 49: load 5 failed: broken)"
    ),
    "15:06:40.073 73.000 49 load 5 failed: broken",
    (
        "15:06:40.073 73.000 53 quarantined (holds blocks that could not be filled): cache disabled for this request, "
        "because of event 52"
    ),
    "15:06:40.073 73.000 54 rolled back to 0 computed tokens",
    "15:06:40.080 80.000 55 computed 22 tokens again after a rollback: 22 tokens load_failed",
    (
        "tokens 128–149 (chunk 2): their load failed, or the previous load had failed and the request had to compute "
        "first (event 49, 7.0 ms before: load 5 failed: broken)"
    ),
    "15:06:40.090 90.000 57 finished (FINISHED_STOPPED) with 151 tokens",
    "",
    _TABLE,
    "load_failed 128 22 their load failed, or the previous load had failed and the request had to compute first",
    f"partial_chunk 21 0 {_AFTER_CHUNKS}",
    f"last_token 1 0 {_LAST}",
    "all 150 22",
    "150 tokens at 1 admission = 0 from vLLM's prefix cache + 0 loaded + 150 left to compute",
    "",
    "possible changes",
    # A tenth of 150 + 22 is 17.2; chunks have 64 tokens, and blocks 16.
    f"load_failed: {_WORKER}",
    f"partial_chunk: {_SMALLER_CHUNKS}",
]

CAUSES = [
    # Ordinal (`rival` is 1), what, its events, when, the events that prove it.
    (0, "request.arrived", 1, 1, 0, ()),
    (0, "lookup", 3, 4, 1 * MS, ()),
    (0, "admission", 5, 5, 1 * MS, (4,)),
    (0, "request.preempted", 19, 19, 30 * MS, (21,)),
    (0, "save.declined", 20, 20, 30 * MS, (19,)),
    (0, "lookup", 26, 27, 40 * MS, ()),
    (0, "admission", 28, 28, 40 * MS, (27,)),
    (0, "recomputed", 30, 30, 40 * MS, ()),
    (0, "load.completed", 32, 32, 44 * MS, (31,)),
    (0, "request.finished", 39, 39, 60 * MS, ()),
    (2, "request.arrived", 41, 41, 70 * MS, ()),
    (2, "lookup", 43, 44, 71 * MS, ()),
    (2, "admission", 45, 45, 71 * MS, (44,)),
    (2, "load.failed", 49, 49, 73 * MS, (48,)),
    (2, "request.quarantined", 53, 53, 73 * MS, (52,)),
    (2, "tokens.rolled_back", 54, 54, 73 * MS, ()),
    (2, "computed_twice", 55, 55, 80 * MS, ()),
    (2, "request.finished", 57, 57, 90 * MS, ()),
]

_FIRST = [("new", 0, 128, (4,)), ("partial_chunk", 128, 21, (4,)), ("last_token", 149, 1, (4,))]
_AGAIN = [("evicted", 64, 64, (22, 11)), ("declined", 128, 24, (20,))]
_BACK = [*_AGAIN, ("last_token", 152, 1, (27,))]
_SECOND = [("partial_chunk", 128, 21, (44,)), ("last_token", 149, 1, (44,))]

REASONS = [
    # Ordinal, of which cause, why, first token, how many, proof.
    *((0, "lookup", 3, *span) for span in _FIRST),
    *((0, "admission", 5, *span) for span in _FIRST),
    *((0, "lookup", 26, *span) for span in _BACK),
    *((0, "admission", 28, *span) for span in _BACK),
    *((0, "recomputed", 30, *span) for span in _AGAIN),
    *((2, "lookup", 43, *span) for span in _SECOND),
    (2, "admission", 45, "load_failed", 0, 128, (49, 48)),
    *((2, "admission", 45, *span) for span in _SECOND),
    (2, "computed_twice", 55, "load_failed", 128, 22, (49, 48)),
]

TOTALS = [
    {
        "type": "total",
        "request_id": "essay",
        "ordinal": 0,
        "queued_ns": 1 * MS,
        "running_ns": 45 * MS,
        "preempted_ns": 14 * MS,
        "num_admissions": 2,
        "num_tokens_needed": 150 + 153,
        "num_tokens_retained": 0,
        "num_tokens_elsewhere": 0,
        "num_tokens_loaded": 64,
        # Those of which a cache could have spared the request.
        "num_tokens_missed": 64 + 24,
        "missed": {"new": 128, "partial_chunk": 21, "last_token": 2, "evicted": 64, "declined": 24},
        "num_tokens_recomputed": 152 - 64,
        "recomputed": {"evicted": 64, "declined": 24},
        "computed_twice": {},
        "num_tokens_offered": 64,
        "offered": {"claimed": 64},
        "to_load": {"loaded": 64},
        "num_tokens_duplicated": 0,
        "duplicated": {},
        "num_left_out": 0,
        "advice": {"evicted": _LARGER_POOL, "declined": _ROOM, "preempted": _FEWER_PREEMPTIONS},
    },
    {
        "type": "total",
        "request_id": "essay",
        "ordinal": 2,
        "queued_ns": 3 * MS,
        "running_ns": 17 * MS,
        "preempted_ns": 0,
        "num_admissions": 1,
        "num_tokens_needed": 150,
        "num_tokens_retained": 0,
        "num_tokens_elsewhere": 0,
        "num_tokens_loaded": 0,
        "num_tokens_missed": 128,
        "missed": {"partial_chunk": 21, "last_token": 1, "load_failed": 128},
        "num_tokens_recomputed": 0,
        "recomputed": {},
        "computed_twice": {"load_failed": 22},
        "num_tokens_offered": 128,
        "offered": {"claimed": 128},
        "to_load": {"failed": 128},
        "num_tokens_duplicated": 0,
        "duplicated": {},
        "num_left_out": 0,
        "advice": {"load_failed": _WORKER, "partial_chunk": _SMALLER_CHUNKS},
    },
]


def _text(log: Path) -> list[str]:
    return printed("why", log, "essay")


def _causes(log: Path) -> list[tuple[object, ...]]:
    names = ("ordinal", "what", "sequence", "last_sequence", "time_ns", "evidence")
    return [picked(record, names) for record in records("cause", "why", log, "essay")]


def _reasons(log: Path) -> list[tuple[object, ...]]:
    names = ("ordinal", "of", "sequence", "reason", "first_token", "num_tokens", "evidence")
    return [picked(record, names) for record in records("reason", "why", log, "essay")]


def _totals(log: Path) -> list[dict[str, object]]:
    return list(records("total", "why", log, "essay"))


GOLDEN = {
    "why": Golden("why", STORY, _text, TEXT),
    "why, causes for programs": Golden("why", STORY, _causes, CAUSES),
    "why, reasons for programs": Golden("why", STORY, _reasons, REASONS),
    "why, totals for programs": Golden("why", STORY, _totals, TOTALS),
}
