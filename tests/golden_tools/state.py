"""What `kvledger show --at` says of the story `stats.txt`: the state in the middle and at the end.

At event 31 the load of `a` is under way. `b` has computed 48, 49, 50 tokens. Of the six slots, two chunks have four and
the tail has one.
"""

from __future__ import annotations

from pathlib import Path

from lifecycle_driver import keys_of

from golden_tools.golden import MS, Golden, printed, records
from golden_tools.story import story

STORY = story("stats")
_COLUMNS = "request state generation computed tokens preempted blocks keys offered jobs"

IN_THE_MIDDLE = [
    "state after event 31",
    _COLUMNS,
    "a recovering 1 73 73 1 5 2 load 3",
    "b running 0 50 50 0 4 1",
    "host pool 5 of 6 slots in use",
    "chunks 2 can be loaded, cache resets so far: 0",
    "jobs 1 job in flight",
    "load 3 of a, 4 blocks",
    # 70 + 48 + (73 - 16) tokens were asked about; a save of two chunks and a tail are done.
    (
        "totals num_requests 2, num_preemptions 1, num_lookups 3, num_tokens_offered 56, num_admissions 3, "
        "num_tokens_queried 175, num_tokens_hit 56, num_tokens_recovered 56, num_tokens_retained 16, "
        "num_chunks_saved 2, num_chunks_declined 1, num_bytes_saved 2560, save_duration_ns 2000000"
    ),
]

REQUEST = {
    "type": "request_state",
    "sequence": 31,
    "request_id": "a",
    "ordinal": 0,
    "state": "recovering",
    "state_since_ns": 30 * MS,
    "generation": 1,
    "num_computed_tokens": 73,
    "num_tokens": 73,
    "num_prompt_tokens": 70,
    "num_preemptions": 1,
    "quarantined": False,
    "block_ids": [1, 9, 10, 11, 12],
    "lost_block_ids": [],
    "chunk_keys": [key.hex() for key in keys_of("a", 2)],
    # Nothing yet in this generation, because its load is under way.
    "num_chunks_handled": 0,
    "pending_answer": None,
    # Tokens 16 to 71, in four blocks: three blocks of the chunks, and the tail.
    "jobs": [{"job_id": 3, "kind": "load", "block_ids": [9, 10, 11, 12], "slots": [1, 2, 3, 4]}],
}

AT_THE_END = [
    "state after event 79",
    _COLUMNS,
    # Since it came back with 51 tokens: 52, 53, 54, 55, 56.
    "b running 1 56 56 1 4 1",
    # The second life of the id. After the rollback 71, 72, 73.
    "a running 0 73 73 0 5 2",
    # The chunk of `b`. Those of `a` are tainted.
    "host pool 2 of 6 slots in use",
    "chunks 1 can be loaded, cache resets so far: 1",
    "jobs 0 jobs in flight",
    (
        "totals num_requests 4, num_preemptions 2, num_lookups 6, num_tokens_offered 120, num_admissions 6, "
        "num_tokens_queried 361, num_tokens_hit 120, num_tokens_loaded 56, num_tokens_recovered 56, "
        "num_tokens_retained 16, num_tokens_recomputed 50, num_chunks_saved 5, num_chunks_declined 1, "
        "num_chunks_tainted 2, num_bytes_saved 5632, num_bytes_loaded 2048, save_duration_ns 4000000, "
        "load_duration_ns 2000000, num_loads_failed 1"
    ),
]


def _in_the_middle(log: Path) -> list[str]:
    return printed("show", log, "--at", 31)


def _request(log: Path) -> list[dict[str, object]]:
    return list(records("request_state", "show", log, "a", "--at", 31))


def _at_the_end(log: Path) -> list[str]:
    return printed("show", log, "--at", 79)


GOLDEN = {
    "show --at, in the middle": Golden("show", STORY, _in_the_middle, IN_THE_MIDDLE),
    "show --at, a request for programs": Golden("show", STORY, _request, [REQUEST]),
    "show --at, at the end": Golden("show", STORY, _at_the_end, AT_THE_END),
}
