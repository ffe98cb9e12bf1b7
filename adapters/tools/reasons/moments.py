"""Adds to a request's history the sequence numbers of its main events, such as preemptions and failed copies.

Of the steps, only the first one after a preemption is added.
"""

from __future__ import annotations

from kvledger.adapters.tools.reasons.memory import Account, Memory
from kvledger.adapters.tools.reasons.request_history import MAX_KEPT, Preemption
from kvledger.lifecycle import events as e
from kvledger.lifecycle import on

_OF_A_REQUEST = (
    e.RequestArrived,
    e.RequestPreempted,
    e.LoadCompleted,
    e.LoadFailed,
    e.SaveFailed,
    e.SaveDeclined,
    e.TokensRolledBack,
    e.SessionContinued,
    e.RequestQuarantined,
    e.InvariantViolated,
    e.RequestFinished,
    e.ExtensionObserved,
    e.ExtensionDecided,
)


class Moments:
    """Part of `Accounts` that adds sequence numbers to histories. It is called after the parts that count tokens."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        # The step for which vLLM took the blocks is recorded right after the preemption.
        preempted = self._memory.state.preempted
        for life in map(self._memory.model.lives.get, preempted):
            if life is not None and life.preempted_at:  # else another life has the id by now
                self._note(self._memory.account(life))
        preempted.clear()

    @on(e.CacheReset, e.PrefixCacheReset, e.ExtensionStopped)
    def _of_all(self, _event: e.Event) -> None:
        for _, account in self._memory.lives():
            self._note(account)

    @on(e.HookFailed)
    def _hook_failed(self, event: e.HookFailed) -> None:
        if event.request_id:
            self._of_a_request(event)
        else:
            self._of_all(event)

    @on(e.LookupAnswered, e.LookupDeferred)
    def _answered(self, event: e.LookupAnswered | e.LookupDeferred) -> None:
        # If an extension answers, its event is the cause of the lookup event. The history's lookup shows the answer,
        # and counts repetitions.
        account = self._memory.present(event.request_id)
        if account is not None and account.history is not None and account.history.moments[-1:] == [event.cause]:
            account.history.moments.pop()

    @on(*_OF_A_REQUEST)
    def _of_a_request(self, event: e.RequestEvent | e.HookFailed | e.InvariantViolated) -> None:
        account = self._memory.present(event.request_id)
        self._note(account)
        if account is not None and isinstance(event, e.RequestPreempted):
            self._memory.state.preempted.append(event.request_id)
            if account.history is not None and len(account.history.preemptions) < MAX_KEPT:
                account.history.preemptions.append(self._preemption(event))

    def _preemption(self, event: e.RequestPreempted) -> Preemption:
        model = self._memory.model
        life, layout = model.moment.life, model.layout
        num_blocks = len(model.tables.lost_by(life))
        is_known = life is not None and not life.is_partial and not layout.has_windows and num_blocks > 0
        num_held = num_blocks // layout.num_groups * layout.block_size
        num_computed = event.num_settled_tokens + max(0, event.num_in_flight_tokens)
        is_full = is_known and num_computed >= num_held
        return Preemption(model.moment.sequence, num_blocks, is_full, self._memory.num_held_blocks(with_lost_by=life))

    def _note(self, account: Account | None) -> None:
        if account is not None and account.history is not None:
            account.history.keep(account.history.moments, self._memory.model.moment.sequence)
