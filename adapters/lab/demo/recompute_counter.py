"""Counts the tokens that vLLM's scheduler schedules a second time, independently of kvledger.

The counter wraps `Scheduler.schedule` in the same process. It uses neither the connector nor its log, so it measures an
engine with and without a connector in the same way.
"""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define
class RecomputeCounter:
    """Counts, over all requests, tokens that were computed before a preemption and are scheduled again.

    Verifies: the number of tokens that the model computes again. Does not verify: their KV.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_tokens_lost: int = 0
    """Computed tokens whose blocks vLLM freed in preemptions."""
    num_tokens_recomputed: int = 0
    _before_preemption: dict[str, int] = attrs.field(factory=dict)

    def watch(self, scheduler: Any) -> None:
        """Count the tokens in every step that `scheduler` schedules from now on."""
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            settled = {
                request.request_id: request.num_computed_tokens - request.num_in_flight_tokens
                for request in scheduler.running
            }
            output = schedule(*args, **kwargs)
            self._take(output, settled)
            return output

        scheduler.schedule = watched

    def _take(self, output: Any, settled: dict[str, int]) -> None:
        self.num_steps += 1
        for request_id in output.preempted_req_ids or ():
            self.num_preemptions += 1
            lost = settled.get(request_id, 0)
            self.num_tokens_lost += lost
            self._before_preemption[request_id] = max(self._before_preemption.get(request_id, 0), lost)
        cached = output.scheduled_cached_reqs
        first_token = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        first_token |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            first = first_token[request_id]
            end = min(first + num_tokens, self._before_preemption.get(request_id, 0))
            self.num_tokens_recomputed += max(0, end - first)
