"""Mutants that evict chunks from a full pool in the wrong order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.forest import Forest
from kvledger.lifecycle.projections.pool import Pool
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
    """Patch that keeps one event from moving the request's chunks to the end of the eviction order."""

    def folded(original: Any, pool: Pool, event: e.Event, sequence: int, subject: Any) -> None:
        def use(keys: Sequence[bytes]) -> None:
            key = pool.forest.deepest(keys, len(keys))
            if key is not None and key in pool.state.queue.order:
                touch()

        pool.forest.use = use  # type: ignore[method-assign]
        original(pool, event, sequence, subject)
        del pool.forest.use

    return wrapped(Pool, fold, folded)


def in_another_order(touch: Touch, change: Callable[[list[bytes], Forest], Iterable[bytes]]) -> Patch:
    """Patch that evicts chunks in the order that `change` returns."""

    def leaving(original: Any, forest: Forest, *arguments: Any) -> Iterator[bytes]:
        order = list(forest._order)
        changed = list(change(order, forest))
        if changed != order:
            touch()
        forest._order = OrderedDict.fromkeys(changed)
        leaving = list(original(forest, *arguments))
        forest._order = OrderedDict.fromkeys(order)
        return iter(leaving)

    return wrapped(Forest, "leaving", leaving)


@mutant("EVICTION_ORDER", scene=CROWDED)
def youngest_evicted_first(touch: Touch) -> Sequence[Patch]:
    """The most recently used chunk is evicted first."""
    return [in_another_order(touch, lambda order, _forest: order[::-1])]


@mutant("EVICTION_ORDER", scene=CROWDED)
def evicted_in_order_of_their_keys(touch: Touch) -> Sequence[Patch]:
    """Chunks are evicted in the order of their keys, as if the pool were a sorted map."""
    return [in_another_order(touch, lambda order, _forest: sorted(order))]


@mutant("EVICTION_ORDER", scene=CROWDED)
def first_saved_first_evicted(touch: Touch) -> Sequence[Patch]:
    """Chunks are evicted in the order in which they were saved, however often they are used."""

    def as_saved(order: list[bytes], forest: Forest) -> Iterable[bytes]:
        saved = [key for key in forest._committed if key in forest._order]  # type: ignore[attr-defined]
        return [*saved, *(key for key in order if key not in forest._committed)]

    return [in_another_order(touch, as_saved)]


@mutant("EVICTION_ORDER", scene=CROWDED)
def load_is_no_use(touch: Touch) -> Sequence[Patch]:
    """A load does not count as a use of the chunks that it reads."""

    def load_issued(original: Any, pool: Pool, event: e.LoadIssued, sequence: int, subject: Any) -> None:
        pool.__dict__.setdefault("older", {})[event.job_id] = frozenset(pool.state.queue)
        original(pool, event, sequence, subject)

    def load_settled(original: Any, pool: Pool, event: Any, sequence: int, subject: Any) -> None:
        key, older = pool.state.copying.get(event.job_id), pool.__dict__["older"].pop(event.job_id, frozenset())
        original(pool, event, sequence, subject)
        order = pool.state.queue.order
        for other in list(order) if key in order else ():
            if other != key and other not in older:
                touch()
                order.move_to_end(other)

    return [wrapped(Pool, "_load_issued", load_issued), wrapped(Pool, "_load_settled", load_settled)]


@mutant("EVICTION_ORDER", scene=BY_USE_ALONE)
def preemption_is_no_use(touch: Touch) -> Sequence[Patch]:
    """A preemption does not count as a use of the request's chunks."""
    return [unused_by(touch, "_preempted")]


@mutant("EVICTION_ORDER", scene=CROWDED)
def end_is_no_use(touch: Touch) -> Sequence[Patch]:
    """The end of a request does not count as a use of its chunks."""
    return [unused_by(touch, "_finished")]


@mutant("EVICTION_ORDER", scene=CROWDED)
def beginning_young_when_its_end_leaves(touch: Touch) -> Sequence[Patch]:
    """Evicting a leaf counts as a use of the chunk before the leaf, so that chunk is evicted too late."""

    def remove(original: Any, forest: Forest, keys: Sequence[bytes]) -> None:
        before = frozenset(map(forest._parent_of.get, keys)).difference(forest._order)
        original(forest, keys)
        for key in [key for key in forest._order if key in before]:
            if next(reversed(forest._order)) != key:
                touch()
            forest._order.move_to_end(key)

    return [wrapped(Forest, "remove", remove)]


@mutant("EVICTION_ORDER", scene=WALKS)
def no_longer_waited_for_is_oldest(touch: Touch) -> Sequence[Patch]:
    """When a preempted request gets blocks again, the chunks that were kept for it are the first to be evicted."""

    def allocated(original: Any, pool: Pool, event: e.Event, sequence: int, subject: Any) -> None:
        key = None if subject.request is None else pool.state.wanted.get(subject.request.ordinal)
        original(pool, event, sequence, subject)
        order = pool.state.queue.order
        if key is not None and key in order and len(order) > 1:
            touch()
            order.move_to_end(key, last=False)

    return [wrapped(Pool, "_allocated", allocated)]


@mutant("EVICTION_ORDER", scene=CROWDED)
def beginning_evicted_before_its_end(touch: Touch) -> Sequence[Patch]:
    """Of a prompt's chunks, the first one is evicted before the others, so no lookup finds the others."""

    def leaving(original: Any, forest: Forest, *arguments: Any) -> Iterator[bytes]:
        leaving = list(original(forest, *arguments))
        may_leave, found = frozenset(leaving), dict[bytes, None]()
        for key in leaving:
            found |= dict.fromkeys(filter(may_leave.__contains__, forest.path(key)))
        if list(found) != leaving:
            touch()
        return iter(found)

    return [wrapped(Forest, "leaving", leaving)]


@mutant("EVICTION_ORDER", scene=CROWDED)
def what_precedes_a_save_is_evicted(touch: Touch) -> Sequence[Patch]:
    """Chunks are evicted though a save in flight adds chunks after them, so no lookup finds the saved chunks."""

    def save_issued(original: Any, pool: Pool, event: e.SaveIssued, sequence: int, subject: Any) -> None:
        def hold(_holds: Any, _holder: int, keys: Sequence[bytes], end_chunk: int) -> None:
            if pool.forest.deepest(keys, end_chunk) is not None:
                touch()

        pool._hold = hold  # type: ignore[method-assign]
        original(pool, event, sequence, subject)
        del pool._hold

    return [wrapped(Pool, "_save_issued", save_issued)]


@mutant("EVICTION_ORDER", scene=WALKS)
def lookup_is_a_use(touch: Touch) -> Sequence[Patch]:
    """A lookup counts as a use of all stored chunks of its request, whether or not they are loaded."""

    def answered(original: Any, pool: Pool, event: e.LookupAnswered, sequence: int, subject: Any) -> None:
        original(pool, event, sequence, subject)
        if subject.request is not None:
            order = list(pool.state.queue)
            pool.forest.use(subject.request.keys)
            if order != list(pool.state.queue):
                touch()

    return [wrapped(Pool, "_answered", answered)]
