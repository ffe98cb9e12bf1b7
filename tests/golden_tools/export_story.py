"""What follows from the story `export.txt`, before it is put into the form of any format.

All times are in milliseconds. Steps are numbered from 0; a page of the pool is one block, 512 B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from lifecycle_driver import keys_of

from golden_tools.story import story

STORY = story("export")


@attrs.frozen
class State:
    """A stay in one state and generation."""

    ordinal: int
    generation: int
    state: str
    since: float
    until: float | None
    cause: str
    left_by: str
    sequence: int
    """Of the event that led here."""
    num_computed: int
    num_computed_at_end: int
    num_tokens: int


END = 60
"""When the log ends."""

STATES = [
    # Life 0. It computes 40, decodes 41 and 42, and loses them. The 43rd is known by then.
    State(0, 0, "new", 0, 1, "request.arrived", "prefill.completed", 1, 0, 40, 40),
    State(0, 0, "running", 1, 10, "prefill.completed", "request.preempted", 7, 40, 42, 40),
    State(0, 1, "preempted", 10, 20, "request.preempted", "blocks.allocated", 13, 0, 0, 43),
    # The step at 20 ms counts 42 loaded tokens and one more.
    State(0, 1, "recovering", 20, 24, "blocks.allocated", "prefill.completed", 20, 0, 43, 43),
    State(0, 1, "running", 24, 30, "prefill.completed", "session.continued", 25, 43, 44, 43),
    State(0, 2, "chunked_prefill", 30, 30, "session.continued", "prefill.completed", 27, 40, 64, 64),
    State(0, 2, "running", 30, 35, "prefill.completed", "request.finished", 30, 64, 64, 64),
    State(0, 2, "finished", 35, 38, "request.finished", "request.released", 31, 64, 64, 65),
    # Life 1. The step at 41 ms counts 32 tokens whose load fails, and one more. Nothing is left: another generation.
    State(1, 0, "new", 40, 44, "request.arrived", "prefill.completed", 36, 0, 33, 33),
    State(1, 0, "running", 44, 44, "prefill.completed", "tokens.rolled_back", 46, 33, 33, 33),
    State(1, 1, "chunked_prefill", 44, 50, "tokens.rolled_back", "prefill.completed", 49, 0, 33, 33),
    State(1, 1, "running", 50, None, "prefill.completed", "", 51, 33, 34, 33),
]


@attrs.frozen
class Copy:
    """A load or a save."""

    job_id: int
    kind: str
    ordinal: int
    generation: int
    since: float
    until: float
    worker: float
    num_pages: int
    num_bytes: int
    sequence: int
    tokens: tuple[int, int] | None = None
    """First and how many, where the event says it."""
    num_chunks: int = 0
    before_forward: bool = False
    error: str = ""


COPIES = [
    Copy(1, "save", 0, 0, 5, 7, 1, 2, 1024, 9, num_chunks=1),
    # Of the generation that had the blocks.
    Copy(2, "tail save", 0, 0, 10, 12, 0.5, 1, 512, 14, tokens=(32, 10), before_forward=True),
    Copy(3, "load", 0, 1, 20, 24, 2, 3, 1536, 21, tokens=(0, 42)),
    Copy(4, "save", 0, 2, 35, 38, 1, 2, 1024, 32, num_chunks=1, before_forward=True),
    Copy(5, "load", 1, 0, 40, 44, 0, 2, 0, 41, tokens=(0, 32), error="broken"),
]


@attrs.frozen
class Lookup:
    """An answered lookup, with 0 computed tokens."""

    ordinal: int
    generation: int
    at: float
    num_tokens: int
    num_hit: int
    miss_reason: str
    sequence: int


LOOKUPS = [
    Lookup(0, 0, 0, 40, 0, "missing", 4),
    Lookup(0, 1, 20, 43, 42, "complete", 19),
    Lookup(1, 0, 40, 33, 32, "complete", 39),
]


@attrs.frozen
class Instant:
    """Something that happens at once. `ordinal`: None where it is of no request."""

    kind: str
    at: float
    ordinal: int | None
    is_trouble: bool
    text: str
    sequence: int


INSTANTS = [
    Instant("session.continued", 30, 0, False, "next turn: 40 of 64 tokens computed", 27),
    Instant(
        "chunks.tainted",
        44,
        None,
        True,
        f"chunk {keys_of('doc', 1)[0].hex()} tainted, not offered until saved again",
        45,
    ),
    Instant("load.errors_observed", 44, None, True, "2 blocks could not be filled", 47),
    Instant(
        "request.quarantined",
        44,
        1,
        True,
        "quarantined (holds blocks that could not be filled): cache disabled for this request",
        48,
    ),
    Instant("tokens.rolled_back", 44, 1, False, "rolled back to 0 computed tokens", 49),
]


@attrs.frozen
class Step:
    """A step and what can be counted after it."""

    at: float
    num_tokens: int
    num_events: int
    state: str
    """That of the one request."""
    num_blocks: int
    num_slots_used: int
    """Of 5."""
    num_bytes: int | None
    """None before the first save is done."""
    num_chunks: int
    num_loads: int
    num_saves: int
    sequence: int


STEPS = [
    Step(1, 40, 2, "running", 3, 0, None, 0, 0, 0, 6),
    Step(5, 1, 2, "running", 3, 2, None, 0, 0, 1, 8),
    Step(9, 1, 1, "running", 3, 2, 1024, 1, 0, 0, 12),
    # The tail has a slot until the request runs again.
    Step(10, 0, 1, "preempted", 0, 3, 1536, 1, 0, 1, 15),
    Step(20, 1, 1, "recovering", 3, 3, 1536, 1, 1, 0, 22),
    Step(25, 1, 1, "running", 3, 2, 1024, 1, 0, 0, 26),
    Step(30, 24, 2, "running", 4, 2, 1024, 1, 0, 0, 29),
    # Two chunks are saved. The blocks of life 0 are free.
    Step(41, 1, 1, "new", 3, 4, 2048, 2, 1, 0, 42),
    # The first chunk is tainted.
    Step(50, 33, 2, "running", 3, 2, 1024, 1, 0, 0, 50),
    Step(60, 1, 1, "running", 3, 2, 1024, 1, 0, 0, 52),
]


@attrs.frozen
class Life:
    """A request from its arrival to its release."""

    ordinal: int
    sequence: int
    last_sequence: int
    """Of its own events."""
    arrived: float
    first_running: float
    finished: float | None
    released: float | None
    outcome: str
    num_prompt_tokens: int
    num_tokens: int
    num_preemptions: int
    num_lookups: int
    num_loaded: int
    num_recovered: int
    num_chunks_saved: int
    num_bytes_loaded: int
    num_bytes_saved: int
    num_failures: int
    missed: Mapping[str, int]
    """Tokens left to compute at its admissions, by reason."""
    states: Mapping[str, float]
    """How long it was in each, added up."""


LIVES = [
    Life(
        ordinal=0,
        sequence=1,
        last_sequence=35,
        arrived=0,
        first_running=1,
        finished=35,
        released=38,
        outcome="FINISHED_STOPPED",
        num_prompt_tokens=40,
        num_tokens=65,
        num_preemptions=1,
        num_lookups=2,
        num_loaded=42,
        num_recovered=42,
        num_chunks_saved=2,
        num_bytes_loaded=1536,
        num_bytes_saved=1024 + 512 + 1024,
        num_failures=0,
        # 40 = 32 new + 7 after the chunk + the last one; 43 = 42 loaded + the last one.
        missed={"new": 32, "partial_chunk": 7, "last_token": 2},
        states={"new": 1, "running": 9 + 6 + 5, "preempted": 10, "recovering": 4, "finished": 3},
    ),
    Life(
        ordinal=1,
        sequence=36,
        # Steps name requests by their ordinals, and are no events of their own. Its prefill was completed in event 51.
        last_sequence=51,
        arrived=40,
        first_running=44,
        finished=None,
        released=None,
        outcome="running",
        num_prompt_tokens=33,
        num_tokens=34,
        num_preemptions=0,
        num_lookups=1,
        num_loaded=0,
        num_recovered=0,
        num_chunks_saved=0,
        num_bytes_loaded=0,
        num_bytes_saved=0,
        num_failures=1,
        missed={"load_failed": 32, "last_token": 1},
        states={"new": 4, "chunked_prefill": 6, "running": 10},
    ),
]
STATE_NAMES: Sequence[str] = ("new", "chunked_prefill", "running", "preempted", "recovering", "finished")
