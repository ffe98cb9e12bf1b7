"""What `kvledger export --html` shows of the story `export.txt`: the text of its tables, and of what is drawn."""

from __future__ import annotations

from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

from golden_tools.export_story import END, INSTANTS, LIVES, LOOKUPS, STATES, STORY
from golden_tools.golden import Golden, printed, time_of_day, without

_ASKED = "looked up"
_ANSWERS = [
    f"{_ASKED} 40 tokens: 0 are saved, 0 offered; the next chunk is not in the pool",
    f"{_ASKED} 43 tokens: 42 are saved, 42 offered; nothing is missing",
    f"{_ASKED} 33 tokens: 32 are saved, 32 offered; nothing is missing",
]


def _duration(milliseconds: float) -> str:
    return f"{milliseconds * 1000:.1f} µs" if milliseconds < 1 else f"{milliseconds:.1f} ms"


_COPIES = [
    [
        "save 1: completed, 2.0 ms from 5.000 ms (event 9), in its step chunks 0; 2 pages, 1.0 KiB in 1.0 ms of work",
        (
            "tail save 2: completed, 2.0 ms from 10.000 ms (event 14), before the forward tokens 32–41; 1 page, 512 B "
            "in 500.0 µs of work"
        ),
        (
            "load 3: completed, 4.0 ms from 20.000 ms (event 21), in its step tokens 0–41; 3 pages, 1.5 KiB in 2.0 ms "
            "of work"
        ),
        (
            "save 4: completed, 3.0 ms from 35.000 ms (event 32), before the forward chunks 1; 2 pages, 1.0 KiB in 1.0 "
            "ms of work"
        ),
    ],
    [
        (
            "load 5: failed, 4.0 ms from 40.000 ms (event 41), in its step tokens 0–31; 2 pages, 0 B in 0.0 µs of "
            "work; failed on ranks 0 broken"
        ),
    ],
]
"""Ordinal of the life → its copies."""


def _drawn(ordinal: int) -> list[str]:
    """Of one life: bars of states, bars of copies, lines of lookups, marks of what happened."""
    lines = []
    for each in (each for each in STATES if each.ordinal == ordinal):
        until = END if each.until is None else each.until
        left = f" to {until:.3f} ms by {each.left_by}" if each.left_by else ""
        lines.append(
            f"{each.state}, {_duration(until - each.since)} from {each.since:.3f} ms by {each.cause} (event "
            f"{each.sequence}){left} generation {each.generation}; {each.num_computed} → {each.num_computed_at_end} "
            "tokens computed"
        )
    lines += _COPIES[ordinal]
    lines += [
        f"lookup at {each.at:.3f} ms (event {each.sequence}) {answer}"
        for each, answer in zip(LOOKUPS, _ANSWERS, strict=True)
        if each.ordinal == ordinal
    ]
    return [*lines, *_marks(ordinal)]


def _marks(ordinal: int | None) -> list[str]:
    of_life = (each for each in INSTANTS if each.ordinal == ordinal)
    return [f"{each.kind} at {each.at:.3f} ms (event {each.sequence}) {each.text}" for each in of_life]


REQUESTS = [
    # Arrived, took, queued, preempted, ended, prompt, output, loaded, recomputed, failures; then why.
    # The life whose load failed is the worst, so it comes first. It ran at 44 ms. 32 tokens were missed, 1 was computed
    # twice.
    "doc 15:06:40.040 – 4.0 ms 0 running 33 1 0 0 1",
    "why: load_failed 33",
    # Running at 1 ms, preempted from 10 ms to 24 ms.
    "doc 15:06:40.000 35.0 ms 1.0 ms 14.0 ms (1) stopped 40 25 42 0 0",
]

WHY = [
    "load_failed 32 1 their load failed, or the previous load had failed and the request had to compute first",
    "new 32 0 no request had computed them before",
    "partial_chunk 7 0 after the last whole chunk, so they have no key to be saved under",
    "last_token 3 0 the last known token is always computed, because the next one is sampled from it",
    # 116 tokens at three admissions, 42 of them loaded.
    "all 74 1",
]
assert sum(count for life in LIVES for count in life.missed.values()) == 74

NOTICED = [
    " ".join(
        (
            *(time_of_day(each.at), f"{each.at:.3f}", str(each.sequence), each.kind),
            *(() if each.ordinal is None else ("doc",)),
            each.text,
        )
    )
    for each in INSTANTS
    if each.is_trouble
]

