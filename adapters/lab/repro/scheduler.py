"""Reconstructs from the observations of a connector what vLLM's scheduler must have known about its requests.

No event states how many tokens a request has between two events, or how many of these tokens are in flight. This module
estimates both numbers, and raises an estimate if an event shows more tokens. It works on events only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from kvledger.lifecycle import ComputedTokens
from kvledger.lifecycle import events as e


@attrs.define(eq=False)
class Incarnation:
    """One life of a request id, as the scheduler sees it."""

    request_id: str
    ordinal: int
    num_prompt_tokens: int
    num_tokens: int
    """Number of tokens of prompt and output in the latest event that states it."""
    keys: list[bytes] = attrs.field(factory=list)
    block_ids: list[int] = attrs.field(factory=list)
    num_preemptions: int = 0
    was_scheduled: bool = False
    is_admitted: bool = False
    """Whether the request got blocks, and no step has computed tokens in these blocks yet."""
    last_step: int = -1
    num_tokens_of_last_step: int = 0
    num_local_tokens: int = 0
    """Tokens that vLLM's own prefix cache had for the request at the request's latest lookup."""
    num_tokens_at_start: int = 0
    """Tokens that the request got from vLLM's own cache and from the connector when it got its blocks.

    If the request got the blocks after its latest step, its next step begins with the token after these tokens. If they
    are the whole prompt, the step begins with the last of them.
    """
    num_missing_tokens: int = 0
    """Tokens that the recorded engine loaded and the rerun does not, because the lookup in the rerun found fewer."""


@attrs.frozen
class ScheduledTokens:
    """One request's part of a step."""

    incarnation: Incarnation
    num_computed_tokens: int
    num_scheduled_tokens: int
    num_tokens: int | None
    """Number of known tokens of the request; None if the step's event does not record it."""
    new_block_ids: tuple[int, ...]


