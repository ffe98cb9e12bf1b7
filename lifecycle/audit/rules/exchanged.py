"""Exchanges: values that left kvledger's hooks or arrived in them, compared with the log."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.forgotten import LIFE

_COUNTED = tuple(field for field in e.field_names(e.HooksExchanged) if field.startswith("num_"))
_WORDS = {
    "num_arrivals": "arrivals of requests",
    "num_answers": "answers to lookups",
    "num_deferred": "deferred lookups",
    "num_async": "answers with an asynchronous load",
    "num_tokens": "tokens in answers to lookups",
    "num_allocations": "allocations",
    "num_handed_out": "entries in the metadata of steps",
    "num_reports": "reports of workers",
    "num_load_errors": "blocks that were not filled",
    "num_received": "ends of loads for vLLM",
    "num_finished": "requests that finished",
    "num_held": "finished requests whose blocks vLLM keeps for copies",
    "num_resets": "resets",
}


class ToldAsDecided(Checker):
    """TOLD_AS_DECIDED: vLLM and the workers get what was decided, and everything that they report is recorded.

    The event `hooks.exchanged` counts the values that left the connector's hooks and that arrived in them.

    Verifies: of each `hooks.exchanged`, for the time since the previous one:

    - `hooks.exchanged` lists no difference. An answer of 0 tokens instead of the decided answer is allowed if the
      decision was withheld or the request is quarantined.
    - `hooks.exchanged` and the log's other events agree in the numbers of arrivals, answers, tokens in answers,
      asynchronous answers, deferrals, allocations, finished requests, those of them whose blocks vLLM keeps, entries in
      the metadata of steps, reports, blocks that were not filled, ends of loads, and resets.
    - Each rank gave vLLM the ends that the rank was asked to give. If there is no other connector, each end reached
      vLLM within 64 steps.
    - Each rank reported each unfilled block once: the blocks of its loads that failed within a step, and the blocks
      that no copy fills.

    Before each step, and before the event that records the shutdown, the log has a `hooks.exchanged` that counts all
    events before it.

    Does not verify: connectors that never record `hooks.exchanged`; anything before the first `hooks.exchanged` that is
    audited; the time between two `hooks.exchanged` if a hook failed in that time; anything after kvledger declined to
    serve the model or the ledger became corrupt; how vLLM and the workers use the values. If a worker mixes up the
    slots of saves that it copies together, only digests show this (BYTES_UNCHANGED).
    """

    rule = "TOLD_AS_DECIDED"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._num = dict.fromkeys(_COUNTED, 0)
        """Field of `HooksExchanged` → number in the log since the last `hooks.exchanged`."""
        self._first = 0
        """Sequence number of the first event counted in `_num`; 0 if no event was counted."""
        self._answers: dict[str, e.LookupAnswered | e.LookupDeferred] = {}
        """Request id → the last decision about its lookup since the last `hooks.exchanged`."""
        model.forgotten.at((*LIFE, e.RequestPreempted, e.RequestFinished), self._answers)
        self._is_recorded = False
        """Whether the log has `hooks.exchanged`."""
        self._knows_all = True
        """Whether every event since the last `hooks.exchanged` is known."""
        self._is_over = False
        self._has_failed = False
        """Whether a hook has failed since the last `hooks.exchanged`."""

    def begin(self) -> None:
        """Skip the first comparison, because not all events since the last `hooks.exchanged` are known."""
        self._knows_all = False

    def _count(self, name: str, number: int = 1) -> None:
        if number:
            self._num[name] += number
            self._first = self._first or self.moment.sequence

    # --- what the log has ----------------------------------------------------------------------

    @on(e.RequestArrived)
    def _arrived(self, _event: e.RequestArrived) -> None:
        self._count("num_arrivals")

    @on(e.LookupAnswered, e.LookupDeferred)
    def _answered(self, event: e.LookupAnswered | e.LookupDeferred) -> None:
        self._answers[event.request_id] = event
        self._count_answer(event, 1)

    def _count_answer(self, event: e.LookupAnswered | e.LookupDeferred, number: int) -> None:
        self._count("num_answers", number)
        if isinstance(event, e.LookupDeferred):
            self._count("num_deferred", number)
        else:
            self._count("num_async", number * event.is_async)
            self._count("num_tokens", number * event.num_external_tokens)

    def _take_back(self, request_id: str) -> bool:
        """Uncount the request's last answer, which vLLM did not get. Return whether there was such an answer."""
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._count_answer(answer, -1)
        return answer is not None

    @on(e.DecisionWithheld)
    def _withheld(self, event: e.DecisionWithheld) -> None:
        self._take_back(event.request_id)

    @on(e.RequestQuarantined)
    def _quarantined(self, event: e.RequestQuarantined) -> None:
        answer = self._answers.get(event.request_id)
        if answer is not None and answer.cause == event.cause:
            self._take_back(event.request_id)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        self._answers.pop(event.request_id, None)  # a decision withheld later is a job
        self._count("num_allocations")

    @on(e.EffectsDelivered)
    def _delivered(self, event: e.EffectsDelivered) -> None:
        handed_out = (event.job_ids, event.awaited, event.block_ids, event.failed, event.sent)
        self._count("num_handed_out", sum(map(len, handed_out)))
        self._count("num_received", len(event.received))

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported) -> None:
        if not event.withheld:
            self._count("num_reports", len(event.job_ids) * (len(event.ranks_done) + len(event.ranks_failed)))

    @on(e.LoadErrorsObserved)
    def _load_errors(self, event: e.LoadErrorsObserved) -> None:
        self._count("num_load_errors", len(event.block_ids))

    @on(e.RequestFinished)
    def _finished(self, _event: e.RequestFinished) -> None:
        self._count("num_finished")

    @on(e.BlocksHeld)
    def _held(self, _event: e.BlocksHeld) -> None:
        self._count("num_held")

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._count("num_resets")

    @on(e.HookFailed)
    def _hook_failed(self, event: e.HookFailed) -> None:
        self._has_failed = True
        self._is_over |= event.error.startswith(e.CORRUPT)

    @on(e.LogNote)
    def _noted(self, event: e.LogNote) -> None:
        if event.text == e.SHUT_DOWN:
            self._must_be_counted()
        self._is_over |= event.text.startswith(e.DECLINED)

    # --- what left and arrived -----------------------------------------------------------------

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        self._must_be_counted()

    def _must_be_counted(self) -> None:
        if self._is_judged and self._is_recorded and any(self._num.values()):
            had = ", ".join(f"{number} {_WORDS[name]}" for name, number in self._num.items() if number)
            self.broken(f"the log has {had}, but no hooks.exchanged counts them", self._first)
            self._begin_again()

    @property
    def _is_judged(self) -> bool:
        return self._knows_all and not self._has_failed and not self._is_over

    @on(e.HooksExchanged)
    def _exchanged(self, event: e.HooksExchanged) -> None:
        if self._is_judged and not (self._num_differences(event) or self._is_equal(event)):
            self._compare(event)
        self._is_over |= any(kind == e.Difference.EDGE_FAILED for kind, _, _ in event.differences)
        self._is_recorded = self._knows_all = True
        self._begin_again()

    def _num_differences(self, event: e.HooksExchanged) -> int:
        """Report the differences that the log does not explain, and return their number."""
        num_differences = 0
        for kind, number, what in event.differences:
            life = self.lives.of(number)
            is_safe = kind == e.Difference.SAFE_ANSWER and life is not None and life.quarantined
            if is_safe and life is not None and self._take_back(life.request_id):
                continue
            num_differences += 1
            of = {"job": "job", "reminder": "job", "report": "job", "pending work": "job"}.get(kind, "")
            of = of or ("block" if kind in (e.Difference.BLOCK, e.Difference.LOAD_ERROR) else "life")
            request_id = life.request_id if life is not None and of == "life" else ""
            where = "" if number == e.NO_LIFE else f" of {of} {number}"
            self.broken(f"{kind}{where}: {what}", self._first, request_id=request_id)
        return num_differences

    def _is_equal(self, event: e.HooksExchanged) -> bool:
        return all(getattr(event, name) == number for name, number in self._num.items())

    def _compare(self, event: e.HooksExchanged) -> None:
        for name, number in self._num.items():
            counted = getattr(event, name)
            if counted != number:
                self.broken(f"hooks.exchanged counts {counted} {_WORDS[name]}, the log has {number}", self._first)

    def _begin_again(self) -> None:
        self._num = dict.fromkeys(_COUNTED, 0)
        self._answers.clear()
        self._first = 0
        self._has_failed = False
