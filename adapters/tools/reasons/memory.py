"""What the accounts remember of a log so far, apart from how they go on: so it can be kept and continued."""

from __future__ import annotations

import attrs
import msgspec

from kvledger.adapters.tools.reasons import chunk_history
from kvledger.adapters.tools.reasons.chunk_history import ChunkHistory
from kvledger.adapters.tools.reasons.life import Life
from kvledger.adapters.tools.reasons.lives import Lives
from kvledger.adapters.tools.reasons.sums import Sums


@attrs.define
class Load:
    """A load in flight."""

    request_id: str
    admission: int
    """The sequence of the one that it is for; 0: it is not in the log."""
    first_token: int
    num_tokens: int
    is_life_over: bool = False
    """Then what becomes of it is counted for the whole log."""


@attrs.define
class Loading:
    """What a load in flight brings, of any request."""

    request_id: str
    sequence: int
    """Of `load.issued`."""
    keys: dict[int, bytes]
    """Chunk → key, as far as the keys are known."""


class State(msgspec.Struct, forbid_unknown_fields=True):
    """Plain values that name one another: what is found by pointing is made anew from it."""

    lives: dict[str, Life] = {}
    """By request id, in the order in which they began."""
    chunks: chunk_history.State = msgspec.field(default_factory=chunk_history.State)
    ended: Sums = msgspec.field(default_factory=Sums)
    """Of all lives that are over."""
    loads: dict[int, Load] = {}
    """By job id."""
    loading: dict[int, Loading] = {}
    """Job id → load, of all requests."""
    preempted: list[str] = []
    """The requests that were preempted since the last step."""
    is_blind: bool = False
    """Events are missing, so that silence about a chunk says nothing."""


class Memory:
    """The state, and what is found in it by pointing: one object for all who fold into it."""

    def __init__(self, state: State, only: str | None, *, keeps_histories: bool) -> None:
        self.state = state
        self.lives = Lives(state.lives, only, keeps_histories=keeps_histories)
        self.chunks = ChunkHistory(state.chunks)
