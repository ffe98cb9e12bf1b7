"""Tables: in which blocks the copied tokens are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.events import NO_SLOT, NULL_BLOCK
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.moment import Visits
from kvledger.lifecycle.reader.records import Copy, Life
from kvledger.lifecycle.states import RequestState


class TableEq(Checker):
    """TABLE_EQ: the block table that is computed from the log equals the scheduler's own table.

    Verifies: if a step has a row for a request, the block table computed for the request covers all of the request's
    tokens up to the last one that the step schedules. No block occurs twice in an allocation, or in the table at the
    first step after the allocation. The log has no `blocks.observed`. With this event, the connector records the
    scheduler's own table if the two tables differ.
    Does not verify: the position of each block, if the connector did not compare the tables; tables of quarantined
    requests.
    """

    rule = "TABLE_EQ"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._allocated: dict[int, int] = {}
        """Ordinal → sequence number of an allocation since the last step."""

    @on(e.BlockTableObserved)
    def _observed(self, event: e.BlockTableObserved) -> None:
        detail = f"the scheduler's table has {len(event.block_ids)} blocks and differs from the one in the log"
        self.broken(detail)

    @on(e.BlocksAllocated)
    def _given(self, event: e.BlocksAllocated) -> None:
        twice = _twice(event.block_ids)
        if self.moment.life is not None:
            self._allocated[self.moment.life.ordinal] = self.moment.sequence
        if twice:
            self.broken(f"blocks {twice} appear twice in the new table")

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        for ordinal, sequence in self._allocated.items():
            life, twice = self.lives.of(ordinal), _twice(self.tables.of(ordinal))
            if twice and life is not None:
                detail = f"blocks {twice} were in the table already and were appended again"
                self.broken(detail, sequence, request_id=life.request_id)
        self._allocated.clear()
        block_size, num_groups = self.layout.block_size, self.layout.num_groups
        for ordinal, num_computed_tokens, num_scheduled_tokens, _ in event.advanced:
            num_tokens, num_blocks = num_computed_tokens + num_scheduled_tokens, len(self.tables.of(ordinal))
            if num_blocks * block_size < num_tokens * num_groups:
                life = self.lives.of(ordinal)
                if life is not None and not life.quarantined:
                    what = f"the table has only {num_blocks} blocks of {block_size} tokens"
                    self.broken(f"{num_tokens} tokens are scheduled, but {what}", request_id=life.request_id)


def _tokens(event: e.LoadIssued | e.TailSaveIssued) -> range:
    return range(event.first_token, event.first_token + event.num_tokens)


def _twice(block_ids: Sequence[int]) -> list[int]:
    """Return the blocks that occur more than once, except the null block."""
    if len(set(block_ids)) == len(block_ids):
        return []
    seen: set[int] = set()
    return sorted({block for block in block_ids if block in seen or seen.add(block)} - {NULL_BLOCK})  # type: ignore[func-returns-value]


class SrcBlockOwned(Checker):
    """SRC_BLOCK_OWNED: a save copies from the blocks in which its request has the saved chunks or the tail.

    Verifies: of every save:

    - A save of chunks copies from the blocks that the table computed from the log has for these chunks, in the order of
      the chunks. Each chunk occurs once.
    - A tail is copied from the blocks that its tokens had in the table that the request lost.
    - A synchronous save of chunks precedes the step's forward if and only if its request has lost the blocks. With
      sliding windows this is not checked.
    - A save of chunks is asynchronous only if the configuration allows it. For a preempted request it is never
      asynchronous. With sliding windows this is not checked.

    Does not verify: that the computed table is the scheduler's (TABLE_EQ); that the blocks do not change until the copy
    is done (SRC_BLOCK_STABLE); saves that a finished request must not get (FINISH_IS_LAST).
    """

    rule = "SRC_BLOCK_OWNED"

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued) -> None:
        life, configuration = self.moment.life, self.configuration
        held, lost = self.tables.held_by(life), self.tables.lost_by(life)
        has_ended = self.moment.state_before is RequestState.FINISHED
        was_preempted = self.moment.state_before is RequestState.PREEMPTED
        if life is None or (has_ended and not lost):
            return  # LEGAL_TRANSITION and FINISH_IS_LAST report these
        if len(event.chunks) > 1 and any(chunk >= following for chunk, following in pairwise(event.chunks)):
            detail = f"save {event.job_id} copies chunks {list(event.chunks)}, which are not in ascending order"
            self.broken(detail, event.cause)
            return
        may_be_async = configuration.async_saves and not was_preempted
        is_in_time = event.before_forward is not bool(held or event.is_async) and (may_be_async or not event.is_async)
        if is_in_time or self.layout.has_windows:
            table = lost if not held and (event.before_forward or has_ended) else held
            num_pages = max(len(table), len(event.block_ids)) + 1
            self._check(event, table, self.layout.pages_of_chunks(event.chunks, num_pages))
            return
        when = "before the forward" if event.before_forward else "asynchronously" if event.is_async else "with the step"
        has = "still has" if held else "has lost"
        self.broken(f"save {event.job_id} copies {when} from blocks that the request {has}", event.cause)

    @on(e.TailSaveIssued)
    def _tail_save_issued(self, event: e.TailSaveIssued) -> None:
        lost = self.tables.lost_by(self.moment.life)
        tokens = _tokens(event)
        if tokens and (lost or self.moment.state_before is not RequestState.FINISHED):  # else CHUNK_COMPLETE reports it
            self._check(event, lost, self.layout.pages_of(tokens))

    def _check(self, event: e.SaveIssued | e.TailSaveIssued, table: Sequence[int], pages: Sequence[int]) -> None:
        """Compare the save's source blocks with the request's block table."""
        pages = pages[: max(len(table), len(event.block_ids)) + 1]  # a log may name chunks far beyond its tables
        expected = tuple([table[page] if 0 <= page < len(table) else None for page in pages])
        if NO_SLOT in event.slots and len(event.slots) == len(expected):
            expected = tuple(
                NULL_BLOCK if slot == NO_SLOT else block for slot, block in zip(event.slots, expected, strict=True)
            )
        if event.block_ids != expected:
            if isinstance(event, e.SaveIssued):
                what = f"chunks {list(event.chunks)}"
            else:
                what = f"tokens {event.first_token} to {event.first_token + event.num_tokens}"
            detail = (
                f"{what} lie in blocks {list(expected)} of the request's table, "
                f"but save {event.job_id} copies {list(event.block_ids)}"
            )
            self.broken(detail, event.cause)
        elif len(event.slots) != len(event.block_ids):
            detail = f"{len(event.block_ids)} blocks are copied to {len(event.slots)} slots"
            self.broken(detail, event.cause)


class GroupAgreement(Checker):
    """GROUP_AGREEMENT: a load copies all pages that the next token sees; a save reads no page outside the window.

    A load ends at the same token in all groups. If all layers have full attention, there is nothing to verify.

    Verifies: with sliding windows:

    - An answer covers as many tokens of the usable hit as the stored pages allow. A load can end before a token if all
      pages that this token sees through its windows are stored. An answer of 0 tokens is allowed only if the stored
      pages allow no load, or if another request's load is in flight.
    - A load copies a page if and only if the token that follows the loaded tokens sees the page.
    - A save reads a page only if the page was inside the window when the request's settled tokens were last recorded. A
      save before the forward may also read pages that have just fallen out of the window.

    Does not verify: that the log's header has the windows of the model; which blocks vLLM had freed.
    """

    rule = "GROUP_AGREEMENT"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._leaving: dict[str, tuple[int, int]] = {}
        """Request id → (settled tokens, sequence number) of the last `window.left` since the last step."""
        self._left: dict[str, tuple[int, int]] = {}
        """Request id → (settled tokens, sequence number) of the last `window.left` between the last two steps."""
        self._first_known_step = 0
        """Number of steps in the log from which on saves before the forward are checked."""

    def visits(self) -> Visits:
        """Return pairs (event class, method). If no group has a window, return no pairs: the rule is not checked."""
        return super().visits() if self.layout.has_windows else []

    def begin(self) -> None:
        """For two steps, check no saves before the forward, because earlier `window.left` events are not known."""
        self._first_known_step = self.lives.num_steps + 2

    @on(e.WindowLeft)
    def _window_left(self, event: e.WindowLeft) -> None:
        if self.moment.is_legal:
            self._leaving[event.request_id] = (event.num_settled_tokens, self.moment.sequence)

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        self._left, self._leaving = self._leaving, {}

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued) -> None:
        if event.before_forward and self.lives.num_steps < self._first_known_step:
            return
        self._check_save(event, self.layout.pages_of_chunks(event.chunks, len(event.slots)))

    @on(e.TailSaveIssued)
    def _tail_save_issued(self, event: e.TailSaveIssued) -> None:
        self._check_save(event, self.layout.pages_of(_tokens(event)))

    def _intact_since(self, event: e.SaveIssued | e.TailSaveIssued) -> tuple[int, int] | None:
        """Return (settled tokens, sequence number) of the last `window.left` before the save's step.

        Returns None for tails, for saves that do not precede the forward, and if the request has no such event.
        """
        if isinstance(event, e.TailSaveIssued) or not event.before_forward:
            return None
        known = self._left if event.cause == self.lives.last_steps[0] else self._leaving
        return known.get(event.request_id)

    def _settled(self) -> tuple[int, int]:
        settled = (0, 0) if self.moment.life is None else self.moment.life.settled
        return settled if settled[1] else (0, 0)  # a mere bound is no number

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        life, model, num_computed_tokens = self.moment.life, self.model, event.num_computed_tokens
        if life is None or event.num_hit_tokens > self._num_there(life):
            return  # LOADABLE_AFTER_COMMIT and RESET_EPOCH report a hit of more than is stored
        gets_nothing = life.quarantined or life.computes_first or event.miss_reason == e.MissReason.SLOWER
        usable = 0 if gets_nothing else event.num_hit_tokens
        usable = min(usable, event.num_tokens - 1)
        end_token = max(model.longest_seen(life, usable), num_computed_tokens)
        if num_computed_tokens % self.layout.block_size:
            end_token = num_computed_tokens  # loads begin at a block
        answered = num_computed_tokens + event.num_external_tokens
        if answered == end_token or answered > usable:
            return  # LOOKUP_PURE reports an answer of more than is usable
        if answered == num_computed_tokens and any(job.ordinal != life.ordinal for job in self._loads()):
            return  # it waits for that load
        what = f"the answer ends at token {answered} of a usable hit of {usable} tokens"
        self.broken(f"{what}, but the stored pages allow an end at token {end_token}", event.cause)

    def _loads(self) -> Iterator[Copy]:
        return (job for job_id in self.copies.loads if (job := self.copies.get(job_id)) is not None)

    def _num_there(self, life: Life) -> int:
        """Return how many tokens of the life, from the first on, are stored: committed chunks, then the saved tail."""
        num_tokens, tail = self.chunks.num_committed(life) * self.layout.chunk_size, self.tails.saved(life)
        return tail.end_token if tail is not None and tail.first_token == num_tokens else num_tokens

    @on(e.LoadIssued)
    def _check_load(self, event: e.LoadIssued) -> None:
        end_token = event.first_token + event.num_tokens
        pages = self.layout.pages_of(_tokens(event))
        for page, slot in zip(pages, event.slots, strict=False):
            if (slot != NO_SLOT) != self.layout.is_seen(page, end_token):
                what = "leaves out" if slot == NO_SLOT else "copies"
                but = "sees" if slot == NO_SLOT else "does not see"
                detail = (
                    f"load {event.job_id} up to token {end_token} {what} {self._words(page)}, "
                    f"which the next token {but}"
                )
                self.broken(detail, event.cause)

    def _check_save(self, event: e.SaveIssued | e.TailSaveIssued, pages: Sequence[int]) -> None:
        num_settled_tokens, sequence = self._intact_since(event) or self._settled()
        for page, slot in zip(pages, event.slots, strict=False):
            if slot != NO_SLOT and not self.layout.is_seen(page, num_settled_tokens):
                detail = (
                    f"save {event.job_id} reads {self._words(page)}, "
                    f"which the window had left when {num_settled_tokens} tokens were settled"
                )
                self.broken(detail, sequence, event.cause)

    def _words(self, page: int) -> str:
        block, group = divmod(page, self.layout.num_groups)
        return f"block {block} of group {group}"
