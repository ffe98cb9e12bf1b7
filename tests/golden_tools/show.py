"""What `kvledger show` says of the story `show.txt`: the list, the timeline of a request, the log line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from golden_tools.golden import MS, Golden, picked, printed, records, time_of_day, without
from golden_tools.story import story

STORY = story("show")

# --- the list of requests -------------------------------------------------------------------------

LIST = [
    "opened 2025-06-15 15:06:40 UTC, covers 120.0 ms",
    "sizes block 16 tokens, chunk 32 tokens, 8 slots, 1 rank",
    # The second life of `chat` decodes when the log ends.
    "end closed; 1 request was open",
    "requests 3: 1 FINISHED_STOPPED, 1 FINISHED_ABORTED, 1 running",
    # Answers: events 4, 10, 29, 31, 51. Two of them offer 74 tokens.
    "lookups 5 answered, repeats included; 148 tokens offered",
    # 74 tokens had been computed, and 74 are loaded.
    "preempted 1 time; tokens recovered 74, retained 0, recomputed 0",
    # Saves 1, 2 and 5 of a chunk each, 1024 B; the tail has 512 B: 3584 B in 4 x 0.5 ms are 1,792,000 B/s.
    "saved 3 chunks, 3.5 KiB in 2.0 ms (1.7 MiB/s)",
    "loaded 74 tokens, 2.5 KiB in 2.0 ms (1.2 MiB/s)",
    "not saved 0 chunks declined, 1 save failed",
    "lost 0 chunks evicted, 0 tainted, 0 loads failed",
    "faults 0 broken rules and 0 failed hooks recorded by the connector",
    "",
    "request outcome UTC arrived ms took ms queued ms prompt tokens preempted lookups loaded saved chunks failures",
    # The save of its third chunk is reported when the id is used again and this life is no longer there: 2 chunks.
    "chat STOPPED 15:06:40.000 0.000 90.000 2.000 72 102 1 3 74 2 0",
    "draft ABORTED 15:06:40.003 3.000 6.000 6.000 20 20 0 1 0 0 0",
    # 40 tokens of the prompt, and steps at 100, 110 and 120 ms: 43. The report at 96 ms is none of this life's.
    "chat running 15:06:40.095 95.000 25.000 2.000 40 43 0 1 0 0 1",
]


def _list(log: Path) -> list[str]:
    return without(printed("show", log), "log ", "written by ", "events ")


# --- the timeline of `chat` -----------------------------------------------------------------------


@attrs.frozen
class Group:
    """Events that are shown together."""

    what: str
    events: tuple[int, int]
    milliseconds: tuple[float, float]
    states: tuple[str | None, str | None]
    generation: int | None
    text: str
    counts: dict[str, int] = attrs.field(factory=dict)
    """Those that are not 0, or 1 of moments."""

    @property
    def line(self) -> str:
        """As people see it."""
        first, last = self.events
        before, after = self.states
        place = str(first) if first == last else f"{first}–{last}"
        state = str(after) if before in {None, after} else f"{before} → {after or 'released'}"
        at = self.milliseconds[0]
        return f"{time_of_day(at)} {at:.3f} {place} {state} {self.text}"

    @property
    def record(self) -> tuple[object, ...]:
        """As programs see it."""
        since, until = (int(at * MS) for at in self.milliseconds)
        counts = {**dict.fromkeys(_COUNTS, 0), "num_moments": 1, **self.counts}
        return (self.what, *self.events, since, until, *self.states, self.generation, self.text, *counts.values())


_COUNTS = (
    *("num_moments", "first_token", "num_tokens", "num_blocks", "num_chunks_to_save", "num_bytes", "duration_ns"),
    *("num_broken", "waited_ns"),
)
_FIELDS = (
    *("what", "first_sequence", "last_sequence", "time_ns", "until_ns", "state_before", "state_after", "generation"),
    *("text", *_COUNTS),
)
_ASKED = "looked up"

TIMELINE = [
    Group("arrived", (1, 1), (0, 0), (None, "new"), 0, "arrived with 72 prompt tokens"),
    Group(
        "lookup",
        (3, 4),
        (1, 1),
        ("new", "new"),
        0,
        f"{_ASKED} 72 tokens: 0 are saved, 0 offered; the next chunk is not in the pool",
        {"waited_ns": 1 * MS},
    ),
    Group("blocks.allocated", (5, 5), (2, 2), ("new", "new"), 0, "got 5 blocks", {"num_blocks": 5}),
    # Two steps, 48 + 24, and the report of save 1.
    Group(
        "prefill",
        (6, 17),
        (2, 10),
        ("new", "running"),
        0,
        "computed 72 tokens in 2 steps (0 → 72); saving 1 chunk; 1.0 KiB in 500.0 µs",
        {"num_moments": 2, "num_tokens": 72, "num_chunks_to_save": 1, "num_bytes": 1024, "duration_ns": MS // 2},
    ),
    # The second step is in no row: 73 + 1 = 74.
    Group(
        "decode",
        (18, 22),
        (20, 30),
        ("running", "running"),
        0,
        "decoded 2 tokens in 2 steps (72 → 74); saving 1 chunk; 1.0 KiB in 500.0 µs",
        {
            "num_moments": 2,
            "first_token": 72,
            "num_tokens": 2,
            "num_chunks_to_save": 1,
            "num_bytes": 1024,
            "duration_ns": MS // 2,
        },
    ),
    Group(
        "request.preempted",
        (23, 24),
        (40, 40),
        ("running", "preempted"),
        1,
        "preempted with 74 settled tokens, lost 5 blocks; save 3 starts: copies out 10 tokens of the request's "
        "part-filled last chunk from 1 block (5), before these are overwritten",
    ),
    Group(
        "transfer",
        (26, 27),
        (42, 42),
        ("preempted", "preempted"),
        1,
        "save 3 is done; 512 B in 500.0 µs",
        {"num_bytes": 512, "duration_ns": MS // 2},
    ),
    Group(
        "lookup",
        (28, 31),
        (50, 51),
        ("preempted", "preempted"),
        1,
        f"{_ASKED} 75 tokens: 74 are saved, 74 offered; nothing is missing — 2 times in 1.0 ms",
        {"num_moments": 2},
    ),
    Group(
        "blocks.allocated",
        (32, 33),
        (51, 51),
        ("preempted", "recovering"),
        1,
        "got 5 blocks, 74 offered tokens claimed; load 4 starts: tokens 0–73 into 5 blocks (6–10)",
        {"num_blocks": 5},
    ),
    Group(
        "prefill",
        (34, 34),
        (51, 51),
        ("recovering", "recovering"),
        1,
        "computed 1 token (74 → 75)",
        {"first_token": 74, "num_tokens": 1},
    ),
    Group(
        "transfer",
        (35, 37),
        (55, 55),
        ("recovering", "running"),
        1,
        "load 4 has arrived; 2.5 KiB in 2.0 ms",
        {"num_tokens": 74, "num_bytes": 2560, "duration_ns": 2 * MS},
    ),
    Group(
        "decode",
        (38, 38),
        (60, 60),
        ("running", "running"),
        1,
        "decoded 1 token (75 → 76)",
        {"first_token": 75, "num_tokens": 1},
    ),
    Group(
        "session.continued",
        (39, 39),
        (70, 70),
        ("running", "chunked_prefill"),
        2,
        "next turn: 70 of 100 tokens computed",
    ),
    Group(
        "prefill",
        (41, 42),
        (70, 70),
        ("chunked_prefill", "running"),
        2,
        "computed 30 tokens (70 → 100); 2 more blocks",
        {"first_token": 70, "num_tokens": 30, "num_blocks": 2},
    ),
    Group(
        "decode",
        (43, 44),
        (80, 80),
        ("running", "running"),
        2,
        "decoded 1 token (100 → 101); saving 1 chunk",
        {"first_token": 100, "num_tokens": 1, "num_chunks_to_save": 1},
    ),
    Group(
        "request.finished",
        (45, 45),
        (90, 90),
        ("running", "finished"),
        2,
        "finished (FINISHED_STOPPED) with 102 tokens",
    ),
    # A life that begins has no state before, also where the one before it is not released.
    Group("arrived", (46, 46), (95, 95), (None, "new"), 0, "arrived with 40 prompt tokens, life 2 of this id"),
    # Of the first life; the states are those of the life that is there.
    Group(
        "transfer",
        (48, 49),
        (96, 96),
        ("new", "new"),
        0,
        "save 5 is done; 1.0 KiB in 500.0 µs",
        {"num_bytes": 1024, "duration_ns": MS // 2},
    ),
    Group(
        "lookup",
        (50, 51),
        (97, 97),
        ("new", "new"),
        0,
        f"{_ASKED} 40 tokens: 0 are saved, 0 offered; the next chunk is not in the pool",
        {"waited_ns": 2 * MS},
    ),
    Group("blocks.allocated", (52, 52), (97, 97), ("new", "new"), 0, "got 3 blocks", {"num_blocks": 3}),
    Group("prefill", (53, 54), (97, 97), ("new", "running"), 0, "computed 40 tokens (0 → 40)", {"num_tokens": 40}),
    Group(
        "decode",
        (55, 56),
        (100, 100),
        ("running", "running"),
        0,
        "decoded 1 token (40 → 41); saving 1 chunk",
        {"first_token": 40, "num_tokens": 1, "num_chunks_to_save": 1},
    ),
    Group("transfer", (57, 58), (105, 105), ("running", "running"), 0, "save 6 failed: broken"),
    Group(
        "decode",
        (59, 60),
        (110, 120),
        ("running", "running"),
        0,
        "decoded 2 tokens in 2 steps (41 → 43)",
        {"num_moments": 2, "first_token": 41, "num_tokens": 2},
    ),
]


def _timeline(log: Path) -> list[str]:
    return printed("show", log, "chat")


def _groups(log: Path) -> list[tuple[object, ...]]:
    return [picked(record, _FIELDS) for record in records("group", "show", log, "chat")]


# --- the log line by line -------------------------------------------------------------------------


def _lines() -> Iterator[str]:
    """Progress and saves that go well are left out; answers that only repeat the one before are one line."""
    draft = [
        "15:06:40.003 3.000 8 draft new arrived with 20 prompt tokens",
        f"15:06:40.004 4.000 9 draft new {_ASKED} 20 tokens: fewer than one chunk, so nothing can be loaded",
        (
            "15:06:40.009 9.000 11 draft new → released finished (FINISHED_ABORTED) with 20 tokens; released; no "
            "transfers outstanding"
        ),
    ]
    yield "2025-06-15 (UTC)"
    for group in TIMELINE:
        if group.events[0] == 6:
            yield from draft
        if group.what in {"prefill", "decode"} or group.text.startswith(("save 3 is done", "save 5 is done")):
            continue
        text = group.text.partition(" — ")[0].partition(", life")[0]
        text = text.replace(", lost 5 blocks", "").replace("; 2.5 KiB in 2.0 ms", "")
        at, before, after = group.milliseconds[0], *group.states
        state = after if before in {None, after} else f"{before} → {after}"
        yield f"{time_of_day(at)} {at:.3f} {group.events[0]} chat {state} {text}"
        if group.what == "lookup" and group.milliseconds[1] > at:  # asked a second time: two events, at the end
            until = group.milliseconds[1]
            again = f"{time_of_day(until)} {until:.3f} {group.events[1] - 1} chat {after}"
            yield f"{again} looked up 1 more time in {until - at:.1f} ms: the same answer"
    yield "end closed; 1 request was open"


def _followed(log: Path) -> list[str]:
    return printed("show", log, "--follow", "--since", 1)


GOLDEN = {
    "show, the list": Golden("show", STORY, _list, LIST),
    "show, a request": Golden(
        "show",
        STORY,
        _timeline,
        [
            "chat, 2025-06-15T15:06:40.000Z",
            # From 0 to 90 ms: its first step is at 2 ms, it is preempted at 40 ms, its load has arrived at 55 ms.
            "life 1 of 2: took 90.0 ms: 2.0 ms queued, 73.0 ms running, 15.0 ms preempted (once)",
            # From 95 to 120 ms, where the log ends; its first step is at 97 ms.
            "life 2 of 2: took 25.0 ms so far: 2.0 ms queued, 23.0 ms running",
            "UTC ms events state what happened",
            *(group.line for group in TIMELINE),
        ],
    ),
    "show, a request for programs": Golden("show", STORY, _groups, [group.record for group in TIMELINE]),
    "show, line by line": Golden("show", STORY, _followed, list(_lines())),
}
