"""Complete copies: saved blocks are computed, and loaded blocks are filled."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import attrs
import msgspec

from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorded.rules.under_way import Begun, RuleOfCopies
from kvledger.lifecycle import BlocksRegion, RequestState, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import AuditModel, Checker, num_intact_tokens
from kvledger.lifecycle.events import NULL_BLOCK

MAX_REMEMBERED_BLOCKS = 1 << 20
"""Maximum number of blocks in the remembered tables of ended requests. The oldest tables are forgotten first."""


class _Table(msgspec.Struct, gc=False):
    """The blocks of a request, and the number of computed tokens in them."""

    block_ids: Sequence[int]
    num_tokens: int
    num_prompt_tokens: int
    num_shared: int = 0
    """Number of blocks at the start of the table that are not checked. They were not new when the request got them, and
    a copy may take parts of them, or it is not known how many of their tokens are computed."""


@attrs.frozen
class _Load:
    """A load that vLLM waits for."""

    ordinal: int
    generation: int
    first_token: int
    num_tokens: int
    block_ids: Sequence[int]


class ChunkComplete(RuleOfCopies):
    """CHUNK_COMPLETE: tokens are saved only if they are computed, at the latest in the step of the save.

    Verifies: for each save, that the tokens of its blocks are computed, in flight, cached or loaded. If the copy takes
    whole blocks, or if the prompt is not completely computed yet, this is checked for all tokens of each block.
    Otherwise it is checked for the first token of each block. If the request was preempted or has ended, even in the
    middle of its prompt, the tokens that it had computed until then count as computed.
    Does not verify: copies of a connector without a decoder; saves of an ended request, if its id is in use again, or
    if requests that ended later had more than a million blocks together; how many tokens of the last block of a
    computed prompt are copied, if a copy may take a part of a block (NIXL).
    """

    rule = "CHUNK_COMPLETE"
    judges_loads = False

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._num_groups = len(model.configuration.windows)
        self._given: dict[int, int] = {}
        """Ordinal → number of the life's first tokens that its last lookup found cached or that were loaded since."""
        self._loads: dict[int, _Load] = {}
        """Job id → load."""
        self._failed_blocks: frozenset[int] = frozenset()
        self._lost: dict[int, _Table] = {}
        """Ordinal → table of a life that is preempted or has ended."""
        self._ended: OrderedDict[str, _Table] = OrderedDict()
        """Request id → table of the id's last life, if that life has ended."""
        self._num_remembered_blocks = 0
        self._speculates = False

    def begins(self, begun: Begun) -> None:
        """When a save begins, check that the tokens that it must find in each of its blocks are computed."""
        table = self._table_of(begun)
        if table is None:
            return
        # In the middle of a prompt no request can use a part of a block, and no connector copies the block again.
        size, is_whole = self.configuration.block_size, self._is_whole(begun, table)
        num_blocks = table.num_tokens // size if is_whole else -(-table.num_tokens // size)
        num_pages = max(num_blocks * self._num_groups, table.num_shared)
        own, block_ids = begun.block_ids, table.block_ids
        early = next((place for place in range(num_pages, len(block_ids)) if block_ids[place] in own), None)
        if early is not None:
            first = early // self._num_groups * size
            detail = (
                f"save {begun.copy.job} reads block {block_ids[early]}, which holds tokens {first} to "
                f"{first + size - 1}, but only {table.num_tokens} tokens of the request are computed"
            )
            self.broken(detail, request_id=begun.request_id)

    def _table_of(self, begun: Begun) -> _Table | None:
        if begun.ordinal < 0:
            return self._ended.get(begun.request_id)
        held = self.tables.of(begun.ordinal)
        life = self.lives.of(begun.ordinal)
        if not held or life is None:
            return self._lost.get(begun.ordinal)
        num_tokens = max(self.lives.num_computed_tokens(life), self._given.get(begun.ordinal, 0))
        # A copy of parts of blocks may take a shared block in part. Tokens from before the audit are not known.
        is_unknown = not begun.copy.is_whole or begun.ordinal not in self._given
        return _Table(held, num_tokens, life.num_prompt_tokens, max(life.num_old, 0) if is_unknown else 0)

    @staticmethod
    def _is_whole(begun: Begun, table: _Table) -> bool:
        return begun.copy.is_whole or table.num_tokens < table.num_prompt_tokens

    @on(payloads.RecordingStarted)
    def _started(self, started: payloads.RecordingStarted) -> None:
        self._speculates = started.speculates

    # --- cached and loaded tokens -------------------------------------------------------------

    @on(e.LookupRequested)
    def _asked(self, event: e.LookupRequested) -> None:
        if self.moment.life is not None:
            self._given[self.moment.life.ordinal] = event.num_computed_tokens

    @on(e.SessionContinued, e.TokensRolledBack)
    def _cut(self, event: e.SessionContinued | e.TokensRolledBack) -> None:
        ordinal = -1 if self.moment.life is None else self.moment.life.ordinal
        if ordinal in self._given:
            self._given[ordinal] = min(self._given[ordinal], event.num_computed_tokens)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        tokens = event.first_token, event.num_tokens
        self._loads[event.job_id] = _Load(event.ordinal, event.generation, *tokens, event.block_ids)

    @on(e.LoadErrorsObserved)
    def _load_errors(self, event: e.LoadErrorsObserved) -> None:
        self._failed_blocks = frozenset(event.block_ids)

    @on(e.TransferReported)
    def _load_ended(self, event: e.TransferReported) -> None:
        load = self._loads.pop(event.job_ids[0], None)
        life = None if load is None else self.lives.of(load.ordinal)
        if load is None or life is None or life.generation != load.generation:
            return
        num_tokens = load.num_tokens
        if event.ranks_failed:
            filled = num_filled(load.block_ids, self._failed_blocks)
            first_block = load.first_token // self.configuration.block_size
            end_token = (first_block + filled // self._num_groups) * self.configuration.block_size
            num_tokens = max(0, min(num_tokens, end_token - load.first_token)) if filled else 0
        if num_tokens:
            given = self._given.get(load.ordinal, 0)
            self._given[load.ordinal] = max(given, load.first_token + num_tokens)

    @on(payloads.Returned)
    def _hook_returned(self, returned: payloads.Returned) -> None:
        if returned.hook == "update_connector_output":
            self._failed_blocks = frozenset()

    # --- tables of requests that have lost them -----------------------------------------------

    @on(e.RequestPreempted, e.RequestFinished)
    def _stopped(self, event: e.RequestPreempted | e.RequestFinished) -> None:
        life = self.moment.life
        if life is None:
            return
        num_tokens = max(num_intact_tokens(event), self._given.pop(life.ordinal, 0))
        if self._speculates and isinstance(event, e.RequestFinished):  # tokens in flight may count or not
            num_tokens = max(num_tokens, life.counted_tokens)
        table = array("I", self.tables.lost_by(life))
        if self.moment.blocks_before is not BlocksRegion.NONE or life.ordinal not in self._lost:
            self._lost[life.ordinal] = _Table(table, num_tokens, life.num_prompt_tokens)

    @on(e.BlocksAllocated)
    def _allocated_again(self, _event: e.BlocksAllocated) -> None:
        if self._lost and self.moment.life is not None:
            self._lost.pop(self.moment.life.ordinal, None)

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        self._given.pop(event.ordinal, None)
        table = self._lost.pop(event.ordinal, None)
        if table is None or not table.block_ids:
            return
        self._forget(event.request_id)
        self._ended[event.request_id] = table
        self._num_remembered_blocks += len(table.block_ids)
        while self._num_remembered_blocks > MAX_REMEMBERED_BLOCKS:
            self._forget(next(iter(self._ended)))

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        if self._ended:
            self._forget(event.request_id)

    def _forget(self, request_id: str) -> None:
        table = self._ended.pop(request_id, None)
        self._num_remembered_blocks -= 0 if table is None else len(table.block_ids)


def num_filled(block_ids: Sequence[int], failed_blocks: frozenset[int]) -> int:
    """Return how many blocks of a load come before its first failed block; 0 if none of its blocks is in the set."""
    return next((number for number, block_id in enumerate(block_ids) if block_id in failed_blocks), 0)


class _Awaited(msgspec.Struct, gc=False):
    """A load that vLLM waits for."""

    sequence: int
    request_id: str
    ordinal: int
    generation: int
    block_ids: Sequence[int]
    """Blocks of the load in the order of the request's table, without the blocks of groups with a window."""
    unfilled: set[int]
    """The blocks of `block_ids` for which no copy has begun."""
    is_async: bool
    place: str = ""
    """Place of the connector that loads, as in `MetadataSeen`."""


class LoadComplete(Checker):
    """LOAD_COMPLETE: the workers get a copy for every block that vLLM counts as loaded.

    vLLM does not compute the tokens that it claimed from an answer, unless the connector reports the request or its
    blocks as failed (`get_block_ids_with_load_errors`, `failed_recving`; `kv_connector/v1/base.py`, 0.32).

    Verifies: when a load ends, that a copy has begun for each block that was allocated for the load. If blocks are
    reported as failed, only the blocks before the first failed block are checked.
    Does not verify: connectors, and children of a `MultiConnector`, without a decoder; groups with a window; that a
    copy was carried out (BYTES_UNCHANGED); loads that never end (LIVENESS); asynchronous loads that end after their
    request.
    """

    rule = "LOAD_COMPLETE"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        windows = model.configuration.windows
        self._num_groups = len(windows)
        self._has_window = [bool(window) for window in windows]
        self._awaited: dict[int, _Awaited] = {}
        """Job id → load."""
        self._is_decoded: dict[str, bool] = {}
        """Place of a connector → whether a decoder has read all metadata of this connector."""
        self._failed_blocks: frozenset[int] = frozenset()
        self._last_step = 0
        """Sequence number of the last step."""

    def begin(self) -> None:
        """Begin in the middle of a log: judge nothing, because earlier metadata may have had no decoder."""
        super().begin()
        self._is_decoded[""] = False

    @on(payloads.MetadataSeen)
    def _seen(self, seen: payloads.MetadataSeen) -> None:
        self._is_decoded[seen.place] = self._is_decoded.get(seen.place, True) and seen.is_decoded

    @on(payloads.Undecoded)
    def _undecoded(self, _undecoded: payloads.Undecoded) -> None:
        self._is_decoded.clear()

    @on(e.LoadIssued)
    def _issued(self, event: e.LoadIssued) -> None:
        first = event.first_token // self.configuration.block_size * self._num_groups
        blocks = [
            block_id
            for place, block_id in enumerate(event.block_ids, first)
            if block_id != NULL_BLOCK and not self._has_window[place % self._num_groups]
        ]
        life = event.request_id, event.ordinal, event.generation
        self._awaited[event.job_id] = _Awaited(self.moment.sequence, *life, blocks, set(blocks), event.is_async)

    @on(payloads.LoadChosen)
    def _chosen(self, chosen: payloads.LoadChosen) -> None:
        ordinal = -1 if self.moment.life is None else self.moment.life.ordinal
        for load in self._awaited.values():
            if load.ordinal == ordinal:
                load.place = f"{chosen.child}/"

    @on(payloads.Transferred)
    def _copied(self, copy: payloads.Transferred) -> None:
        if copy.is_load:
            for load in self._awaited.values():
                load.unfilled.difference_update(copy.block_ids)

    @on(payloads.TransferredFor)
    def _copied_for(self, copied: payloads.TransferredFor) -> None:
        self._copied(copied.copy)

    @on(e.LoadErrorsObserved)
    def _load_errors(self, event: e.LoadErrorsObserved) -> None:
        self._failed_blocks = frozenset(event.block_ids)

    @on(payloads.Returned)
    def _hook_returned(self, returned: payloads.Returned) -> None:
        if returned.hook == "update_connector_output":
            self._failed_blocks = frozenset()

    @on(e.TransferReported)
    def _ended(self, event: e.TransferReported) -> None:
        load = self._awaited.pop(event.job_ids[0], None)
        if load is not None and load.unfilled:
            has_failed, blocks = bool(event.ranks_failed), load.block_ids
            self._judge(load, num_filled(blocks, self._failed_blocks) if has_failed else len(blocks))

    @on(payloads.Called)
    def _called(self, called: payloads.Called) -> None:
        """At shutdown, judge loads within a step that have no report. Such a load may have stopped the engine."""
        if called.hook == "shutdown":
            for load in self._awaited.values():
                if load.unfilled and not load.is_async and load.sequence < self._last_step:
                    self._judge(load, len(load.block_ids))
            self._awaited.clear()

    @on(e.StepScheduled)
    def _step(self, _event: e.StepScheduled) -> None:
        self._last_step = self.moment.sequence

    def _judge(self, load: _Awaited, num_taken: int) -> None:
        life = self.lives.of(load.ordinal)
        is_over = life is None or life.generation != load.generation or life.state is RequestState.FINISHED
        if not self._is_decoded.get(load.place, False) or (load.is_async and is_over):  # no step has read the blocks
            return
        unfilled = [block_id for block_id in load.block_ids[:num_taken] if block_id in load.unfilled]
        if unfilled:
            detail = (
                f"vLLM counts {num_taken} blocks as loaded, but the connector gave its workers no copy for "
                f"{len(unfilled)} of them; the first is block {unfilled[0]}"
            )
            self.broken(detail, load.sequence, request_id=load.request_id)
