"""A visitor of the reader that estimates the tokens that pools of other sizes would have loaded.

A prefix is used when its request is admitted, when a save of the prefix completes, and when the request is preempted or
finishes. Each use makes all chunks of the prefix the youngest, so no chunk is younger than the chunk before it. A pool
of some size would therefore have the first chunks of a prefix, up to the first chunk that is too old for that size.

The estimate leaves out other effects of a different pool: the order of admissions, and the contents of vLLM's prefix
cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import attrs

from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.pool_sizes.estimate import FACTORS, Estimate, PoolSize
from kvledger.adapters.tools.pool_sizes.lru_stack import MAX_KEYS, LruStack
from kvledger.lifecycle import Core, LedgerConfiguration, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import MissReason
from kvledger.lifecycle.reader import Life, Model, Visitor

_NOT_ASKED = frozenset({MissReason.QUARANTINED, MissReason.LOAD_FAILED, MissReason.SLOWER, MissReason.RECORDED})
"""Reasons why a request is offered nothing, whatever is in the pool."""


@attrs.define
class _Sample:
    """The chunks of a prompt that are in the sample."""

    chain: Sequence[bytes]
    """All keys of the prompt; the list only grows."""
    mask: int
    num_seen: int = 0
    """Number of keys in `chain` when the sample was last updated."""
    chunks: list[int] = attrs.field(factory=list)
    keys: list[bytes] = attrs.field(factory=list)


def of_log(model: Model, core: Core, selection: Selection) -> tuple[PoolSizes | None, str]:
    """Return the visitor for the selected part of a log, or None and the reason why there can be no estimate."""
    why_not = _why_not(model.configuration, core, selection)
    return (None, why_not) if why_not else (PoolSizes(model, first_sequence=selection.first_sequence), "")


def _why_not(configuration: LedgerConfiguration, core: Core, selection: Selection) -> str:
    if selection.request_id is not None:
        return "only all requests together have an estimate"
    if any(extension.declaration().replaces for extension in core.extensions):
        return "the size of the recorded connector's pool is not in the log"
    if any(configuration.windows):
        return "a model with sliding windows does not load whole prefixes"
    if configuration.chunk_size < configuration.block_size:
        return "chunks that are shorter than a block share slots"
    return ""


class PoolSizes(Visitor[Model]):
    """Counts the tokens that each pool size would have loaded for requests admitted at or after `first_sequence`.

    Args:
        model: the reader's model.
        first_sequence: events before this one change the simulated pools, but their tokens are not counted.
        max_keys: largest number of keys to keep.
    """

    needs = ("lives", "copies", "answers")

    def __init__(self, model: Model, *, first_sequence: int = 0, max_keys: int = MAX_KEYS) -> None:
        super().__init__(model)
        self._first_sequence = first_sequence
        self._configuration = configuration = model.configuration
        pages = configuration.pages_per_chunk
        self._num_slots = [max(pages, round(factor * configuration.num_slots)) for factor in FACTORS]
        self._capacities = [num_slots // pages for num_slots in self._num_slots]
        self._stack = LruStack(self._capacities[-1], max_keys)
        self._samples: dict[str, _Sample] = {}
        """Request id → sample of its present life."""
        self._kept_for: set[str] = set()
        """Preempted requests whose chunks stay in the pool until they are admitted again."""
        self._lost_at = 0
        self._num_asked = self._num_loaded = self._num_certain = 0
        self._num_sampled = 0
        """Needed tokens in sampled chunks, times `one_of`."""
        self._num_found = [0] * len(FACTORS)
        """For each pool size, the sampled tokens that a pool of this size would have had, times `one_of`."""

    def estimate(self) -> Estimate:
        """Return the estimate so far."""
        num_unsure = self._num_asked - self._num_certain
        scale = num_unsure / self._num_sampled if self._num_sampled else 0.0
        sizes = tuple(
            PoolSize(factor, num_slots, self._num_certain + round(scale * num_found))
            for factor, num_slots, num_found in zip(FACTORS, self._num_slots, self._num_found, strict=True)
        )
        note = f"chunks that were saved before event {self._lost_at} are not known" if self._lost_at else ""
        return Estimate(sizes, self._num_asked, self._num_loaded, self._stack.one_of, note=note)

    def lost(self, _first_sequence: int, last_sequence: int) -> None:
        """Forget the contents of the pool, which are unknown now."""
        self._lost_at = last_sequence + 1
        self._forget_all()

    def ended(self, life: Life) -> None:
        """Forget the life's keys."""
        self._samples.pop(life.request_id, None)
        self._kept_for.discard(life.request_id)

    def _forget_all(self) -> None:
        self._stack.clear()
        self._kept_for.clear()

    # --- what is asked ---------------------------------------------------------------------------

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        life, allocation = self.moment.life, self.model.answers.allocation(event.request_id)
        if life is None or allocation is None or allocation.answer is None or self.moment.is_refused:
            return
        sample = self._sample_of(life)
        if self.moment.sequence >= self._first_sequence:
            self._count(life, sample, allocation.answer.event, event.num_external_tokens)
        self._kept_for.discard(event.request_id)
        self._stack.use(sample.keys)

    def _count(self, life: Life, sample: _Sample, answer: e.LookupAnswered, num_claimed: int) -> None:
        begin, end = answer.num_computed_tokens, self._end_of_load(life, answer)
        num_claimed = max(0, min(num_claimed, answer.num_external_tokens))
        # A pool of any size returns a tail, and the chunks that are kept for a preempted request.
        is_kept = life.request_id in self._kept_for
        num_certain = num_claimed if is_kept else max(0, begin + num_claimed - max(begin, end))
        begin += num_certain if is_kept else 0
        self._num_certain += num_certain
        self._num_asked += num_certain + max(0, end - begin)
        if begin >= end:
            return
        size, chunks, weight = self._configuration.chunk_size, sample.chunks, self._stack.one_of
        first, last = bisect_left(chunks, begin // size), bisect_left(chunks, -(-end // size))
        if first == last:
            return
        at_front = max(0, begin - chunks[first] * size)
        at_back = max(0, (chunks[last - 1] + 1) * size - end)
        self._num_sampled += weight * ((last - first) * size - at_front - at_back)
        runs = list(self._stack.runs(sample.keys[:last]))
        for place, capacity in enumerate(self._capacities):
            num_held = _num_held(runs, (capacity - 1) // weight + 1)
            if num_held > first:
                missing = at_front + (at_back if num_held == last else 0)
                self._num_found[place] += weight * ((num_held - first) * size - missing)

    def _end_of_load(self, life: Life, answer: e.LookupAnswered) -> int:
        """Return the number of tokens up to which a pool with all chunks would load; 0 if it would load nothing."""
        configuration = self._configuration
        if answer.miss_reason in _NOT_ASKED or answer.num_computed_tokens % configuration.block_size:
            return 0
        return min(len(life.keys) * configuration.chunk_size, answer.num_tokens - 1)

    @on(e.LoadCompleted)
    def _loaded(self, _event: e.LoadCompleted) -> None:
        load = self.model.copies.current
        if load is not None and load.is_load and self.moment.sequence >= self._first_sequence:
            self._num_loaded += load.num_tokens

    # --- what is used ----------------------------------------------------------------------------

    @on(e.SaveCompleted)
    def _saved(self, _event: e.SaveCompleted) -> None:
        save, copies = self.model.copies.current, self.model.copies
        if save is None or save.is_load or save.epoch != copies.epoch or not save.keys:
            return
        life = self.model.lives.of(save.ordinal)
        if life is not None and life.keys is save.prefix.keys:
            sample = self._sample_of(life)
        else:
            sample = self._grown(_Sample(save.prefix.keys, self._stack.mask))
        end = bisect_left(sample.chunks, save.prefix.num_chunks)
        first = bisect_left(sample.chunks, min(save.chunks))
        is_run = len(save.keys) == save.prefix.num_chunks - min(save.chunks)
        self._stack.use(sample.keys[:end], new=sample.keys[first:end] if is_run else save.keys)

    @on(e.SaveDeclined)
    def _declined(self, event: e.SaveDeclined) -> None:
        """Add the chunks that were not saved for lack of room, because a larger pool would have had room."""
        life = self.model.lives.of(event.ordinal)
        if life is not None and event.reason == e.POOL_FULL:
            end = event.first_chunk + event.num_chunks
            sample = self._sample_of(life)
            keys = sample.keys[: bisect_left(sample.chunks, end)]
            self._stack.use(keys, new=life.keys[event.first_chunk : end])

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        if self.moment.life is not None and not self.moment.is_refused:
            self._stack.use(self._sample_of(self.moment.life).keys)
            if self._configuration.keep_for_preempted:
                self._kept_for.add(event.request_id)

    @on(e.RequestFinished)
    def _finished(self, _event: e.RequestFinished) -> None:
        if self.moment.life is not None and not self.moment.is_refused:
            self._stack.use(self._sample_of(self.moment.life).keys)

    @on(e.ChunksTainted)
    def _tainted(self, event: e.ChunksTainted) -> None:
        self._stack.forget(event.keys)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._forget_all()

    # --- samples ---------------------------------------------------------------------------------

    def _sample_of(self, life: Life) -> _Sample:
        sample = self._samples.get(life.request_id)
        if sample is None or sample.chain is not life.keys:
            sample = self._samples[life.request_id] = _Sample(life.keys, self._stack.mask)
        return self._grown(sample)

    def _grown(self, sample: _Sample) -> _Sample:
        """Add newly observed keys to a sample, remove keys that `LruStack` no longer samples, and return the sample."""
        stack, chain = self._stack, sample.chain
        if sample.mask != stack.mask:
            kept = stack.kept_places(sample.keys)
            sample.chunks = [sample.chunks[place] for place in kept]
            sample.keys = [sample.keys[place] for place in kept]
            sample.mask = stack.mask
        if sample.num_seen < len(chain):
            seen, sample.num_seen = sample.num_seen, len(chain)
            chunks = [seen + place for place in stack.kept_places(chain[seen:])]
            sample.chunks += chunks
            sample.keys += map(chain.__getitem__, chunks)
        return sample


def _num_held(runs: Iterable[tuple[int, int]], capacity: int) -> int:
    """Return how many of the first keys of these runs would be in a pool with room for `capacity` sampled keys."""
    num_held = 0
    for num_above, num_keys in runs:
        num_fitting = min(num_keys, capacity - num_above)
        if num_fitting <= 0:
            break
        num_held += num_fitting
    return num_held
