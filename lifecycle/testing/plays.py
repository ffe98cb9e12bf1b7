"""The scenarios of the contract tests: every observation in every state, and eight requests in which nothing fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvledger.lifecycle import events as e
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.events import NULL_BLOCK
from kvledger.lifecycle.ledger import Ledger
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.steps import Scheduled, StepEncoder

CONFIGURATIONS = (
    LedgerConfiguration(block_size=4, chunk_size=4, num_slots=8),
    LedgerConfiguration(block_size=4, chunk_size=8, num_slots=2, num_ranks=2, save_tails=False),
    LedgerConfiguration(block_size=4, chunk_size=4, num_slots=8, async_saves=True, async_load_tokens=0),
    LedgerConfiguration(block_size=4, chunk_size=4, num_slots=8, windows=(0, 4)),
)
"""Configurations with blocks of four tokens."""
_KEYS = (b"first", b"second", b"third")
PROMPT = 12
"""Tokens in a prompt: three blocks of four tokens."""
_NUM_WALKERS = 8


Observed = Callable[["Play"], Iterable[e.Event]]
"""Returns the observations of request `a` in a play."""


def plays(
    core: Core,
    configurations: Iterable[LedgerConfiguration],
    renew: Callable[[], None] = lambda: None,
    observed: Iterable[Observed] | None = None,
) -> Iterator[Play]:
    """Play each entry of `observed` in every state and configuration. `renew` is called before each play."""
    observed = OBSERVED if observed is None else tuple(observed)
    for configuration in configurations:
        for state in RequestState:
            for each in observed:
                renew()
                play = Play(core, configuration)
                play.run(state, each)
                yield play


class _Nowhere:
    """A sink to which nothing is ever committed."""

    next_sequence = 1

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        raise NotImplementedError


class Play:
    """A scenario: one request reaches a state, something happens to it, and it ends."""

    def __init__(self, core: Core, configuration: LedgerConfiguration) -> None:
        self.configuration = configuration
        self.events: list[e.Event] = []
        self.name = ""
        self.ledger = Ledger(core, configuration, _Nowhere())
        self._steps = StepEncoder(self.ledger.projections)
        self.block_ids = tuple(range(1, 1 + 4 * len(configuration.windows)))

    def run(self, state: RequestState, observed: Observed) -> None:
        """Run the scenario with request `a` in this state, after another request with the same prompt has ended."""
        self._reach("before", RequestState.FINISHED)
        self.report()
        self._reach("a", state)
        for event in observed(self):
            self.name = f"{event.id} in state {state} under {self.configuration}"
            self.observe(event)
        self.report()
        self.observe(e.RequestFinished("a", "stopped", PROMPT, PROMPT + 1, self.now))
        self.report()

    def walk(self) -> None:
        """Run eight requests, each of which is preempted up to three times. Their chunks do not all fit in the pool."""
        self.name = f"the walk under {self.configuration}"
        num_blocks = len(self.block_ids)
        walkers = [(f"walker {number}", number % 4, 1 + number * num_blocks) for number in range(_NUM_WALKERS)]
        for request_id, num_preemptions, first_block in walkers:
            block_ids = tuple(range(first_block, first_block + num_blocks))
            keys = tuple(f"{request_id}, {key!r}".encode() for key in _KEYS)
            self.observe(e.RequestArrived(request_id, self.ledger.next_ordinal, PROMPT, self.now))
            self.observe(e.ChunkKeysObserved(request_id, 0, keys[: PROMPT // self.configuration.chunk_size]))
            for num_tokens in range(PROMPT, PROMPT + num_preemptions + 1):
                if num_tokens > PROMPT:
                    self.observe(e.RequestPreempted(request_id, num_tokens - 1, num_tokens, self.now))
                    self.report()
                self.observe(e.LookupRequested(request_id, 0, num_tokens, self.now))
                num_loaded = getattr(self.events[-1], "num_external_tokens", 0)
                self.observe(e.BlocksAllocated(request_id, self._seen(block_ids, num_loaded), num_loaded, self.now))
                self.report()
                scheduled = Scheduled(request_id, num_loaded, num_tokens - num_loaded, num_tokens)
                self.observe(self._steps.encode([scheduled], self.now))
                self.report()
        for request_id, num_preemptions, _ in walkers:
            num_tokens = PROMPT + num_preemptions
            self.observe(e.RequestFinished(request_id, "stopped", num_tokens, num_tokens + 1, self.now))
            self.report()

    def _seen(self, block_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        windows = self.ledger.projections.geometry.windows
        return tuple(
            block_id
            if page // windows.num_groups >= windows.first_block(page % windows.num_groups, num_tokens)
            else NULL_BLOCK
            for page, block_id in enumerate(block_ids)
        )

    @property
    def now(self) -> int:
        """Time in nanoseconds. It advances by 1 with each event."""
        return len(self.events)

    def observe(self, event: e.Event) -> list[e.Event]:
        """Record an event and return the decisions that follow."""
        decisions = self.ledger.observe(event)
        self.events += [event, *decisions]
        return decisions

    def step(self, *counts: tuple[int, int, int]) -> e.StepScheduled:
        """Return a step that schedules request `a` with (num_computed_tokens, num_scheduled_tokens, num_tokens).

        Without an argument, the step schedules nothing.
        """
        return self._steps.encode([Scheduled("a", *each) for each in counts], self.now)

    def job_ids(self) -> list[int]:
        """Return the ids of the jobs in flight, and then an id that no job has."""
        return [*(job.job_id for job in self.ledger.projections.jobs), 1000]

    def report(self) -> None:
        """Let all ranks report the jobs in flight as done."""
        for job_id in self.job_ids()[:-1]:
            self.observe(e.TransferReported.by(range(self.configuration.num_ranks), job_id, self.now))

    def _reach(self, request_id: str, state: RequestState) -> None:
        self.observe(e.RequestArrived(request_id, self.ledger.next_ordinal, PROMPT, self.now))
        self.observe(e.ChunkKeysObserved(request_id, 0, _KEYS[: PROMPT // self.configuration.chunk_size]))
        if state is RequestState.NEW:
            return
        self.observe(e.LookupRequested(request_id, 0, PROMPT, self.now))
        self.observe(e.BlocksAllocated(request_id, self.block_ids, 0, self.now))
        num_tokens = PROMPT - 3 if state is RequestState.CHUNKED_PREFILL else PROMPT
        self.observe(self._steps.encode([Scheduled(request_id, 0, num_tokens, PROMPT)], self.now))
        if state in {RequestState.PREEMPTED, RequestState.RECOVERING}:
            self.observe(e.RequestPreempted(request_id, PROMPT, PROMPT + 1, self.now))
        if state is RequestState.RECOVERING:
            self.report()
            self.observe(e.LookupRequested(request_id, 0, PROMPT + 1, self.now))
            num_external_tokens = getattr(self.events[-1], "num_external_tokens", 0)
            self.observe(e.BlocksAllocated(request_id, self.block_ids, num_external_tokens, self.now))
        if state is RequestState.FINISHED:
            self.observe(e.RequestFinished(request_id, "stopped", PROMPT, PROMPT + 1, self.now))


def _looked_up(play: Play, num_computed_tokens: int) -> Iterator[e.Event]:
    for _ in range(3):  # repeated lookups get the same answer
        yield e.LookupRequested("a", num_computed_tokens, PROMPT + 1, play.now)


def _admitted(play: Play, share: int) -> Iterator[e.Event]:
    yield e.LookupRequested("a", 0, PROMPT + 1, play.now)
    answer = play.events[-1]
    taken = getattr(answer, "num_external_tokens", 0) // share
    yield e.BlocksAllocated("a", play.block_ids, taken, play.now)
    yield play.step((taken, PROMPT + 1 - taken, PROMPT + 1))


def _decoded(play: Play) -> Iterator[e.Event]:
    for num_computed_tokens in range(PROMPT, PROMPT + 6):
        yield play.step((num_computed_tokens, 1, num_computed_tokens + 1))


def _reported(play: Play, error: str) -> Iterator[e.Event]:
    for job_id in play.job_ids():
        yield e.TransferReported.by(range(play.configuration.num_ranks), job_id, play.now, error=error)
    yield play.step()


OBSERVED: tuple[Observed, ...] = (
    lambda play: [e.RequestArrived("a", play.ledger.next_ordinal, PROMPT, play.now)],
    lambda _play: [e.ChunkKeysObserved("a", 1, (b"other",))],
    lambda play: _looked_up(play, 0),
    lambda play: _looked_up(play, 4),
    lambda play: _looked_up(play, 5),
    lambda play: _admitted(play, 1),
    lambda play: _admitted(play, 2),
    lambda play: [e.BlocksAllocated("a", play.block_ids, 8, play.now)],
    lambda play: [e.BlockTableObserved("a", play.block_ids[::-1], play.now)],
    lambda play: [e.RequestPreempted("a", 8, PROMPT + 1, play.now), play.step()],
    lambda play: [e.RequestPreempted("a", 0, PROMPT + 1, play.now), play.step()],
    lambda play: [e.SessionContinued("a", 6, 16, 16, play.now)],
    lambda play: [e.SessionContinued("a", 0, 16, 16, play.now)],
    lambda play: [e.TokensRolledBack("a", 4, play.now)],
    lambda play: [e.TokensRolledBack("a", 0, play.now)],
    lambda play: [e.RequestFinished("a", "aborted", 0, PROMPT, play.now), play.step()],
    lambda play: [play.step()],
    lambda play: [play.step((4, 4, PROMPT))],
    _decoded,
    lambda play: _reported(play, ""),
    lambda play: _reported(play, "broken"),
    lambda play: [e.LoadErrorsObserved(play.block_ids[:2], play.now)],
    lambda play: [e.CacheReset(play.now), play.step()],
    lambda play: [e.HookFailed("a hook", "a", "it failed", play.now)],
    lambda play: [e.HookFailed("a hook", "", "it failed", play.now)],
    lambda play: [e.DecisionWithheld("a", Rule.VLLM_CONTRACT, "it would break it", play.now)],
    lambda play: [e.WindowLeft("a", 8, play.now)],
    lambda play: [e.PrefixCacheReset(play.now), play.step()],
    lambda play: [e.EndRefused("a", 0, "finished_recving", play.now)],
    lambda _: [e.HooksExchanged(num_tokens=1)],
)
"""The observations to play, whether the request's state allows them or not."""
