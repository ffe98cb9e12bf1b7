"""Reads live objects of vLLM and records observations.

`RequestReader` detects changes for which vLLM calls no hook: preemptions, the next turn of a session, rollbacks, new
chunk keys, and resets of vLLM's prefix cache. It compares a live `Request` with the state computed from the log.
`StepReader` reads each `SchedulerOutput`. The readers copy values from requests, and keep no requests of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from operator import is_not
from typing import TYPE_CHECKING, Final, Protocol

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.chunk_keys import ChunkKeySource
from kvledger.adapters.vllm.trace_context import trace_parent
from kvledger.lifecycle import (
    BlocksRegion,
    RequestRecord,
    RequestState,
    Rule,
    StepEncoder,
    TrustRegion,
    raise_if_unstoppable,
)
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NULL_BLOCK

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.request import Request

    from kvledger.lifecycle import LedgerConfiguration, Projections

NUM_CHECK_BYTES: Final = 4
"""Bytes of a vLLM block hash that the log keeps for each chunk key, to check the key."""


def arrival(request: Request, ordinal: int, now_ns: int) -> e.RequestArrived:
    """Return the observation that vLLM accepted a request. `ordinal` is the number of the life that begins."""
    return e.RequestArrived(
        request.request_id,
        ordinal,
        request.num_prompt_tokens,
        now_ns,
        trace_parent(request.trace_headers),
        bool(request.skip_reading_prefix_cache),
        bool(request.cache_salt),
    )


class KeyChecks:
    """Computes check values of chunk keys: the first bytes of vLLM's own hash of a chunk's last block.

    This class finds vLLM's hashes in the request with code of its own. It must not use the code that makes keys
    (`chunk_keys`), so that a bug in that code does not occur here too.
    """

    def __init__(self, *, chunk_size: int, hash_block_size: int) -> None:
        """`chunk_size`: tokens of a chunk. `hash_block_size`: tokens that one hash in `Request.block_hashes` covers."""
        self._chunk_size = chunk_size
        self._hash_block_size = hash_block_size

    def hash_prefixes(self, request: Request, first_chunk: int, num_chunks: int) -> bytes:
        """Return the check values of `num_chunks` chunks, concatenated, with `NUM_CHECK_BYTES` bytes for each chunk.

        A chunk's check value is the first bytes of the hash of the last block that does not extend beyond the chunk.
        The check value is zeros if there is no such block, or if vLLM has no hash of the block.
        """
        hashes, block_size = request.block_hashes, self._hash_block_size
        first_end = (first_chunk + 1) * self._chunk_size
        ends = range(first_end, first_end + num_chunks * self._chunk_size, self._chunk_size)
        known_to = (len(hashes) + 1) * block_size
        none = bytes(NUM_CHECK_BYTES)
        return b"".join(
            [hashes[end // block_size - 1][:NUM_CHECK_BYTES] if block_size <= end < known_to else none for end in ends]
        )

    def are_block_hashes(self, request: Request) -> bool:
        """Whether the request's chunk keys must be vLLM's own block hashes.

        True if chunks consist of whole blocks and vLLM's hashes cover all inputs that the KV depends on. The hashes do
        not cover adapters, pooling requests and prompt embeddings (`versions.unhashed_inputs`).
        """
        others = (request.lora_request, request.pooling_params, request.prompt_embeds, request.prompt_is_token_ids)
        return self._chunk_size % self._hash_block_size == 0 and all(each is None for each in others)


class Observer(Protocol):
    """Records observations."""

    configuration: LedgerConfiguration
    projections: Projections
    messages: BoundLogger

    def now(self) -> int:
        """Return the nanoseconds since the log was opened."""

    def observe(self, event: e.Event) -> object:
        """Record an observation."""

    def hook_failed(self, hook: str, request_id: str, error: BaseException) -> None:
        """Record that reading a request failed."""


class RequestReader:
    """Reads live requests for the hooks, and records changes."""

    def __init__(
        self, journal: Observer, keys: ChunkKeySource, *, speculates: bool, zeroes_new_blocks: bool = False
    ) -> None:
        self._journal = journal
        self._projections = journal.projections
        self._tracker = journal.projections.tracker
        self._chunk_size = journal.configuration.chunk_size
        self._keys = keys
        self._checks = KeyChecks(chunk_size=self._chunk_size, hash_block_size=keys.hash_block_size)
        self._speculates = speculates
        self._uncached: set[str] = set()
        """Reasons that the log already has for not caching some request."""
        self.zeroes_new_blocks = zeroes_new_blocks
        """Whether vLLM zeroes new blocks before kvledger can save their old contents. Only the scheduler's output names
        the zeroed blocks."""
        self._pools: tuple[BlockPool, ...] = ()
        self._hashes: list[object] = []
        """For each block pool, the object in which vLLM's prefix cache finds blocks. A reset replaces this object."""
        self._is_reset_noted = False

    def bind(self, manager: KVCacheManager) -> None:
        """Keep the manager's block pools, which show resets. Called when the scheduler has created the manager."""
        self._pools = versions.block_pools(manager)
        self._hashes = [*map(versions.prefix_hashes, self._pools)]

    def take_reset(self) -> bool:
        """Whether vLLM has reset its prefix cache since the last call of this method.

        vLLM calls a hook only for a reset that also resets the connector's cache.
        """
        if self._is_reset_noted:
            self._is_reset_noted = False
            return True
        before, self._hashes = self._hashes, [*map(versions.prefix_hashes, self._pools)]
        return any(map(is_not, self._hashes, before))

    def note_reset(self) -> None:
        """Let the next `take_reset` return True. Tests by `kvledger repro` call this: they have no block manager."""
        self._is_reset_noted = True

    def reset(self, requests: Mapping[str, Request]) -> None:
        """Record that vLLM reset its own prefix cache, but not kvledger's.

        Preemptions are recorded first, so that kvledger saves the tokens of the preempted requests. Their KV is from
        before the reset, but kvledger keeps such KV.
        """
        self.preemptions(requests)
        self._journal.observe(e.PrefixCacheReset(self._journal.now()))

    def read(self, request: Request) -> None:
        """Record a preemption and new chunk keys of the request, before a hook records its own observation."""
        record = self._tracker.get(request.request_id)
        if record is not None and request.num_preemptions > record.num_preemptions:
            self.preemption(request)
        self.keys(request)

    def keys(self, request: Request) -> None:
        """Record the keys of all whole chunks of the request that have no recorded key yet.

        If the key source raises, the request is quarantined, and the source is not called for it again.
        """
        record = self._tracker.get(request.request_id)
        if record is None or record.trust is TrustRegion.QUARANTINED:
            return
        known = record.keys
        num_known = len(known)
        if (num_known + 1) * self._chunk_size > request.num_tokens:
            return
        try:
            keys = self._keys.keys(request, num_known, known[-1] if known else None)
        except BaseException as error:  # noqa: BLE001 -- read from live objects of vLLM
            raise_if_unstoppable(error)
            self._journal.hook_failed("chunk_keys", request.request_id, error)
            return
        if keys:
            self._observe_keys(request, num_known, keys)
        elif not num_known:
            self._note_uncached(request)

    def _observe_keys(self, request: Request, first_chunk: int, keys: tuple[bytes, ...]) -> None:
        try:
            prefixes = self._checks.hash_prefixes(request, first_chunk, len(keys))
            are_block_hashes = self._checks.are_block_hashes(request)
        except BaseException as error:  # noqa: BLE001 -- read from live objects of vLLM; see `keys`
            raise_if_unstoppable(error)
            self._journal.hook_failed("chunk_keys", request.request_id, error)
            return
        self._journal.observe(e.ChunkKeysObserved(request.request_id, first_chunk, keys, prefixes, are_block_hashes))

    def _note_uncached(self, request: Request) -> None:
        """Record why a request is not cached, once for each reason."""
        reason = self._keys.why_uncached(request)
        if reason and reason not in self._uncached:
            self._uncached.add(reason)
            self._journal.messages.warning("a request is not cached", request_id=request.request_id, reason=reason)
            self._journal.observe(e.LogNote(f"{request.request_id} is not cached: {reason}", self._journal.now()))

    def preemption(self, request: Request, overwritten: frozenset[int] | None = None) -> None:
        """Record a preemption of the request, if `request.num_preemptions` has grown.

        Normally `build_connector_meta` of the same step calls this. After
        `reset_prefix_cache(reset_running_requests=True)`, a lookup calls this before `build_connector_meta` does.
        `overwritten` are the blocks that the worker zeroes before kvledger can copy them; None if these are not known
        yet.
        """
        record = self._tracker.get(request.request_id)
        if record is None or request.num_preemptions <= record.num_preemptions:
            return
        self.keys(request)
        blocks_zeroed = self.zeroes_new_blocks
        if overwritten is not None:
            blocks_zeroed = not overwritten.isdisjoint(record.block_ids or ())
        num_settled_tokens = max(0, self.num_written_tokens(request, self._tracker.num_computed_tokens(record)))
        self._journal.observe(
            e.RequestPreempted(
                request.request_id,
                num_settled_tokens,
                request.num_tokens,
                self._journal.now(),
                blocks_zeroed,
                request.num_in_flight_tokens,
            )
        )

    def preemptions(self, requests: Mapping[str, Request]) -> None:
        """Record the preemptions of a reset, which preempts every running request and calls no hook.

        vLLM may reuse the blocks of these requests before it looks the requests up again, so the preemptions are
        recorded here. After a reset, no request runs until the next step. If a request runs, there was no reset, and
        nothing is recorded (`v1/core/sched/scheduler.py`, reset_prefix_cache, 0.32).
        """
        preempted = []
        for record in self._tracker:
            request = requests.get(record.request_id)
            if request is None or record.blocks is BlocksRegion.NONE:
                continue
            if versions.is_running(request):
                return
            preempted.append(request)
        for request in preempted:
            self.preemption(request)

    def preemptions_of_step(self, scheduler_output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Record the preemptions that the scheduler's output of a step names."""
        for request_id in versions.preempted_request_ids(scheduler_output):
            request = requests.get(request_id)
            if request is not None:
                self.preemption(request, versions.blocks_to_zero(scheduler_output))

    def next_turn(self, request: Request) -> None:
        """Record the next turn of a streaming session, in which the request's tokens change and its blocks stay."""
        num_computed_tokens = request.num_computed_tokens
        self._journal.observe(
            e.SessionContinued(
                request.request_id,
                num_computed_tokens,
                request.num_tokens,
                request.num_prompt_tokens,
                self._journal.now(),
            )
        )
        # vLLM dropped the last sampled token and appended others; earlier keys stay valid.
        first_chunk = num_computed_tokens // self._chunk_size
        record = self._tracker.get(request.request_id)
        known: Sequence[bytes] = () if record is None else record.keys
        if first_chunk <= len(known):
            parent = known[first_chunk - 1] if first_chunk else None
            keys = self._keys.keys(request, first_chunk, parent)
            self._observe_keys(request, first_chunk, keys)

    def load_errors(self, block_ids: Iterable[int], requests: Iterable[Request]) -> None:
        """Record blocks that no load filled, and the rollbacks that the scheduler made because of them."""
        self._journal.observe(e.LoadErrorsObserved(tuple(sorted(block_ids)), self._journal.now()))
        for request in requests:
            record = self._tracker.get(request.request_id)
            if record is None or self._speculates:
                continue
            if request.num_computed_tokens < self._tracker.num_computed_tokens(record):
                self._journal.observe(
                    e.TokensRolledBack(request.request_id, request.num_computed_tokens, self._journal.now())
                )

    def block_table(self, scheduler_output: SchedulerOutput, ordinal: int, added: Sequence[int]) -> None:
        """Compare a request's block table in the log with the scheduler's, before a save of the request.

        If they differ, record the scheduler's table. `added` are the blocks that this step adds, which are not in the
        log yet.
        """
        record = self._tracker.of(ordinal)
        if record is None:
            return
        table = versions.scheduler_block_table(scheduler_output, record.request_id)
        if table is None:
            return
        held = record.block_ids or ()
        if not self._agree([*held, *added], list(table)):
            self._journal.messages.warning(
                "the log's block table differs from the scheduler's, which kvledger uses; report this with the log",
                rule=Rule.TABLE_EQ.value,
                request_id=record.request_id,
                num_blocks_folded=len(held) + len(added),
                num_blocks=len(table),
            )
            observed = tuple(table[: len(table) - len(added)])
            self._journal.observe(e.BlockTableObserved(record.request_id, observed, self._journal.now()))

    def _agree(self, folded: Sequence[int], table: Sequence[int]) -> bool:
        """Whether the tables are equal, except for blocks outside a window.

        vLLM replaces these blocks by the null block and calls no hook for that.
        """
        windows = self._projections.geometry.windows
        if not windows.has_any:
            return folded == table
        return len(folded) == len(table) and all(
            block == known or (block == NULL_BLOCK and windows.sizes[page % windows.num_groups])
            for page, (known, block) in enumerate(zip(folded, table, strict=True))
        )

    def num_written_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many tokens of the request have their KV written when the next step's `handle_preemptions` runs.

        That hook runs after every step in flight, so the tokens of these steps count. Until then, vLLM lets no step
        overwrite the freed blocks. Tokens that are not sampled yet do not count, because they have no key. With
        speculation, tokens in flight do not count either, because drafts may be rejected.
        """
        if self._speculates:
            return max(0, min(num_computed_tokens, request.num_tokens - 1) - request.num_in_flight_tokens)
        return min(num_computed_tokens, request.num_tokens)


class StepReader:
    """Turns each scheduler output into one observation of the step.

    A steady request, which decodes one more token as expected, needs no entry in the observation.
    """

    def __init__(
        self,
        projections: Projections,
        requests: dict[str, Request],
        sync_keys: Callable[[Request], None] | None,
        observe: Callable[[e.Event], object],
        *,
        speculates: bool,
    ) -> None:
        """`sync_keys` records the keys of a request's whole chunks. If it is None, no settled tokens are recorded."""
        self._projections = projections
        self._tracker = projections.tracker
        self._encoder = StepEncoder(projections)
        self._requests = requests
        self._sync_keys = sync_keys
        self._observe = observe
        self._speculates = speculates
        self._step = 0
        self._due: dict[int, list[str]] = {}
        self._processed: dict[str, tuple[int, int]] = {}
        """Request id → (settled tokens, tokens in flight) in the latest step, if the model has windows. In this step,
        vLLM freed the blocks outside windows up to these settled tokens."""
        self._processed_before: dict[str, tuple[int, int]] = {}
        self._time_ns = 0

    def read(self, scheduler_output: SchedulerOutput, time_ns: int) -> e.StepScheduled:
        """Return the observation of this step. It leaves out requests that are not in the log.

        Without speculation, this method first records the rollback of each request that has fewer computed tokens than
        before.
        """
        self._time_ns = time_ns
        self._processed_before, self._processed = self._processed, {}
        num_scheduled = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        # Resumed requests are among the cached (model runner V1) or the new ones (V2). Either way, the allocation has
        # replaced their whole table.
        new = [(data.req_id, data.num_computed_tokens) for data in scheduler_output.scheduled_new_reqs]
        unexpected = self._unexpected(scheduler_output)
        advanced = self._advanced([*new, *unexpected], num_scheduled)
        num_expected = len(cached.req_ids) - len(unexpected)
        is_complete = len(self._tracker.computed.decoding) == num_expected
        event = e.StepScheduled(
            step=self._step,
            num_scheduled_tokens=scheduler_output.total_num_scheduled_tokens,
            advanced=tuple(advanced),
            paused=() if is_complete else self._encoder.paused(num_scheduled),
            extended=tuple(self._extended(cached)),
            settled=self._settled(advanced),
            time_ns=time_ns,
        )
        self._step += 1
        return event

    def _unexpected(self, scheduler_output: SchedulerOutput) -> list[tuple[str, int]]:
        """Return (id, computed tokens) of each scheduled request that is neither new nor steady."""
        cached, num_scheduled = scheduler_output.scheduled_cached_reqs, scheduler_output.num_scheduled_tokens
        rows = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        unexpected = self._tracker.computed.unexpected(rows, self._tracker.get)
        # Each request gets at least one token, so the total shows whether an expected request gets more, with drafts.
        num_others = sum([num_scheduled[data.req_id] for data in scheduler_output.scheduled_new_reqs])
        num_others += sum([num_scheduled[request_id] for request_id, _ in unexpected])
        if scheduler_output.total_num_scheduled_tokens - num_others != len(cached.req_ids) - len(unexpected):
            found = dict(unexpected)
            rows = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            unexpected = [row for row in rows if row[0] in found or num_scheduled[row[0]] != 1]
        return unexpected

    def _extended(self, cached: CachedRequestData) -> list[tuple[int, tuple[int, ...]]]:
        """Return (ordinal, new blocks) of each request whose block table has grown."""
        extended = []
        entries = cached.new_block_ids
        for request_id, entry in compress(zip(cached.req_ids, entries, strict=True), entries):
            record, block_ids = self._tracker.get(request_id), versions.new_block_ids(entry)
            if record is not None and block_ids and request_id not in cached.resumed_req_ids:
                extended.append((record.ordinal, tuple(block_ids)))
        return extended

    def _advanced(
        self, counts: Sequence[tuple[str, int]], num_scheduled: Mapping[str, int]
    ) -> list[tuple[int, int, int, int]]:
        """Return (ordinal, computed tokens, scheduled tokens, known tokens) of each request in `counts`.

        Without speculation, records rollbacks first. `counts` is (request id, computed tokens) of each request.
        """
        record_of, request_of = self._tracker.get, self._requests.get
        for request_id, count in () if self._speculates else counts:
            record = record_of(request_id)
            if record is None or request_id not in self._requests:
                continue
            if count < self._tracker.num_computed_tokens(record):
                self._observe(e.TokensRolledBack(request_id, count, self._time_ns))
        return [
            (record.ordinal, count, num_scheduled[request_id], request.num_tokens)
            for request_id, count in counts
            if (record := record_of(request_id)) is not None and (request := request_of(request_id)) is not None
        ]

    # --- settled chunks ----------------------------------------------------------------------

    def _settled(self, advanced: Sequence[tuple[int, int, int, int]]) -> tuple[e.SettledTokens, ...]:
        """Return the settled tokens of each request that has enough new ones to save; record the keys of its chunks.

        The step in which a decoding request settles its next chunks is known in advance. The request is checked only in
        that step.
        """
        if self._sync_keys is None:
            return ()
        now = self._tracker.num_steps
        has_windows = self._projections.geometry.windows.has_any
        settled: list[e.SettledTokens] = []
        for ordinal, num_computed_tokens, num_tokens, _ in advanced:
            record = self._tracker.of(ordinal)
            if record is None:
                continue
            threshold = self._tracker.save_threshold(record, record.num_chunks_handled)
            if num_tokens > 1 and num_computed_tokens < threshold and not has_windows:
                continue  # with drafts, nearly all
            threshold = self._settle(settled, record, num_computed_tokens)
            if num_tokens == 1:
                self._schedule(record, now + 1, num_computed_tokens + 1, threshold)
        for request_id in self._due.pop(now, ()):
            record = self._tracker.get(request_id)
            if record is not None and record.ordinal in self._tracker.computed.decoding:
                num_computed_tokens = self._tracker.num_computed_tokens(record)
                threshold = self._settle(settled, record, num_computed_tokens)
                self._schedule(record, now + 1, num_computed_tokens + 1, threshold)
        return tuple(dict.fromkeys(settled))

    def _schedule(self, record: RequestRecord, next_step: int, num_computed_tokens: int, threshold: int) -> None:
        if record.request_id in self._requests:
            # If a token is in flight by then, the request is checked once more.
            due = next_step + max(0, threshold - num_computed_tokens)
            self._due.setdefault(due, []).append(record.request_id)

    def _settle(self, settled: list[e.SettledTokens], record: RequestRecord, num_computed_tokens: int) -> int:
        """Append the request's settled tokens to `settled`, if they are enough to save.

        Returns the number of settled tokens at which the request must be checked again.
        """
        threshold = self._tracker.save_threshold(record, record.num_chunks_handled)
        request = self._requests.get(record.request_id)
        if request is None or record.trust is TrustRegion.QUARANTINED:
            return threshold
        num_in_flight_tokens = request.num_in_flight_tokens
        num_settled_tokens = num_computed_tokens - num_in_flight_tokens
        if self._projections.geometry.windows.has_any:
            self._processed[record.request_id] = num_settled_tokens, num_in_flight_tokens
        if num_settled_tokens < threshold:
            return threshold
        if self._sync_keys is not None:
            self._sync_keys(request)
        entry = self._encoder.settled(record, num_settled_tokens, num_in_flight_tokens)
        if entry is None:
            return threshold
        self._window_left(record, self._processed_before.get(record.request_id), self._time_ns)
        settled.append(entry)
        geometry = self._projections.geometry
        # The entry does not count until a load has arrived. With windows, check in the next step what they leave.
        if record.blocks is BlocksRegion.LOADING or geometry.windows.has_any:
            return threshold
        return self._tracker.save_threshold(record, geometry.num_chunks_in(entry.num_settled_tokens))

    def window_left_at_end(self, record: RequestRecord, time_ns: int) -> None:
        """Record up to which token the last step freed blocks outside windows.

        Call this before recording that the request has finished.
        """
        self._window_left(record, self._processed.get(record.request_id), time_ns)

    def _window_left(self, record: RequestRecord, processed: tuple[int, int] | None, time_ns: int) -> None:
        """Record up to which token blocks outside windows were freed, for a request that the last step scheduled.

        Nothing is recorded if the last step skipped the request. vLLM may have freed more of its blocks in that step,
        before it found that there was no room for the request.
        """
        computing = record.state in {RequestState.CHUNKED_PREFILL, RequestState.RUNNING}
        if processed is not None and computing:
            num_settled_tokens, num_in_flight_tokens = processed
            self._observe(e.WindowLeft(record.request_id, num_settled_tokens, time_ns, num_in_flight_tokens))
