"""Reads live objects of vLLM, and writes what they say as observations.

`RequestReader` finds out what has no hook: preemptions, the next turn of a session, tokens that were taken back, keys
that became known, resets of vLLM's prefix cache. vLLM changes a live `Request` and leaves it to the connector to find
out. Here that is compared with what the log has folded to. `StepReader` reads one `SchedulerOutput`. Requests are read,
never kept.

One file, though a long one: each hook reads with both, and each observation is made here from what vLLM says and what
the log has.
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
"""Bytes of each hash of vLLM's that the log holds against a chunk key."""


def arrival(request: Request, ordinal: int, now_ns: int) -> e.RequestArrived:
    """The observation that vLLM has accepted a request; `ordinal` names this life of it in the log."""
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
    """What the log holds against each chunk key: the beginning of vLLM's own hash of the chunk's last block.

    It is read from the request once more, with an index of its own. It must not know how keys are made (`chunk_keys`):
    a mistake there must not be made here, too.
    """

    def __init__(self, *, chunk_size: int, hash_block_size: int) -> None:
        """Both in tokens: of a chunk, and of one of vLLM's block hashes (`Request.block_hashes`)."""
        self._chunk_size = chunk_size
        self._hash_block_size = hash_block_size

    def hash_prefixes(self, request: Request, first_chunk: int, num_chunks: int) -> bytes:
        """The first bytes of the hash of the last block that ends within each of these chunks or before it.

        `NUM_CHECK_BYTES` for each chunk, one after the other: zeros where no block has ended, or vLLM has no hash of
        it.
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
        """Whether a key of this request has to be vLLM's hash itself: it hashes all that the KV of a chunk depends on.

        It does for chunks of whole blocks, without an adapter, a pooling request and given embeddings (see
        `versions.unhashed_inputs`).
        """
        others = (request.lora_request, request.pooling_params, request.prompt_embeds, request.prompt_is_token_ids)
        return self._chunk_size % self._hash_block_size == 0 and all(each is None for each in others)


class Observer(Protocol):
    """Who records what is noticed."""

    configuration: LedgerConfiguration
    projections: Projections
    messages: BoundLogger

    def now(self) -> int:
        """Nanoseconds since the log was opened."""

    def observe(self, event: e.Event) -> object:
        """Record an observation."""

    def hook_failed(self, hook: str, request_id: str, error: BaseException) -> None:
        """Record that something could not be read."""


class RequestReader:
    """Reads requests on behalf of the hooks."""

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
        """Reasons not to cache a request that are in the log."""
        self.zeroes_new_blocks = zeroes_new_blocks
        """Whether vLLM zeroes blocks before a copy out of them; it says which only when the step is built."""
        self._pools: tuple[BlockPool, ...] = ()
        self._hashes: list[object] = []
        """What vLLM's prefix cache finds blocks by; a reset replaces it."""
        self._is_reset_noted = False

    def bind(self, manager: KVCacheManager) -> None:
        """Called once, when the scheduler has made its block manager, which shows resets."""
        self._pools = versions.block_pools(manager)
        self._hashes = [*map(versions.prefix_hashes, self._pools)]

    def take_reset(self) -> bool:
        """Whether vLLM has reset its prefix cache since the last call. vLLM calls no hook then."""
        if self._is_reset_noted:
            self._is_reset_noted = False
            return True
        before, self._hashes = self._hashes, [*map(versions.prefix_hashes, self._pools)]
        return any(map(is_not, self._hashes, before))

    def note_reset(self) -> None:
        """Let the next `take_reset` return True. For a rerun of a log, which has no block manager."""
        self._is_reset_noted = True

    def reset(self, requests: Mapping[str, Request]) -> None:
        """Record that vLLM has reset its prefix cache and spared the connector.

        What the preempted requests had computed is saved before that is recorded: it is as old as what was saved.
        """
        self.preemptions(requests)
        self._journal.observe(e.PrefixCacheReset(self._journal.now()))

    def read(self, request: Request) -> None:
        """Record what a hook has to know of a request before it goes on: a preemption, and new keys."""
        record = self._tracker.get(request.request_id)
        if record is not None and request.num_preemptions > record.num_preemptions:
            self.preemption(request)
        self.keys(request)

    def keys(self, request: Request) -> None:
        """Make the keys of all whole chunks known.

        A key source that fails costs this request the cache, and is not asked again for it.
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
        """Record a preemption; `request.num_preemptions` is reliable.

        Normally it is noticed in the same step's `build_connector_meta`. After
        `reset_prefix_cache(reset_running_requests=True)` the request is looked up first.

        Args:
            request: read now, not kept.
            overwritten: blocks that the worker zeroes before anything of ours can run; None where nobody knows yet.
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
        """Record those of a reset, which preempts all that run, without a hook.

        Their blocks may be given away before they are looked up. Nobody runs then before the next step: the first who
        does says that there was no reset (`v1/core/sched/scheduler.py`, reset_prefix_cache, 0.32).
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
        """Record those that the step names."""
        for request_id in versions.preempted_request_ids(scheduler_output):
            request = requests.get(request_id)
            if request is not None:
                self.preemption(request, versions.blocks_to_zero(scheduler_output))

    def next_turn(self, request: Request) -> None:
        """Record that a streaming session goes on with other tokens; its blocks are kept."""
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
        # The last sampled token was dropped and others follow: keys hold up to there.
        first_chunk = num_computed_tokens // self._chunk_size
        record = self._tracker.get(request.request_id)
        known: Sequence[bytes] = () if record is None else record.keys
        if first_chunk <= len(known):
            parent = known[first_chunk - 1] if first_chunk else None
            keys = self._keys.keys(request, first_chunk, parent)
            self._observe_keys(request, first_chunk, keys)

    def load_errors(self, block_ids: Iterable[int], requests: Iterable[Request]) -> None:
        """Record blocks that could not be filled, and what the scheduler has taken back because of them."""
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
        """Before blocks are saved from, compare the folded table with the scheduler's own, and prefer the latter.

        `added` are the blocks that the step adds, which is not folded yet.
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
                "block table differs",
                rule=Rule.TABLE_EQ.value,
                request_id=record.request_id,
                num_blocks_folded=len(held) + len(added),
                num_blocks=len(table),
            )
            observed = tuple(table[: len(table) - len(added)])
            self._journal.observe(e.BlockTableObserved(record.request_id, observed, self._journal.now()))

    def _agree(self, folded: Sequence[int], table: Sequence[int]) -> bool:
        """Equal, but for blocks that a window has left: vLLM nulls them without a hook."""
        windows = self._projections.geometry.windows
        if not windows.has_any:
            return folded == table
        return len(folded) == len(table) and all(
            block == known or (block == NULL_BLOCK and windows.sizes[page % windows.num_groups])
            for page, (known, block) in enumerate(zip(folded, table, strict=True))
        )

    def num_written_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens whose KV will have been written when the next step's `handle_preemptions` runs.

        That is behind every step in flight, so what those compute counts; vLLM fences the freed blocks until then.
        A token that is not known yet has no key, and with speculation a step in flight may take drafts back.
        """
        if self._speculates:
            return max(0, min(num_computed_tokens, request.num_tokens - 1) - request.num_in_flight_tokens)
        return min(num_computed_tokens, request.num_tokens)


class StepReader:
    """Turns scheduler outputs into observations, one per engine step, with only what differs from the expected.

    A request that decodes one token more, as the log expects, needs no entry; one comparison shows that.
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
        """`sync_keys` makes the keys of a request's whole chunks known; None: nobody asks which chunks have settled."""
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
        """With windows: the count by which the step that is read has freed what they left, and the tokens in flight."""
        self._processed_before: dict[str, tuple[int, int]] = {}
        self._time_ns = 0

    def read(self, scheduler_output: SchedulerOutput, time_ns: int) -> e.StepScheduled:
        """Everything this step says about the requests that are known.

        A count that went back is observed on its own, before the step.
        """
        self._time_ns = time_ns
        self._processed_before, self._processed = self._processed, {}
        num_scheduled = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        # Resumed requests stand among the cached ones (model runner V1) or among the new ones (V2); either way
        # their whole table has come with the allocation and replaced the old one.
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
        """Ids and counts of those that are not new and do something else than decode one more token."""
        cached, num_scheduled = scheduler_output.scheduled_cached_reqs, scheduler_output.num_scheduled_tokens
        rows = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        unexpected = self._tracker.computed.unexpected(rows, self._tracker.get)
        # Each is scheduled for a token at least, so the sum says whether anybody expected is for more: with drafts.
        num_others = sum([num_scheduled[data.req_id] for data in scheduler_output.scheduled_new_reqs])
        num_others += sum([num_scheduled[request_id] for request_id, _ in unexpected])
        if scheduler_output.total_num_scheduled_tokens - num_others != len(cached.req_ids) - len(unexpected):
            found = dict(unexpected)
            rows = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            unexpected = [row for row in rows if row[0] in found or num_scheduled[row[0]] != 1]
        return unexpected

    def _extended(self, cached: CachedRequestData) -> list[tuple[int, tuple[int, ...]]]:
        """Life and blocks of those whose tables have grown."""
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
        """How each of these is scheduled; with drafts that is everybody in every step."""
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
        """Requests that filled enough chunks with settled tokens; their keys are made known on the way.

        A steady request fills its next chunks at a step that is known in advance, so it is looked at then.
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
                continue  # as nearly everybody with drafts
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
            # Where a token is in flight by then, it is not settled yet and the request is looked at once more.
            due = next_step + max(0, threshold - num_computed_tokens)
            self._due.setdefault(due, []).append(record.request_id)

    def _settle(self, settled: list[e.SettledTokens], record: RequestRecord, num_computed_tokens: int) -> int:
        """Note what has settled; returns the number of settled tokens from which to look at the request again."""
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
        # It does not count until a load has arrived; and what windows leave in the next step is to be seen then.
        if record.blocks is BlocksRegion.LOADING or geometry.windows.has_any:
            return threshold
        return self._tracker.save_threshold(record, geometry.num_chunks_in(entry.num_settled_tokens))

    def window_left_at_end(self, record: RequestRecord, time_ns: int) -> None:
        """Before a request's end: what its windows leave now was not freed in the last step."""
        self._window_left(record, self._processed.get(record.request_id), time_ns)

    def _window_left(self, record: RequestRecord, processed: tuple[int, int] | None, time_ns: int) -> None:
        """Observe by which count pages were freed before, where that was in the very last step.

        In a step in which the request was skipped, vLLM may have freed more on the way to finding no room for it.
        """
        computing = record.state in {RequestState.CHUNKED_PREFILL, RequestState.RUNNING}
        if processed is not None and computing:
            num_settled_tokens, num_in_flight_tokens = processed
            self._observe(e.WindowLeft(record.request_id, num_settled_tokens, time_ns, num_in_flight_tokens))
