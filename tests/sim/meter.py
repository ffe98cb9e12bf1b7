"""Counts at vLLM's scheduler what preemptions cost, in the same way whatever connector is there, or none.

A position counts as computed once the scheduler counts it so, in flight or not. It is *lost* when its request is
preempted, *won back* when the request is scheduled again behind it (by its own prefix cache or by a connector), and
*recomputed* when it is scheduled again itself. It looks at nothing of the connector's.
"""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define
class _Return:
    """A request on its way back to where it was preempted."""

    num_lost_tokens: int
    num_reached_tokens: int = 0
    is_scheduled: bool = False


@attrs.define
class Meter:
    """Attach one to each scheduler; its counters go on over several."""

    num_preemptions: int = 0
    num_tokens_lost: int = 0
    """Computed at the moment of a preemption."""
    num_tokens_to_win_back: int = 0
    """The most that the request had ever computed, counted anew for each way back. At the end each of them is won back,
    recomputed or never reached."""
    num_tokens_won_back: int = 0
    num_tokens_recomputed: int = 0
    num_tokens_never_reached: int = 0
    """Of requests that ended, or were preempted once more, before they were back where they had been."""
    num_tokens_scheduled: int = 0
    _returns: dict[str, _Return] = attrs.field(factory=dict)

    @property
    def share_recomputed(self) -> float:
        """Of the tokens lost, those computed again."""
        return self.num_tokens_recomputed / self.num_tokens_lost if self.num_tokens_lost else 0.0

    def attach(self, scheduler: Any) -> None:
        """See every preemption, every schedule and every end of this scheduler's requests."""
        preempt, schedule, free = scheduler._preempt_request, scheduler.schedule, scheduler._free_request

        def preempt_request(request: Any, *arguments: Any, **options: Any) -> None:
            self._preempted(request)
            preempt(request, *arguments, **options)

        def schedule_and_count(*arguments: Any, **options: Any) -> Any:
            scheduler_output = schedule(*arguments, **options)
            self._scheduled(scheduler_output)
            return scheduler_output

        def free_request(request: Any, *arguments: Any, **options: Any) -> Any:
            self._ended(request.request_id)
            return free(request, *arguments, **options)

        scheduler._preempt_request = preempt_request
        scheduler.schedule = schedule_and_count
        scheduler._free_request = free_request

    def add(self, other: Meter) -> None:
        """Count what another one counted, too."""
        for field in attrs.fields(Meter):
            if field.name.startswith("num_"):
                setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def end(self) -> None:
        """Nobody who is still on the way back will arrive: the engine is gone."""
        for request_id in tuple(self._returns):
            self._ended(request_id)

    def _preempted(self, request: Any) -> None:
        earlier = self._returns.get(request.request_id)
        self._ended(request.request_id)
        self.num_preemptions += 1
        self.num_tokens_lost += request.num_computed_tokens
        mark = max(request.num_computed_tokens, earlier.num_lost_tokens if earlier else 0)
        self.num_tokens_to_win_back += mark
        self._returns[request.request_id] = _Return(mark)

    def _ended(self, request_id: str) -> None:
        returning = self._returns.pop(request_id, None)
        if returning is not None:
            self.num_tokens_never_reached += max(0, returning.num_lost_tokens - returning.num_reached_tokens)

    def _scheduled(self, scheduler_output: Any) -> None:
        computed = {data.req_id: data.num_computed_tokens for data in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            self.num_tokens_scheduled += num_tokens
            returning = self._returns.get(request_id)
            if returning is None:
                continue
            first, last = computed[request_id], computed[request_id] + num_tokens
            if not returning.is_scheduled:
                returning.is_scheduled = True
                self.num_tokens_won_back += min(first, returning.num_lost_tokens)
            self.num_tokens_recomputed += max(0, min(last, returning.num_lost_tokens) - first)
            returning.num_reached_tokens = max(returning.num_reached_tokens, last)
