"""What has no hook: preemptions, the next turn of a session, tokens that were taken back, keys that became known.

vLLM changes a live `Request` and leaves it to the connector to find out. Here that is found out, compared with what
the log has folded to, and written down as observations. Requests are read, never kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.chunk_keys import ChunkKeySource
from kvledger.adapters.vllm.key_checks import KeyChecks
from kvledger.lifecycle import BlocksRegion, Rule, TrustRegion, raise_if_unstoppable
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NULL_BLOCK

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvledger.lifecycle import LedgerConfiguration, Projections


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


class Noticing:
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
        if not windows.forget:
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
