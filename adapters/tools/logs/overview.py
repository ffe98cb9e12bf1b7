"""The engine at one moment of its log: requests by state, blocks, copies, hit rate, longest waiting requests."""

from __future__ import annotations

from collections import Counter, deque

import attrs

from kvledger.adapters.tools.logs.describe import describe_core_event
from kvledger.adapters.tools.logs.totals import LogTotals
from kvledger.lifecycle import RequestState, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Model, Spent, Visitor

_NS_PER_S = 1_000_000_000
RECENT_S = 60
"""Seconds that recent figures cover."""


@attrs.frozen
class BadRequest:
    """A request that has waited in the queue or after a preemption."""

    request_id: str
    state: str
    spent: Spent
    num_preemptions: int
    num_tokens: int


@attrs.frozen
class Overview:
    """The engine after the last event that was read. Times in nanoseconds since the log was opened."""

    time_ns: int
    last_sequence: int
    num_running: int
    num_waiting: int
    num_preempted: int
    """Preempted requests that are not running again yet."""
    num_finished: int
    """Requests that have finished. If reading began at a snapshot, requests that finished earlier are not counted."""
    num_blocks_held: int | None
    """Distinct blocks of vLLM's KV cache that requests hold; None if a group of layers has a window."""
    num_loads: int
    """Loads in flight."""
    num_saves: int
    oldest_copy_ns: int | None
    """When the oldest copy in flight was issued; None: no copy is in flight."""
    num_tokens_queried: int
    """Tokens that admitted requests needed beyond the hit in vLLM's own prefix cache, since the log was opened."""
    num_tokens_hit: int
    num_recently_queried: int
    """The part of `num_tokens_queried` from admissions in the last `recent_ns` nanoseconds."""
    num_recently_hit: int
    recent_ns: int
    """Nanoseconds that the recent figures cover: `RECENT_S`, or less if the part that was read is shorter."""
    num_violations: int
    num_hook_failures: int
    last_fault: str
    """The last broken rule or failed hook, in words; empty: none was read."""
    worst: tuple[BadRequest, ...]
    """The requests that have waited longest, the longest first."""


class Overviews(Visitor[Model]):
    """Makes overviews of what a reader has read so far.

    Args:
        model: the reader's model.
        totals: totals of the same reader. The reader must pass each event to them before it calls this visitor.
    """

    needs = ("lives", "tables", "copies")

    def __init__(self, model: Model, totals: LogTotals) -> None:
        super().__init__(model)
        self._totals = totals
        self._num_finished = 0
        self._last_fault = ""
        self._admitted: deque[tuple[int, int, int]] = deque()
        """(time, tokens queried so far, tokens hit so far). One entry is for the beginning, and one for each admission,
        the newest last. The first entry is the newest of those that are at least `RECENT_S` seconds old, if any."""
        self._note_figures()

    @on(e.RequestFinished)
    def _finished(self, _event: e.RequestFinished) -> None:
        self._num_finished += not self.moment.is_refused

    @on(e.BlocksAllocated)
    def _allocated(self, _event: e.BlocksAllocated) -> None:
        self._note_figures()

    def _note_figures(self) -> None:
        now_ns, figures = self.moment.time_ns, self._totals.figures
        self._admitted.append((now_ns, figures.num_tokens_queried, figures.num_tokens_hit))
        self._forget_before(now_ns - RECENT_S * _NS_PER_S)

    def _forget_before(self, time_ns: int) -> None:
        while len(self._admitted) > 1 and self._admitted[1][0] <= time_ns:
            self._admitted.popleft()

    @on(e.InvariantViolated, e.HookFailed)
    def _failed(self, event: e.InvariantViolated | e.HookFailed) -> None:
        self._last_fault = f"{describe_core_event(event)} (event {self.moment.sequence})"

    def now(self, num_worst: int) -> Overview:
        """Return an overview of the present state, with up to `num_worst` requests that have waited longest."""
        model, figures = self.model, self._totals.figures
        states: Counter[RequestState] = Counter(life.state for life in model.lives)
        copies = [copy for _, copy in model.copies]
        num_loads = sum(copy.is_load for copy in copies)
        now_ns = self.moment.time_ns
        self._forget_before(now_ns - RECENT_S * _NS_PER_S)
        since_ns, queried_before, hit_before = self._admitted[0]
        return Overview(
            time_ns=now_ns,
            last_sequence=self.moment.sequence,
            num_running=states[RequestState.RUNNING] + states[RequestState.CHUNKED_PREFILL],
            num_waiting=states[RequestState.NEW],
            num_preempted=states[RequestState.PREEMPTED] + states[RequestState.RECOVERING],
            num_finished=self._num_finished,
            num_blocks_held=None if model.layout.has_windows else model.tables.num_held(),
            num_loads=num_loads,
            num_saves=len(copies) - num_loads,
            oldest_copy_ns=min((copy.since_ns for copy in copies), default=None),
            num_tokens_queried=figures.num_tokens_queried,
            num_tokens_hit=figures.num_tokens_hit,
            num_recently_queried=figures.num_tokens_queried - queried_before,
            num_recently_hit=figures.num_tokens_hit - hit_before,
            recent_ns=min(now_ns - since_ns, RECENT_S * _NS_PER_S),
            num_violations=figures.num_violations,
            num_hook_failures=figures.num_hook_failures,
            last_fault=self._last_fault,
            worst=self._worst(num_worst),
        )

    def _worst(self, num_worst: int) -> tuple[BadRequest, ...]:
        lives = self.model.lives
        spent = [(lives.spent(life), life) for life in lives if life.state is not RequestState.FINISHED]
        spent.sort(key=lambda each: each[0].queued_ns + each[0].preempted_ns, reverse=True)
        return tuple(
            BadRequest(
                life.request_id,
                life.path,
                its,
                life.num_preemptions,
                max(life.num_tokens, lives.num_computed_tokens(life)),
            )
            for its, life in spent[:num_worst]
        )
