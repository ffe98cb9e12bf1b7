"""Mistakes about the order in which chunks leave a full pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.pool import Pool, Recency
from kvledger.lifecycle.projections.request_record import RequestRecord
from mutants.catalogue.parts import wrapped
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import Walks, Worlds

CROWDED = Worlds(num_slots=12, connector=(("chunk_size", 16),))
WALKS = Walks(num_steps=400, chunks_in_blocks=((16, 16),), options=(("save_tails", False),))
BY_USE_ALONE = Walks(
    num_steps=400,
    chunks_in_blocks=((16, 16),),
    options=(("save_tails", False), ("keep_for_preempted", False)),
)


def unused_by(touch: Touch, fold: str) -> Patch:
    """The fold of an event that should make a request's chunks the youngest, and does not."""

    def folded(original: Any, pool: Pool, event: e.Event, sequence: int, subject: Any) -> None:
        def renew(record: RequestRecord | None, num_chunks: int) -> None:
            if record is not None and any(key in pool.state.by_age for key in record.keys[:num_chunks]):
                touch()

        pool._renew = renew  # type: ignore[method-assign]
        original(pool, event, sequence, subject)
        del pool._renew

    return wrapped(Pool, fold, folded)


@mutant("EVICTION_ORDER", scene=CROWDED)
def youngest_evicted_first(touch: Touch) -> Sequence[Patch]:
    """The most recently used chunk is evicted first."""

    def oldest_first(_original: Any, pool: Pool) -> Sequence[bytes]:
        keys = list(pool.state.by_age)
        if len(keys) > 1:
            touch()
        return keys[::-1]

    return [wrapped(Pool, "oldest_first", oldest_first)]


@mutant("EVICTION_ORDER", scene=CROWDED)
def evicted_in_order_of_their_keys(touch: Touch) -> Sequence[Patch]:
    """Chunks are evicted in the order of their keys, as if they were in a sorted map."""

    def oldest_first(_original: Any, pool: Pool) -> Sequence[bytes]:
        keys = list(pool.state.by_age)
        if keys != sorted(keys):
            touch()
        return sorted(keys)

    return [wrapped(Pool, "oldest_first", oldest_first)]


@mutant("EVICTION_ORDER", scene=CROWDED)
def first_saved_first_evicted(touch: Touch) -> Sequence[Patch]:
    """Chunks are evicted in the order in which they were saved, however often they are used."""

    def touch_prefix(_original: Any, recency: Recency, _ordinal: int, keys: list[bytes]) -> None:
        if any(key in recency for key in keys):
            touch()

    return [wrapped(Recency, "touch_prefix", touch_prefix)]


@mutant("EVICTION_ORDER", scene=CROWDED)
def load_is_no_use(touch: Touch) -> Sequence[Patch]:
    """A load leaves the chunks that it reads as old as they were."""
    return [unused_by(touch, "_load_issued")]


@mutant("EVICTION_ORDER", scene=BY_USE_ALONE)
def preemption_is_no_use(touch: Touch) -> Sequence[Patch]:
    """A preemption leaves the chunks of its request as old as they were."""
    return [unused_by(touch, "_preempted")]


@mutant("EVICTION_ORDER", scene=CROWDED)
def end_is_no_use(touch: Touch) -> Sequence[Patch]:
    """The end of a request leaves its chunks as old as they were."""
    return [unused_by(touch, "_finished")]


@mutant("EVICTION_ORDER", scene=CROWDED)
def growing_prefix_ages(touch: Touch) -> Sequence[Patch]:
    """The beginning of a request that grows gets older than what others saved meanwhile."""
    return [unused_by(touch, "_save_completed")]


@mutant("EVICTION_ORDER", scene=WALKS)
def no_longer_waited_for_is_oldest(touch: Touch) -> Sequence[Patch]:
    """Chunks that a preempted request had waited for are evicted first as soon as it has blocks again."""

    def no_longer_want(original: Any, pool: Pool, record: RequestRecord) -> None:
        keys = record.wanted
        original(pool, record)
        by_age = pool.state.by_age
        by_age._take_up(0)
        for key in keys:
            if key in by_age:
                touch()
                by_age._order.move_to_end(key, last=False)

    return [wrapped(Pool, "_no_longer_want", no_longer_want)]


@mutant("EVICTION_ORDER", scene=CROWDED)
def beginning_evicted_before_its_end(touch: Touch) -> Sequence[Patch]:
    """Of a prompt the first chunk is evicted first, and what is left of it cannot be found any more."""

    def take_up(_original: Any, recency: Recency, num_left: int) -> None:
        waiting = recency._waiting
        while waiting and (not num_left or recency._num_waiting > num_left):
            keys = waiting.popleft()
            present = [key for key in keys if key in recency]
            if len(present) > 1:
                touch()
            for key in present:
                recency._order.move_to_end(key)
            if isinstance(keys, list):
                recency._num_waiting -= len(keys)
                keys.clear()
        recency._prefix_of = {ordinal: keys for ordinal, keys in recency._prefix_of.items() if keys}

    return [wrapped(Recency, "_take_up", take_up)]


@mutant("EVICTION_ORDER", scene=WALKS)
def lookup_is_a_use(touch: Touch) -> Sequence[Patch]:
    """A lookup makes all stored chunks of its request the youngest, whether they are loaded or not."""

    def answered(original: Any, pool: Pool, event: e.LookupAnswered, sequence: int, subject: Any) -> None:
        original(pool, event, sequence, subject)
        keys = [] if subject.request is None else subject.request.keys
        if any(key in pool.state.by_age for key in keys):
            touch()
        pool._renew(subject.request, len(keys))

    return [wrapped(Pool, "_answered", answered)]