EVENTS = [
    # When, which events, states, what happened.
    (0, "1", "new", "arrived with 40 prompt tokens"),
    (0, "3–4", "new", _ANSWERS[0]),
    (0, "5", "new", "got 3 blocks"),
    (1, "6–7", "new → running", "computed 40 tokens (0 → 40)"),
    # With the report of the save, and the step at 9 ms.
    (5, "8–12", "running", "decoded 2 tokens in 2 steps (40 → 42); saving 1 chunk; 1.0 KiB in 1.0 ms"),
    (
        10,
        "13–14",
        "running → preempted",
        (
            "preempted with 42 settled tokens, lost 3 blocks; save 2 starts: copies out 10 tokens of the request's "
            "part-filled last chunk from 1 block (3), before these are overwritten"
        ),
    ),
    (12, "16–17", "preempted", "save 2 is done; 512 B in 500.0 µs"),
    (20, "18–19", "preempted", _ANSWERS[1]),
    (
        20,
        "20–21",
        "preempted → recovering",
        "got 3 blocks, 42 offered tokens claimed; load 3 starts: tokens 0–41 into 3 blocks (4–6)",
    ),
    (20, "22", "recovering", "computed 1 token (42 → 43)"),
    (24, "23–25", "recovering → running", "load 3 has arrived; 1.5 KiB in 2.0 ms"),
    (25, "26", "running", "decoded 1 token (43 → 44)"),
    (30, "27", "running → chunked_prefill", "next turn: 40 of 64 tokens computed"),
    (30, "29–30", "chunked_prefill → running", "computed 24 tokens (40 → 64); 1 more block"),
    (
        35,
        "31–32",
        "running → finished",
        (
            "finished (FINISHED_STOPPED) with 65 tokens; save 4 starts: chunk 1 from 2 blocks (6–7), before they are "
            "overwritten"
        ),
    ),
    (
        38,
        "33–35",
        "finished → released",
        "save 4 is done; released; no transfers outstanding; 1.0 KiB in 1.0 ms",
    ),
    (40, "36", "new", "arrived with 33 prompt tokens, life 2 of this id"),
    (40, "38–39", "new", _ANSWERS[2]),
    (
        40,
        "40–41",
        "new",
        "got 3 blocks, 32 offered tokens claimed; load 5 starts: tokens 0–31 into 2 blocks (8–9)",
    ),
    (41, "42", "new", "computed 1 token (32 → 33)"),
    (44, "43–46", "new → running", "load 5 failed: broken; 1 chunk tainted, not offered until saved again"),
    (44, "47–48", "running", INSTANTS[3].text),
    (44, "49", "running → chunked_prefill", "rolled back to 0 computed tokens"),
    (50, "50–51", "chunked_prefill → running", "computed 33 tokens (0 → 33)"),
    (60, "52", "running", "decoded 1 token (33 → 34)"),
]

FIGURES = [
    "requests in this part 2: 1 FINISHED_STOPPED, 1 running",
    # 0 + 42 + 32.
    "lookups 3 answered, repeats included; 74 tokens offered",
    "preempted 1 time; tokens recovered 42, retained 0, recomputed 0",
    # 2560 B in 2.5 ms, 1536 B in 2 ms.
    "saved 2 chunks, 2.5 KiB in 2.5 ms (1000.0 KiB/s)",
    "loaded 42 tokens, 1.5 KiB in 2.0 ms (750.0 KiB/s)",
    "not saved 0 chunks declined, 0 saves failed",
    "lost 0 chunks evicted, 1 tainted, 1 load failed",
    "faults 0 broken rules and 0 failed hooks recorded by the connector",
    "end closed; 1 request was open",
]

POOL_SIZES = [
    # 42 tokens come back after the preemption. The 32 of the one chunk are in a pool of any size. 32 were asked for
    # before, when nobody had saved them.
    f"{pool} {slots} {42 + 32} {(42 + 32) / (32 + 42 + 32):.1%}"
    for pool, slots in [("half", 2), ("as it was", 5), ("twice", 10), ("4 times", 20), ("10 times", 50)]
]

PAGE = {
    "verdict": ["sound: every rule that a log can decide is kept"],
    # What is of no request is marked in the engine's row, above the rows of the two lives.
    "Timeline": [*_marks(None), *_drawn(1), *_drawn(0)],
    "2 requests": REQUESTS,
    "Why tokens were computed": WHY,
    "Pool size": POOL_SIZES,
    "Notable events": NOTICED,
    "Event by event": [f"{time_of_day(at)} {at:.3f} {events} {states} {text}" for at, events, states, text in EVENTS],
    "The log in figures": FIGURES,
}
"""Heading → what is below it."""


class _Page(HTMLParser):
    """The texts of a page below its headings: rows of tables, definitions, titles of what is drawn, and the verdict."""

    def __init__(self) -> None:
        super().__init__()
        self.below: defaultdict[str, list[str]] = defaultdict(list)
        self._heading = ""
        self._text = ""
        self._is_head = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"title", "tr", "dt", "h2"} or "verdict" in (dict(attrs).get("class") or ""):
            self._text = ""
            self._is_head = False
        self._is_head |= tag == "th"
        self._text += " "

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        text = " ".join(self._text.split())
        if tag == "h2":
            self._heading = text
        elif tag == "span" and not self._heading and not self.below:
            self.below["verdict"].append(text)
        elif (tag == "title" and "(event " in text) or tag == "dd" or (tag == "tr" and not self._is_head):
            self.below[self._heading].append(text)


def _page(log: Path) -> list[tuple[str, list[str]]]:
    path = log.parent / "page.html"
    printed("export", log, "--html", "-o", path)
    page = _Page()
    page.feed(path.read_text())
    of_bytes = ("log ", "written by ", "opened ", "sizes ", "events ", "shown ", "chain head ")
    page.below["The log in figures"] = without(page.below["The log in figures"], *of_bytes)
    return list(page.below.items())


GOLDEN = {
    "export, a page": Golden("export", STORY, lambda log: sorted(_page(log)), sorted(PAGE.items())),
}
