"""Which chunks somebody relies on: promised to the scheduler, or waited for by who was preempted. The audit's own."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model.lives import Lives
from kvledger.lifecycle.audit.model.moment import Moment, on

if TYPE_CHECKING:
    from kvledger.lifecycle.audit.model.start import Start


class Promise(msgspec.Struct, frozen=True):
    """The first chunks of one request."""

    sequence: int
    """Of the event that promised them, or since which they are waited for; 0 where that was before the audit began."""
    num_chunks: int
    last_key: bytes
    """It hashes all before it, so an equal last key means equal keys."""
    keys: frozenset[bytes]


def _promise(sequence: int, keys: Sequence[bytes]) -> Promise:
    return Promise(sequence, len(keys), keys[-1], frozenset(keys))


class Promises:
    """Request id -> what the pending answer promised it, and what it will come back for.

    A promise lasts from the answer to the next one, an allocation, a preemption or the end. What a request had computed
    is waited for from its preemption until it has blocks again or ends. A reset ends all. To be folded while the lives
    that are over are still known.
    """

    def __init__(self, lives: Lives, chunk_size: int, moment: Moment, *, keep_for_preempted: bool) -> None:
        self._lives = lives
        self._moment = moment
        self._chunk_size = chunk_size
        self._keeps = keep_for_preempted
        self._promised: dict[str, Promise] = {}
        self._waited_for: dict[str, Promise] = {}
        # The dicts' own methods. So the dicts are changed, never replaced.
        self.to: Callable[[str], Promise | None] = self._promised.get
        """What the request was promised."""

    def promised(self, key: bytes) -> Iterator[tuple[str, Promise]]:
        """To whom the chunk is promised."""
        return ((whom, promise) for whom, promise in self._promised.items() if key in promise.keys)

    def waited_for(self, key: bytes) -> Iterator[tuple[str, Promise]]:
        """Who waits for the chunk."""
        return ((who, promise) for who, promise in self._waited_for.items() if key in promise.keys)

    def is_any_waited_for(self) -> bool:
        """Whether anybody waits for anything."""
        return bool(self._waited_for)

    def relied_on(self) -> Container[bytes]:
        """Every chunk that is promised or waited for."""
        return frozenset().union(
            *(promise.keys for promise in self._promised.values()),
            *(promise.keys for promise in self._waited_for.values()),
        )

    def begin(self, start: Start) -> None:
        """Take over what was promised and is waited for where an audit starts in the middle of a log."""
        self._promised.update((each, _promise(0, keys)) for each, keys in start.promised.items() if keys)
        self._waited_for.update((each, _promise(0, keys)) for each, keys in start.waited_for.items() if keys)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        request_id = event.request_id
        life = self._lives.in_generation(event)
        if life is None:
            return
        if not event.num_external_tokens:
            if self._promised:
                self._promised.pop(request_id, None)
            return
        keys = life.keys
        end_token = event.num_computed_tokens + event.num_external_tokens
        num_chunks = min(-(-end_token // self._chunk_size), len(keys))
        if num_chunks <= 0:
            self._promised.pop(request_id, None)
            return
        before = self._promised.get(request_id)
        if before is None or before.num_chunks != num_chunks or before.last_key != keys[num_chunks - 1]:
            self._promised[request_id] = _promise(self._moment.sequence, keys[:num_chunks])

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        self._over(event)
        life = self._lives.get(event.request_id)
        keys = [] if life is None or not self._keeps else life.keys[: event.num_intact_tokens // self._chunk_size]
        if keys:
            self._waited_for[event.request_id] = _promise(self._moment.sequence, keys)

    @on(e.BlocksAllocated, e.RequestFinished, e.RequestArrived)
    def _over(self, event: e.RequestEvent) -> None:
        self._promised.pop(event.request_id, None)
        self._waited_for.pop(event.request_id, None)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._promised.clear()
        self._waited_for.clear()