class SchedulerModel:
    """The scheduler's state, folded from observations. Read it before a hook call, and fold the call afterwards."""

    def __init__(self, *, is_async: bool) -> None:
        self._is_async = is_async
        self._by_id: dict[str, Incarnation] = {}
        self._by_ordinal: dict[int, Incarnation] = {}
        self._running: dict[int, Incarnation] = {}
        """Ordinal → life, in the order in which vLLM lists running requests."""
        self._computed = ComputedTokens()

    def __iter__(self) -> Iterator[Incarnation]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> Incarnation | None:
        """Return the current life of a request id; None if the id's last life has ended, or it had no life."""
        return self._by_id.get(request_id)

    def fold(self, event: e.Event, chunk_size: int) -> None:
        """Fold any event except a step."""
        if isinstance(event, e.RequestArrived):
            self.arrived(event)
            return
        incarnation = self.get(getattr(event, "request_id", ""))
        if incarnation is None:
            return
        if isinstance(event, e.LookupRequested):
            self.looked_up(incarnation, event)
        elif isinstance(event, e.RequestPreempted):
            self.preempted(incarnation, event)
        elif isinstance(event, e.BlocksAllocated):
            self.allocated(incarnation, event)
        elif isinstance(event, e.SessionContinued):
            self.continued(incarnation, event, chunk_size)
        elif isinstance(event, e.TokensRolledBack):
            self.rolled_back(incarnation, event.num_computed_tokens)
        elif isinstance(event, e.RequestFinished):
            self.finished(incarnation)

    def by_ordinal(self, ordinal: int) -> Incarnation | None:
        """Return the life with this ordinal; None if there is none."""
        return self._by_ordinal.get(ordinal)

    def arrived(self, event: e.RequestArrived) -> Incarnation:
        """Begin a life."""
        incarnation = Incarnation(event.request_id, event.ordinal, event.num_prompt_tokens, event.num_prompt_tokens)
        self._by_id[event.request_id] = self._by_ordinal[event.ordinal] = incarnation
        self._computed.set(incarnation.ordinal, 0)
        return incarnation

    def looked_up(self, incarnation: Incarnation, event: e.LookupRequested) -> None:
        """Record a lookup."""
        incarnation.num_tokens, incarnation.num_local_tokens = event.num_tokens, event.num_computed_tokens

    def preempted(self, incarnation: Incarnation, event: e.RequestPreempted) -> None:
        """Record that the request lost its blocks."""
        incarnation.num_tokens = event.num_tokens
        incarnation.num_preemptions += 1
        self._computed.set(incarnation.ordinal, 0)
        incarnation.is_admitted = False
        incarnation.num_missing_tokens = 0
        incarnation.block_ids = []
        self._running.pop(incarnation.ordinal, None)

    def continued(self, incarnation: Incarnation, event: e.SessionContinued, chunk_size: int) -> None:
        """Begin the next turn of a session."""
        self._computed.set(incarnation.ordinal, event.num_computed_tokens)
        incarnation.num_tokens, incarnation.num_prompt_tokens = event.num_tokens, event.num_prompt_tokens
        del incarnation.keys[event.num_computed_tokens // chunk_size :]
        self._running.pop(incarnation.ordinal, None)

    def rolled_back(self, incarnation: Incarnation, num_computed_tokens: int) -> None:
        """Reduce the number of computed tokens."""
        self._computed.set(incarnation.ordinal, num_computed_tokens)

    def allocated(self, incarnation: Incarnation, event: e.BlocksAllocated) -> None:
        """Replace the request's whole block table."""
        start = incarnation.num_local_tokens + event.num_external_tokens
        # A request that waited for its load gets blocks a second time, without anything to load.
        incarnation.num_tokens_at_start = (
            max(start, incarnation.num_tokens_at_start) if incarnation.is_admitted else start
        )
        incarnation.block_ids = list(event.block_ids)
        incarnation.is_admitted = True
        self._running.pop(incarnation.ordinal, None)

    def finished(self, incarnation: Incarnation) -> None:
        """End a life."""
        self._computed.set(incarnation.ordinal, self.num_computed_tokens(incarnation))
        self._running.pop(incarnation.ordinal, None)
        if self._by_id.get(incarnation.request_id) is incarnation:
            del self._by_id[incarnation.request_id]

    def scheduled(self, event: e.StepScheduled) -> list[ScheduledTokens]:
        """Return all requests of a step: the ones that the event names, then the steady requests in vLLM's order."""
        extended = dict(event.extended)
        found = []
        named = set()
        for ordinal, num_computed_tokens, num_scheduled_tokens, num_tokens in event.advanced:
            incarnation = self._by_ordinal.get(ordinal)
            if incarnation is not None:
                missing, incarnation.num_missing_tokens = incarnation.num_missing_tokens, 0
                counts = (num_computed_tokens - missing, num_scheduled_tokens + missing, num_tokens)
                found.append(ScheduledTokens(incarnation, *counts, extended.get(ordinal, ())))
                named.add(ordinal)
        for ordinal, incarnation in self._running.items():
            if ordinal in self._computed.decoding and ordinal not in event.paused and ordinal not in named:
                blocks = extended.get(ordinal, ())
                found.append(ScheduledTokens(incarnation, self.num_computed_tokens(incarnation), 1, None, blocks))
        return found

    def paused(self, event: e.StepScheduled) -> list[Incarnation]:
        """Return the steady requests that the step's event records as not scheduled."""
        return [incarnation for ordinal in event.paused if (incarnation := self._by_ordinal.get(ordinal)) is not None]

    def in_running_order(self, event: e.StepScheduled, scheduled: list[ScheduledTokens]) -> list[ScheduledTokens]:
        """Return the running requests in vLLM's order. Requests that the step's event names keep the event's order."""
        places = {ordinal: place for place, ordinal in enumerate(self._running)}
        ordered = sorted(scheduled, key=lambda part: places.get(part.incarnation.ordinal, len(places)))
        ordered = _in_order_of(ordered, [part for part in scheduled if part.num_tokens is not None])
        extended = {ordinal: place for place, (ordinal, _) in enumerate(event.extended)}
        with_blocks = [part for part in ordered if part.incarnation.ordinal in extended]
        ordered = _in_order_of(ordered, sorted(with_blocks, key=lambda part: extended[part.incarnation.ordinal]))
        taken = {part.incarnation.ordinal for part in ordered} & self._running.keys()
        incarnations = iter([part.incarnation for part in ordered if part.incarnation.ordinal in taken])
        self._running = {
            incarnation.ordinal: incarnation
            for incarnation in [
                next(incarnations) if ordinal in taken else incarnation
                for ordinal, incarnation in self._running.items()
            ]
        }
        return ordered

    def stepped(self, event: e.StepScheduled, scheduled: list[ScheduledTokens]) -> None:
        """Fold a step."""
        self._computed.step(event)
        for part in scheduled:
            incarnation = part.incarnation
            if part.num_tokens is not None:
                incarnation.num_tokens = part.num_tokens
            incarnation.was_scheduled, incarnation.is_admitted = True, False
            incarnation.last_step, incarnation.num_tokens_of_last_step = (
                self._computed.num_steps,
                part.num_scheduled_tokens,
            )
            self._running.setdefault(incarnation.ordinal, incarnation)

    def num_computed_tokens(self, incarnation: Incarnation) -> int:
        """Return the number of a request's tokens that are computed or in flight after the latest step."""
        return self._computed.count(incarnation.ordinal)

    def num_tokens_in_flight(self, incarnation: Incarnation) -> int:
        """Return how many tokens the latest step scheduled for a request, if that step is in flight; otherwise 0."""
        if not self._is_async or incarnation.last_step != self._computed.num_steps:
            return 0
        return incarnation.num_tokens_of_last_step

    def num_known_tokens(self, incarnation: Incarnation) -> int:
        """Return an estimate of the number of known tokens.

        It is the number in the latest event, but at least the number of computed tokens. Without asynchronous
        scheduling, a request that was scheduled has at least one known token more than computed tokens.
        """
        return max(
            incarnation.num_tokens,
            self.num_computed_tokens(incarnation) + (0 if self._is_async else 1) * incarnation.was_scheduled,
        )


def _in_order_of(ordered: list[ScheduledTokens], some: list[ScheduledTokens]) -> list[ScheduledTokens]:
    named = {part.incarnation.ordinal for part in some}
    following = iter(some)
    return [next(following) if part.incarnation.ordinal in named else part for part in ordered]


def runs_async(observations: Sequence[tuple[int, e.Event]], chunk_size: int) -> bool:
    """Whether the engine scheduled steps before the output of the previous step was known.

    In such an engine, a step can compute tokens whose ids are not known yet, and a chunk is settled one step after it
    was filled.
    """
    record = SchedulerModel(is_async=False)
    for _, event in observations:
        if not isinstance(event, e.StepScheduled):
            incarnation = record.get(event.request_id) if isinstance(event, e.RequestFinished) else None
            if incarnation is not None and record.num_computed_tokens(incarnation) >= event.num_tokens:  # type: ignore[attr-defined]
                return True
            record.fold(event, chunk_size)
            continue
        if any(computed >= known for _, computed, _, known in event.advanced):
            return True
        scheduled = record.scheduled(event)
        counts = {part.incarnation.ordinal: part.num_computed_tokens for part in scheduled if part.num_tokens is None}
        if any(counts.get(ordinal) == num_settled_tokens + 1 for ordinal, _, num_settled_tokens, _ in event.settled):
            return True
        record.stepped(event, scheduled)
    return False


def could_be_scheduled(observations: Sequence[tuple[int, e.Event]], chunk_size: int) -> bool:
    """Whether vLLM could make the calls of these observations in this order.

    Computed tokens must come from steps and loads, and a request must be looked up before it gets blocks. The rules of
    the core check everything else.
    """
    record = SchedulerModel(is_async=False)
    looked_up: set[int] = set()
    for _, event in observations:
        if isinstance(event, e.StepScheduled):
            if not all(_goes_on(record, *entry[:2]) for entry in event.advanced):
                return False
            record.stepped(event, record.scheduled(event))
            continue
        if isinstance(event, e.RequestEvent) and not _is_possible(record, looked_up, event):
            return False
        record.fold(event, chunk_size)
    return True


def _is_possible(record: SchedulerModel, looked_up: set[int], event: e.RequestEvent) -> bool:
    """Whether the event can happen to its request now. Updates `looked_up`, the requests that may get blocks."""
    incarnation = record.get(event.request_id)
    if incarnation is None:
        return isinstance(event, e.RequestArrived)
    computed = record.num_computed_tokens(incarnation)
    if isinstance(event, e.LookupRequested):
        looked_up.add(incarnation.ordinal)
    elif isinstance(event, e.RequestPreempted):
        looked_up.discard(incarnation.ordinal)
    elif isinstance(event, e.BlocksAllocated):
        return incarnation.ordinal in looked_up
    elif isinstance(event, e.SessionContinued):
        return event.num_computed_tokens <= computed
    elif isinstance(event, e.RequestFinished):
        return event.num_settled_tokens <= max(computed, incarnation.num_tokens_at_start)
    return True


def _goes_on(record: SchedulerModel, ordinal: int, num_computed_tokens: int) -> bool:
    """Whether a step can compute the request's tokens from position `num_computed_tokens` on.

    If a whole prompt was loaded, a step computes the prompt's last token again.
    """
    incarnation = record.by_ordinal(ordinal)
    if incarnation is None or not incarnation.block_ids:
        return False
    computed, start = record.num_computed_tokens(incarnation), incarnation.num_tokens_at_start
    return num_computed_tokens in ({computed, start, start - 1} if incarnation.is_admitted else {computed})
