"""Compares the events in the log with the values that the hooks and vLLM exchange.

The connector calls `Edge` before a hook returns, and for some hooks also when vLLM calls the hook. `Edge` also gets
every recorded event. If the code between the log and vLLM has a bug, an event differs from the exchanged value. `Edge`
records counts and differences as the event `hooks.exchanged`, which the rule TOLD_AS_DECIDED checks. This module must
not decide anything, and must not use code that answers the hooks.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from kvledger.adapters.vllm.journal import Journal
from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.metadata import Ends, StepJobs, StepReport, WorkerReports
from kvledger.adapters.vllm.unfilled_blocks import UnfilledBlocks
from kvledger.lifecycle import LedgerCorrupt, logged_request_id, on, raise_if_unstoppable
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT, Difference

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

_Issued = e.LoadIssued | e.SaveIssued | e.TailSaveIssued
_Settled = e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed
_Report = tuple[tuple[int, ...], bool, tuple[int, ...], int, bool]
"""(job ids, whether the report is a repetition, when the copy began and ended, rank, whether the copy succeeded)."""
_NOTHING: frozenset[str] = frozenset()
_Entry = tuple[Difference, int | str, str]
"""One thing that workers get with a step: (kind, its job id, block or vLLM request id, its field of `StepJobs`)."""
_UNKNOWN: _Entry = (Difference.END, "", "")
_OTHERS = (
    (Difference.REMINDER, "awaited"),
    (Difference.REMINDER, "asked_after"),
    (Difference.BLOCK, "undeliverable_block_ids"),
    (Difference.END, "failed_loads"),
    (Difference.END, "finished_saves"),
)
_END_FIELDS = ("finished_sending", "finished_recving", "failed_recving")
_LISTS = ("saves_before_forward", "loads", "saves", "async_loads", "async_saves")
_MAX_STEPS_OUT = 64
"""An end that the workers have to report counts as missing after this many steps. Fewer steps are in flight at once."""
_MAX_DIFFERENCES = 64
"""Largest number of differences in one event; further differences are not written."""
_Parameters = ParamSpec("_Parameters")


def _safely(
    method: Callable[Concatenate[Edge, _Parameters], None],
) -> Callable[Concatenate[Edge, _Parameters], None]:
    """Wrap a method of `Edge`, so that comparing stops if the method raises.

    The method is not called if comparing has stopped, or if the journal is disabled.
    """

    @functools.wraps(method)
    def call(self: Edge, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        if self.is_off or self.journal.is_disabled:
            return
        try:
            method(self, *args, **kwargs)
            if self._differences:  # at once, before anything that follows from it
                self._record()
        except BaseException as error:  # noqa: BLE001 -- nothing may raise into vLLM
            raise_if_unstoppable(error)
            self.failed(error)

    return call


class Edge:
    """Counts the values that one connector exchanges with vLLM, and collects their differences from the log.

    Counts and differences are kept until they are recorded.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.is_off = False
        """Whether the comparison failed and has stopped."""
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._differences: list[tuple[str, int, str]] = []
        # Recorded by the ledger for the current hook.
        self._answer: e.LookupAnswered | e.LookupDeferred | None = None
        self._is_void = False
        """Whether `_answer` was withheld, so that vLLM must get the answer of 0 tokens instead."""
        self._arrived: e.RequestArrived | None = None
        self._allocated: e.BlocksAllocated | None = None
        self._finished: list[int] = []
        self._held: list[int] = []
        self._num_resets = 0
        self._delivered: list[e.EffectsDelivered] = []
        self._reported: list[e.TransferReported] = []
        self._load_errors: list[e.LoadErrorsObserved] = []
        self._refused: list[e.EndRefused] = []
        # Needed by later hooks.
        self._open: dict[str, int] = {}
        """vLLM's request id → ordinal, for lives whose `RequestFinished` is not in the log."""
        self._ordinals: dict[str, int] = {}
        """Request id in the log → ordinal, for the same lives as `_open`."""
        self._ids: dict[int, tuple[str, str]] = {}
        """Ordinal → vLLM's id and the id in the log, for lives of which the workers may still report an end."""
        self._forgotten: tuple[list[int], list[int]] = ([], [])
        """Ordinals of lives released since the last step began, and of lives released between the two last steps."""
        self._ended: set[str] = set()
        """vLLM's ids of requests that finished (`request_finished`) since the last step."""
        self.is_alone = False
        """Whether the workers are known to have no other connector. Only then are missing ends found, because
        another connector may delay ends."""
        self._num_steps = 0
        self._to_report: dict[str, tuple[int, int]] = {}
        """vLLM's request id → (ordinal of a life, number of the step that asked the workers to report an end of it)."""
        self._ends: dict[int, Ends] = {}
        """`StepJobs.delivered` → ends that the workers must report with that step's output."""
        self._kept: set[int] = set()
        """Ordinals of ended lives whose blocks vLLM keeps until an end is reported."""
        self._promised: set[int] = set()
        """Ordinals of lives whose latest lookup offered an asynchronous load that vLLM has not claimed."""
        self._unfilled = UnfilledBlocks(self._differ)
        self._receiving: set[int] = set()
        """Ordinals of lives that wait for an asynchronous load. vLLM waits for the load even if the life ends."""
        self._jobs: dict[int, _Issued] = {}
        """Job id → the decision that issued the job, until the job has ended."""
        self._reminders: dict[int, bool] = {}
        """Job id of a recorded reminder (`TransferAwaited`) → whether the step's forward waits for the job. Kept until
        the reminder is handed out."""
        self._seen: Mapping[type[e.Event], Callable[[Any], None]] = dict(_marked(self))
        journal.ledger.on_recorded = self._see
        journal.before_step = self.record

    # --- what the ledger records ---------------------------------------------------------------

    def _see(self, event: e.Event) -> None:
        see = self._seen.get(type(event))
        if see is not None and not self.is_off and not self.journal.is_disabled:
            try:
                see(event)
            except BaseException as error:  # noqa: BLE001 -- nothing may raise into vLLM
                raise_if_unstoppable(error)
                self.failed(error)

    @on(e.LookupAnswered, e.LookupDeferred)
    def _see_answer(self, event: e.LookupAnswered | e.LookupDeferred) -> None:
        self._answer, self._is_void = event, False
        if isinstance(event, e.LookupAnswered) and event.is_async:
            self._promised.add(event.ordinal)
        else:
            self._promised.discard(event.ordinal)

    @on(e.DecisionWithheld, e.RequestQuarantined)
    def _see_withheld(self, event: e.DecisionWithheld | e.RequestQuarantined) -> None:
        if self._answer is not None and event.request_id == self._answer.request_id:
            self._is_void = True

    @on(e.RequestArrived)
    def _see_arrival(self, event: e.RequestArrived) -> None:
        self._arrived = event
        self._ordinals[event.request_id] = event.ordinal

    @on(e.LoadRefused)
    def _see_refusal_of_load(self, event: e.LoadRefused) -> None:
        ordinal = self._ordinals.get(event.request_id, e.NO_LIFE)
        if ordinal in self._promised:  # vLLM still waits for the end of a load
            self._receiving.add(ordinal)

    @on(e.BlocksAllocated)
    def _see_allocation(self, event: e.BlocksAllocated) -> None:
        self._allocated = event
        ordinal = self._ordinals.get(event.request_id, e.NO_LIFE)
        if ordinal in self._promised:
            self._promised.discard(ordinal)
            if event.num_external_tokens:
                self._receiving.add(ordinal)

    @on(e.RequestFinished)
    def _see_end(self, event: e.RequestFinished) -> None:
        ordinal = self._ordinals.pop(event.request_id, e.NO_LIFE)
        self._finished.append(ordinal)
        self._promised.discard(ordinal)
        if ordinal in self._receiving:
            self._kept.add(ordinal)
        given = self._ids.get(ordinal)
        if given is not None and self._open.get(given[0]) == ordinal:
            del self._open[given[0]]

    @on(e.BlocksHeld)
    def _see_hold(self, event: e.BlocksHeld) -> None:
        self._held.append(event.ordinal)

    @on(e.RequestReleased)
    def _see_release(self, event: e.RequestReleased) -> None:
        self._forgotten[0].append(event.ordinal)

    @on(e.CacheReset)
    def _see_reset(self, _event: e.CacheReset) -> None:
        self._num_resets += 1

    @on(e.LoadIssued, e.SaveIssued, e.TailSaveIssued)
    def _see_job(self, event: _Issued) -> None:
        self._jobs[event.job_id] = event

    @on(e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed)
    def _see_settlement(self, event: _Settled) -> None:
        self._jobs.pop(event.job_id, None)
        self._reminders.pop(event.job_id, None)
        self._unfilled.settled(event.job_id)

    @on(e.TransferAwaited)
    def _see_reminder(self, event: e.TransferAwaited) -> None:
        self._reminders[event.job_id] = event.before_forward or self._reminders.get(event.job_id, False)

    @on(e.EffectsDelivered)
    def _see_delivery(self, event: e.EffectsDelivered) -> None:
        self._delivered.append(event)
        for ordinals in (event.received, event.reported):
            self._receiving.difference_update(ordinals)
            self._kept.difference_update(ordinals)

    @on(e.TransferReported)
    def _see_report(self, event: e.TransferReported) -> None:
        if not event.withheld:
            self._reported.append(event)

    @on(e.LoadErrorsObserved)
    def _see_load_errors(self, event: e.LoadErrorsObserved) -> None:
        self._load_errors.append(event)

    @on(e.EndRefused)
    def _see_refusal(self, event: e.EndRefused) -> None:
        self._refused.append(event)

    # --- the hooks -----------------------------------------------------------------------------

    @_safely
    def arrived(self, request_id: str) -> None:
        """Note a difference if the log does not have the arrival of this request (`on_new_request`)."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            self._differ(Difference.ARRIVAL, e.NO_LIFE, "the arrival of a request was not recorded")
            return
        if request_id in self._open:  # this life displaces another one
            self._forgotten[0].append(self._open[request_id])
        self._open[request_id] = arrived.ordinal
        self._ids[arrived.ordinal] = (request_id, arrived.request_id)
        self._count("num_arrivals")

    @_safely
    def answered(self, request_id: str, answer: tuple[int | None, bool]) -> None:
        """Note a difference if `get_num_new_matched_tokens` returns another answer than the log has."""
        decided, self._answer = self._answer, None
        ordinal = self._open.get(request_id, e.NO_LIFE)
        if decided is not None and decided.ordinal != ordinal:  # of another hook, or of another request
            decided = None
        expected: tuple[int | None, bool] = (0, False)
        if isinstance(decided, e.LookupDeferred) and not self._is_void:
            expected = (None, False)
        elif isinstance(decided, e.LookupAnswered) and not self._is_void:
            expected = (decided.num_external_tokens, decided.is_async)
        if answer != expected:
            kind = Difference.SAFE_ANSWER if answer == (0, False) else Difference.ANSWER
            self._differ(kind, ordinal, f"vLLM got {_words(answer)}, the log has {_words(expected)}")
        elif decided is not None and not self._is_void:
            num_tokens, is_async = answer
            self._counts["num_answers"] += 1
            if num_tokens is None:
                self._counts["num_deferred"] += 1
            elif num_tokens:
                self._counts["num_tokens"] += num_tokens
            if is_async:
                self._counts["num_async"] += 1

    @_safely
    def allocated(self, request_id: str, num_external_tokens: int) -> None:
        """Note a difference if the log lacks this allocation or its number of tokens."""
        allocated, self._allocated = self._allocated, None
        ordinal = self._open.get(request_id, e.NO_LIFE)
        if allocated is None or self._ordinals.get(allocated.request_id, e.NO_LIFE) != ordinal:
            if ordinal != e.NO_LIFE:
                self._differ(Difference.ALLOCATION, ordinal, "an allocation was not recorded")
        elif allocated.num_external_tokens != num_external_tokens:
            recorded = f"the log has {allocated.num_external_tokens}"
            self._differ(Difference.ALLOCATION, ordinal, f"vLLM claims {num_external_tokens} tokens, {recorded}")
        else:
            self._count("num_allocations")

    @_safely
    def finished(self, request_id: str, keeps_blocks: bool) -> None:
        """Note a difference if the log lacks the `RequestFinished`, or contradicts the answer `keeps_blocks`."""
        finished, held = self._finished, self._held
        self._finished, self._held = [], []
        self._ended.add(request_id)
        if not finished:
            if request_id in self._open:
                self._differ(Difference.FINISH, self._open[request_id], "it was not recorded that the request finished")
            elif keeps_blocks:
                self._differ(Difference.FINISH, e.NO_LIFE, "vLLM keeps blocks of a request that is not in the log")
            return
        ordinal = finished[0]
        if keeps_blocks:
            self._kept.add(ordinal)
        if self._ids.get(ordinal, (request_id,))[0] != request_id:
            self._differ(Difference.FINISH, ordinal, "it was recorded that another request finished")
        elif keeps_blocks is not (ordinal in held):
            what = (
                "vLLM keeps the blocks, but the log does not say so"
                if keeps_blocks
                else "the log says that vLLM keeps the blocks, but it does not"
            )
            self._differ(Difference.FINISH, ordinal, what)
        else:
            self._count("num_finished")
            self._count("num_held", keeps_blocks)

    @_safely
    def step_begins(self, finished_request_ids: Iterable[str]) -> None:
        """Begin a step, for which vLLM names the requests that have finished (`build_connector_meta`)."""
        for request_id in finished_request_ids:
            if request_id not in self._ended and request_id in self._open:
                self._differ(Difference.OPEN, self._open[request_id], "vLLM has finished the request")
        self._ended.clear()
        self._num_steps += 1
        if self._to_report and self.is_alone:
            request_id, (ordinal, asked_step) = next(iter(self._to_report.items()))
            if self._num_steps - asked_step > _MAX_STEPS_OUT:
                del self._to_report[request_id]
                what = f"it was handed out, but no output of the next {_MAX_STEPS_OUT} steps reports it"
                self._differ(Difference.END, ordinal, what)
        for ordinal in self._forgotten[1]:
            self._ids.pop(ordinal, None)
        self._forgotten = ([], self._forgotten[0])

    @_safely
    def record(self) -> None:
        """Record the counts and differences since the last call. Called before a step is recorded, and at shutdown."""
        self._record()

    @_safely
    def handed_out(self, jobs: StepJobs) -> None:
        """Note each job, reminder, block or end that only one of `jobs` (`build_connector_meta`) and the log has."""
        delivered, self._delivered = self._delivered, []
        if not delivered and not jobs:
            return
        owed = [entry for event in delivered for entry in self._owed(event)]
        given = [*self._given(jobs)]
        if sorted(owed) == sorted(given) and _UNKNOWN not in owed:
            self._count("num_handed_out", len(given))
        else:
            self._compare_handed_out(Counter(owed), Counter(given))
        for event in delivered:
            for ordinal in (*event.failed, *event.sent):
                if ordinal in self._ids:
                    self._to_report[self._ids[ordinal][0]] = ordinal, self._num_steps
        if jobs.loads or jobs.undeliverable_block_ids:
            self._unfilled.handed_out(jobs)
        if jobs.delivered and (jobs.failed_loads or jobs.finished_saves):
            failed = frozenset(jobs.failed_loads)
            self._ends[jobs.delivered] = Ends(frozenset(jobs.finished_saves), failed, failed)

    def _compare_handed_out(self, owed: Counter[_Entry], given: Counter[_Entry]) -> None:
        num_unknown = owed.pop(_UNKNOWN, 0)
        self._count("num_handed_out", (owed & given).total())
        for (kind, which, place), number in (given - owed).items():
            if kind is Difference.END and num_unknown:  # its id is forgotten
                num_unknown -= number
                self._count("num_handed_out", number)
            else:
                self._differ(kind, self._number(which), f"handed out in {place}, but not recorded there")
        for kind, which, place in owed - given:
            self._differ(kind, self._number(which), f"recorded as handed out in {place}, but was not")

    def _owed(self, event: e.EffectsDelivered) -> Iterator[_Entry]:
        for job_id in event.job_ids:
            job = self._jobs.get(job_id)
            yield Difference.JOB, job_id, "no list" if job is None else _list_of(job)
        for job_id in event.awaited:
            yield Difference.REMINDER, job_id, "awaited" if self._reminders.pop(job_id, False) else "asked_after"
        for block_id in event.block_ids:
            yield Difference.BLOCK, block_id, "undeliverable_block_ids"
        for ordinals, name in ((event.failed, "failed_loads"), (event.sent, "finished_saves")):
            for ordinal in ordinals:
                yield (Difference.END, self._ids[ordinal][0], name) if ordinal in self._ids else _UNKNOWN

    def _given(self, jobs: StepJobs) -> Iterator[_Entry]:
        for name in _LISTS:
            for job in getattr(jobs, name):
                yield Difference.JOB, job.job_id, self._list_of_job(name, job)
        for kind, name in _OTHERS:
            for which in getattr(jobs, name):
                yield kind, which, name

    def _number(self, which: int | str) -> int:
        """Return the ordinal for vLLM's request id. A number is returned as it is."""
        if isinstance(which, int):
            return which
        return next((ordinal for ordinal, (given, _) in self._ids.items() if given == which), e.NO_LIFE)

    def _list_of_job(self, name: str, job: Any) -> str:
        """Return `name`, the field of `StepJobs` with this job; add a remark if the log has other pages for the job."""
        decided = self._jobs.get(job.job_id)
        if decided is None or (decided.block_ids == job.block_ids and decided.slots == job.slots):
            return name
        pages = zip(decided.block_ids, decided.slots, strict=True)
        copied = [(block_id, slot) for block_id, slot in pages if slot != NO_SLOT]
        is_same = copied == list(zip(job.block_ids, job.slots, strict=False))
        return name if is_same else f"{name} with other pages"

    @_safely
    def pending_work(self, answer: bool) -> None:
        """Note a difference if `has_pending_push_work` answers False although a recorded job is not settled."""
        if not answer and self._jobs:
            self._differ(Difference.PENDING_WORK, min(self._jobs), "kvledger answered that nothing is pending")

    @_safely
    def pending_frees(self, answer: bool) -> None:
        """Note a difference if `has_pending_block_frees` answers True, but vLLM keeps no finished request's blocks."""
        if answer and not self._kept:
            self._differ(
                Difference.PENDING_FREES, e.NO_LIFE, "kvledger asked vLLM to wait for blocks, but none are kept"
            )

    @_safely
    def reset(self, answer: bool | None) -> None:
        """Note a difference if `reset_cache` answers True without a reset in the log, or False in spite of one."""
        num_resets, self._num_resets = self._num_resets, 0
        if bool(answer) is not bool(num_resets):
            self._differ(Difference.RESET, e.NO_LIFE, f"kvledger answered {answer}, but recorded {num_resets} resets")
        else:
            self._count("num_resets", num_resets)

    # --- what the workers report ---------------------------------------------------------------

    def output_arrives(self, output: KVConnectorOutput) -> Arrived | None:
        """Read the workers' output before `update_connector_output` uses it; return the values for `output_leaves`."""
        self._reported, self._load_errors, self._refused, self._delivered = [], [], [], []
        if self.is_off or self.journal.is_disabled:
            return None
        try:
            arrived = Arrived(output)
            self._unfilled.compare(arrived.steps, arrived.job_reports)
            return arrived
        except BaseException as error:  # noqa: BLE001 -- nothing may raise into vLLM
            raise_if_unstoppable(error)
            self.failed(error)
            return None

    @_safely
    def output_leaves(self, arrived: Arrived | None, output: KVConnectorOutput) -> None:
        """Note differences between the workers' output and the log, before vLLM acts on the output."""
        delivered, self._delivered = self._delivered, []
        if arrived is None:
            return
        if arrived.reports or self._reported:
            self._compare_reports(arrived.reports)
        for step in arrived.steps:
            self._compare_step(step)
        if arrived.load_errors or self._load_errors:
            recorded = frozenset(block_id for event in self._load_errors for block_id in event.block_ids)
            self._count("num_load_errors", len(recorded & arrived.load_errors))
            for block_id in recorded ^ arrived.load_errors:
                which = "recorded, but did not arrive" if block_id in recorded else "not recorded"
                self._differ(Difference.LOAD_ERROR, block_id, which)
        received = {ordinal for event in delivered for ordinal in event.received}
        reported = {ordinal for event in delivered for ordinal in event.reported}
        if arrived.has_ends or received or reported or output.finished_recving or output.finished_sending:
            self._compare_ends(arrived, output, received, reported)

    def _compare_reports(self, arrived: frozenset[_Report]) -> None:
        recorded = frozenset(
            (event.job_ids, event.is_repeated, event.moments, rank, is_done)
            for event in self._reported
            for ranks, is_done in ((event.ranks_done, True), (event.ranks_failed, False))
            for rank in ranks
        )
        self._count("num_reports", sum(len(report[0]) for report in recorded & arrived))
        for report in recorded ^ arrived:
            job_ids, _, _, rank, is_done = report
            how = "done" if is_done else "failed"
            which = "recorded, but did not arrive" if report in recorded else "not recorded"
            for job_id in job_ids:
                self._differ(Difference.REPORT, job_id, f"reported as {how} by rank {rank}: {which}")

    def _compare_step(self, step: StepReport) -> None:
        """Note each end that a rank had to report to vLLM in a step's output and did not, or reported unasked."""
        expected = self._ends.get(step.delivered)
        for earlier in [delivered for delivered in self._ends if delivered < step.delivered]:
            del self._ends[earlier]
        if step.ends is None:
            return
        for field in _END_FIELDS:
            expected_ids: frozenset[str] = frozenset() if expected is None else getattr(expected, field)
            given: frozenset[str] = getattr(step.ends, field)
            for request_id in expected_ids ^ given:
                is_missing = request_id in expected_ids
                what = "did not report the end" if is_missing else "reported an end that kvledger did not ask for"
                detail = f"rank {step.rank} {what} in {field}"
                self._differ(Difference.END, self._number(request_id), detail)

    def _compare_ends(
        self, arrived: Arrived, output: KVConnectorOutput, received: set[int], reported: set[int]
    ) -> None:
        added = {self._ids[ordinal][0] for ordinal in received if ordinal in self._ids}
        reported_ids: set[str] = set()
        num_missing = 0
        for field, before in arrived.ends.items():
            after = frozenset(getattr(output, field) or ())
            refused = {each.request_id for each in self._refused if each.field == field}
            expected = {each for each in before if not refused or self._logged(each) not in refused}
            reported_ids |= expected
            if field == "finished_recving":
                expected |= added
                num_missing = len(added - after)
            for request_id in after ^ expected:
                which = "went to vLLM, but is not recorded" if request_id in after else "did not go to vLLM"
                self._differ(Difference.END, self._number(request_id), f"{field} {which}")
        self._count("num_received", len(received) - num_missing)
        found = {self._to_report.pop(request_id)[0] for request_id in reported_ids if request_id in self._to_report}
        for ordinal in found ^ reported:
            if ordinal in found or ordinal in self._ids:
                which = "not recorded" if ordinal in found else "recorded, but did not arrive"
                self._differ(Difference.END, ordinal, f"reported by the workers, {which}")

    def _logged(self, request_id: str) -> str:
        ordinal = self._open.get(request_id, e.NO_LIFE)
        lives = (logged for given, logged in self._ids.values() if given == request_id)
        return self._ids[ordinal][1] if ordinal in self._ids else next(lives, logged_request_id(request_id))

    # --- what is recorded ----------------------------------------------------------------------

    def _count(self, name: str, number: int = 1) -> None:
        if number:
            self._counts[name] += number

    def _differ(self, kind: Difference, number: int, what: str) -> None:
        if len(self._differences) < _MAX_DIFFERENCES:
            self._differences.append((kind.value, number, what))

    def _record(self) -> None:
        if self._counts or self._differences:
            exchanged = e.HooksExchanged(**self._counts, differences=tuple(self._differences))
            self._counts, self._differences = defaultdict(int), []
            self.journal.observe(exchanged)

    def failed(self, error: BaseException) -> None:
        """Stop comparing because of this error, and record that comparing has stopped."""
        self.is_off = True
        self.journal.ledger.on_recorded = None
        what = type(error).__name__
        messages.error(
            "the answers of hooks are no longer compared with the log, because a comparison failed; report this "
            "with the log",
            error=what,
        )
        try:
            self.journal.observe(e.HooksExchanged(differences=((Difference.EDGE_FAILED.value, 0, what),)))
        except BaseException as corrupt:  # noqa: BLE001 -- as in any hook
            raise_if_unstoppable(corrupt)
            error = corrupt
        if isinstance(error, LedgerCorrupt):
            self.journal.hook_failed("edge", "", error)


class Arrived:
    """The workers' output as `update_connector_output` received it."""

    def __init__(self, output: KVConnectorOutput) -> None:
        worker_meta = output.kv_connector_worker_meta
        reports: dict[tuple[tuple[int, ...], bool, tuple[int, ...], int], bool] = {}
        self.job_reports = worker_meta.reports if isinstance(worker_meta, WorkerReports) else ()
        for report in self.job_reports:
            which = (report.job_ids, report.is_repeated, report.moments, report.rank)
            reports.setdefault(which, report.done)
        self.reports: frozenset[_Report] = frozenset((*which, is_done) for which, is_done in reports.items())
        """The first report of each rank about each copy."""
        self.steps = worker_meta.steps if isinstance(worker_meta, WorkerReports) else ()
        self.load_errors = frozenset(output.invalid_block_ids or ())
        self.ends = {
            field: frozenset(ids) if (ids := getattr(output, field, None)) else _NOTHING for field in _END_FIELDS
        }
        self.has_ends = any(self.ends.values())


def _list_of(job: _Issued) -> str:
    """Return the name of the list in `StepJobs` that the job belongs to."""
    if isinstance(job, e.LoadIssued):
        return "async_loads" if job.is_async else "loads"
    if isinstance(job, e.TailSaveIssued) or job.before_forward:
        return "saves_before_forward"
    return "async_saves" if job.is_async else "saves"


def _words(answer: tuple[int | None, bool]) -> str:
    num_tokens, is_async = answer
    if num_tokens is None:
        return "no answer yet"
    return f"{num_tokens} tokens{', asynchronously' if is_async else ''}"


def _marked(edge: Edge) -> Iterator[tuple[type[e.Event], Callable[[Any], None]]]:
    """Yield (event class, method) for every method that is marked with `on`."""
    for name, function in vars(Edge).items():
        for event_class in getattr(function, "event_classes", ()):
            yield event_class, getattr(edge, name)
