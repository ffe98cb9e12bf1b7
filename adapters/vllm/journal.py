"""Records what hooks observe, checks answers and jobs, and defines what happens if a hook raises.

kvledger must not raise into vLLM. `guarded` takes a table that says what happens if a hook raises.

A job goes to the workers only if its frame is written and the job keeps vLLM's contract. kvledger reports every other
job as failed. `Journal.commit` makes one exception.

VLLM_CONTRACT: what vLLM requires of answers and jobs. kvledger checks each answer and each job, whichever code decided
it.

If vLLM got an answer or a job that breaks a requirement, its scheduler would fail an assertion or compute on missing
KV. kvledger therefore answers with 0 tokens instead, or withholds the job and reports it as failed. It records the
breach as `decision.withheld`, and quarantines the request.

These are the requirements of vLLM 0.32. S is `v1/core/sched/scheduler.py`. B and U are `v1/base.py` and `utils.py` in
`distributed/kv_transfer/kv_connector/`.

`get_num_new_matched_tokens` (S, schedule)
  - The answer is a number of tokens, 0 or more, and holds for this call only. Or it is None, and vLLM asks again
  - Computed and offered tokens are at most `num_tokens` together (S: `assert num_computed_tokens <=
    request.num_tokens`). kvledger allows one token less, because a load within the step must leave a token to compute
    (S: `assert num_new_tokens > 0`)
  - An answer without tokens is not asynchronous (S: `assert num_external_computed_tokens > 0`)
  - If there are several groups, a load is asynchronous, because vLLM then accepts no reports of unfilled blocks
    (S, `_handle_invalid_blocks`)
  - kvledger's own requirement: a load begins at the start of a block, because whole pages are copied
  - kvledger's own requirement: a load reaches no further than the saved tokens, because a promised load that fails may
    end its request (`kv_load_failure_policy`)
`update_state_after_alloc` (B)
  - Each accepted token is loaded exactly once, into the given blocks, or is reported as failed
`build_connector_meta` (B, start_load_kv and request_finished)
  - There is a load only if vLLM accepted one. It is asynchronous if, and only if, vLLM waits for its end
  - A save reads blocks that the request holds. A save of blocks that the request has lost must read them before the
    forward, unless vLLM keeps them for the save
  - A job has as many slots as blocks, and all slots are in the pool
`request_finished` (B; S, `_connector_finished`)
  - The answer is True if a copy still reads the blocks, and one `finished_sending` follows. Otherwise the answer is
    False, and no `finished_sending` follows
`finished_recving`, `finished_sending`, `failed_recving` (S, `_update_from_kv_xfer_finished`; U, KVOutputAggregator)
  - A request is reported once if it waits for a load, or if its `request_finished` was answered with True. No other
    request is reported. A failed load is in `finished_recving` and in `failed_recving`
`get_block_ids_with_load_errors` (S, `_handle_invalid_blocks`)
  - The blocks are from a table that vLLM gave. There are none if there are several groups
`reset_cache`, `has_pending_push_work` (S)
  - The answer is a bool. `has_pending_push_work` does not stay True: an unreported copy counts as
    failed after a time

`lifecycle/projections/owed.py` meets the requirements for ends. The functions below compare decisions with the
observations and with the saved tokens. They return the breach as text, or "" if there is none.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import attrs

from kvledger.adapters.figures import Totals
from kvledger.adapters.vllm.event_log import OpenedLog
from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import (
    Channel,
    Core,
    Ledger,
    LedgerConfiguration,
    LedgerCorrupt,
    PageJob,
    Projections,
    Ready,
    RequestRecord,
    Rule,
    TrustRegion,
    described,
    logged_request_id,
    raise_if_unstoppable,
    without_secrets,
)
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT, NULL_BLOCK

_JUDGED = frozenset({e.LoadIssued, e.SaveIssued, e.TailSaveIssued, e.InvariantViolated, e.ExtensionStopped})
"""Decisions that are checked against vLLM's contract, or logged for operators."""
_Owner = TypeVar("_Owner", bound="ReportsFailures")
NOT_WRITTEN = "the event log could not be written"
"""Reason in the log for withholding a correct answer or job."""


class Journal:
    """Records observations, withholds jobs that must not go out, and logs broken rules for operators.

    If the ledger is corrupt (a projection failed), the journal is disabled. kvledger then decides nothing more, but
    pending copies and ends are still completed.
    """

    def __init__(
        self,
        core: Core,
        configuration: LedgerConfiguration,
        log: OpenedLog,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.ledger = Ledger(core, configuration, log.store)
        self.log = log
        self.configuration = configuration
        self.projections = self.ledger.projections
        self.owed = self.projections.owed
        self.tracker = self.projections.tracker
        self.totals = Totals(self.projections, on_failed=self._counting_failed)
        """The source of the metrics."""
        self.is_disabled = False
        self.figures_changed = True
        self.messages = messages.bind(log=str(log.directory or "memory"))
        self._clock = clock
        self._opened_ns = clock()
        self._num_steps_disabled = 0
        self._disabled_ns = 0
        self.is_behind: Callable[[], bool] = partial(getattr, log.store, "is_behind", False)  # noqa: FBT003 -- getattr takes no names
        """Whether some events that were appended are not written to the log yet."""
        self.is_written = True
        """Whether all recorded events were in the log after the latest commit."""
        self.follow: Callable[[e.Event, Sequence[e.Event]], None] | None = None
        """Called with each observation and its decisions; must not raise."""
        self.before_step: Callable[[], None] = lambda: None
        """Called before a step is recorded; must not raise."""
        self.loads_must_not_fail = False
        """Whether vLLM delivers a wrong token if a load within a step fails."""

    def _counting_failed(self, error: BaseException) -> None:
        self.messages.error(
            "requests and copies are not counted until the engine restarts, because counting failed; report this with "
            "the log",
            error=described(error),
        )

    @property
    def has_jobs(self) -> bool:
        """Whether a job waits for a step or for its report, or vLLM waits for an end.

        If the journal is disabled, overdue copies and ends do not count.
        """
        if self.owed.is_owing:
            return True
        if not self.is_disabled:
            return len(self.projections.jobs) > 0
        return self.owed.is_waiting and not self._is_overdue

    @property
    def is_whole(self) -> bool:
        """Whether all committed events are in the log."""
        return self.is_written and not self.is_behind()

    def now(self) -> int:
        """Return the nanoseconds since the log was opened."""
        return self._clock() - self._opened_ns

    def observe(self, event: e.Event) -> list[e.Event]:
        """Record an observation and return the decisions, without jobs that break vLLM's contract.

        Raises:
            LedgerCorrupt: a projection failed. Pass this error to `hook_failed`.
        """
        try:
            decisions = self.ledger.observe(event)
        except LedgerCorrupt as error:
            self._judge(event, error.decisions)
            raise
        if decisions or not isinstance(event, e.StepScheduled):
            self.figures_changed = True
        if self.follow is not None:
            self.follow(event, decisions)
        if _JUDGED.isdisjoint(map(type, decisions)):
            return decisions
        refused = self._judge(event, decisions)
        return [decision for decision in decisions if decision not in refused] if refused else decisions

    def _judge(self, event: e.Event, decisions: Sequence[e.Event]) -> list[PageJob]:
        """Withhold jobs that break vLLM's contract and return them; log broken rules and stopped extensions."""
        refused: list[tuple[PageJob, str]] = []
        has_load = False
        for decision in decisions:
            if isinstance(decision, PageJob):
                breach = self._breach_of(decision, event, decisions, has_load=has_load)
                if breach:
                    refused.append((decision, breach))
                else:
                    has_load |= isinstance(decision, e.LoadIssued)
            elif isinstance(decision, e.InvariantViolated):
                self.messages.error(
                    "a rule is broken, so the request recomputes; `kvledger verify` on this log shows which events "
                    "broke it",
                    rule=decision.rule,
                    request_id=decision.request_id,
                    detail=decision.detail,
                    sequence=decision.cause,
                )
            elif isinstance(decision, e.ExtensionStopped):
                self.messages.error(
                    "an extension raised an exception and is off until the engine restarts; fix it or leave it out",
                    extension=decision.extension,
                    where=decision.where,
                    error=decision.error,
                    sequence=decision.cause,
                )
        for job, breach in refused:
            self.withhold(job.request_id, Rule.VLLM_CONTRACT.value, breach)
            self._withhold_job(job, e.Withheld.CONTRACT, breach)
        return [job for job, _ in refused]

    def _breach_of(self, job: PageJob, event: e.Event, decisions: Sequence[e.Event], *, has_load: bool) -> str:
        try:
            if not isinstance(job, e.LoadIssued):
                return breach_of_save(job, decisions, self.projections)
            if has_load:
                return "a second load for one allocation"
            return breach_of_load(job, event, self.projections)
        except BaseException as error:  # noqa: BLE001 -- what cannot be judged does not leave
            raise_if_unstoppable(error)
            return f"it could not be checked: {type(error).__name__}"

    def withhold(self, request_id: str, rule: str, detail: str) -> None:
        """Record that a decision was not passed on to vLLM or the workers.

        `rule` is the rule that the decision breaks; empty if it breaks none.
        """
        self.observe(e.DecisionWithheld(request_id, rule, detail, self.now()))

    def _withhold_job(self, job: PageJob, withheld: e.Withheld, detail: str) -> None:
        self._fail(job.job_id, job.request_id, withheld, f"not handed out: {detail}")

    def _fail(self, job_id: int, request_id: str, withheld: e.Withheld, error: str) -> None:
        """Report a job as failed on behalf of all workers."""
        try:
            self.observe(
                e.TransferReported(
                    job_ids=(job_id,),
                    ranks_done=(),
                    ranks_failed=tuple(range(self.configuration.num_ranks)),
                    is_repeated=False,
                    num_bytes=(0,),
                    duration_ns=0,
                    error=error,
                    withheld=withheld.value,
                    time_ns=self.now(),
                )
            )
        except BaseException as failure:  # noqa: BLE001 -- as in any hook
            raise_if_unstoppable(failure)
            self.hook_failed("withhold", request_id, failure)

    def take(self, report: e.TransferReported) -> None:
        """Record a report of the workers. Never raises.

        If the report was not recorded, this method tries one more time, because a request may wait for the report.
        """
        for _ in range(2):
            sequence = self.ledger.next_sequence
            try:
                self.observe(report)
            except BaseException as error:  # noqa: BLE001 -- as in any hook
                raise_if_unstoppable(error)
                is_recorded = self.ledger.next_sequence > sequence
                self.hook_failed("update_connector_output", "", error)
            else:
                is_recorded = True
            if is_recorded:
                return

    def ready(self) -> Ready:
        """Return the jobs and ends that the workers get with this step.

        Jobs that missed their step are first reported as failed.
        """
        ready = self.ledger.ready(Channel.WORKERS)
        if not ready.late:
            return ready
        for job in ready.late:
            self._withhold_job(job, e.Withheld.HOOK_FAILED, "build_connector_meta failed")
        return self.ledger.ready(Channel.WORKERS)

    def advance(self, ready: Ready) -> int:
        """Record that the caller hands over the jobs and ends in `ready`.

        The caller does so even if recording fails. The decisions that issued the jobs were committed earlier. The event
        recorded here is written with the next frame. Returns the event's sequence number; 0 if nothing was recorded.
        """
        sequence = self.ledger.next_sequence
        try:
            self.ledger.advance(ready)
        except BaseException as error:  # noqa: BLE001 -- as in any hook
            raise_if_unstoppable(error)
            self.hook_failed("advance", "", error)
        return sequence if self.ledger.next_sequence > sequence else 0

    def commit(self) -> bool:
        """Write the events since the last commit as one frame, before vLLM acts on them.

        Returns whether all events are in the log. If not, the jobs that this frame issues are withheld. Exception: a
        load within the step is not withheld if vLLM would deliver a wrong token without it (`loads_must_not_fail`). The
        log has the answer that promised this load.
        """
        first_sequence = self.ledger.next_sequence - self.ledger.num_uncommitted
        try:
            self.ledger.commit()
        except BaseException as error:  # noqa: BLE001 -- a log that cannot be written must not stop the engine
            raise_if_unstoppable(error)
            self.is_written = False
            self.messages.error(
                "events could not be written, for a reason other than the disk; report this with the log",
                error=described(error),
            )
        else:
            self.is_written = not self.is_behind()
        if not self.is_written:
            for job in self.owed.issued_since(first_sequence):
                is_promised = self.loads_must_not_fail and isinstance(job, e.LoadIssued) and not job.is_async
                if not is_promised:
                    self._withhold_job(job, e.Withheld.UNWRITTEN, NOT_WRITTEN)
        return self.is_written

    def decline(self, reason: str) -> None:
        """Serve no request from now on; log and record why."""
        self._disable()
        self.messages.warning("the model is declined, so its requests run as without a connector", reason=reason)
        try:
            self.observe(e.LogNote(f"{e.DECLINED}{reason}", self.now()))
        except LedgerCorrupt as error:
            self.hook_failed("decline", "", error)

    def hook_failed(self, hook: str, request_id: str, error: BaseException) -> None:
        """Log and record that a hook failed, and let the request recompute."""
        text = described(error)
        self.messages.error(
            "a hook failed, so the request recomputes; report this with the log",
            hook=hook,
            request_id=request_id,
            error=text,
        )
        # The core sees only events, so its errors hold no secrets either.
        logged = text if isinstance(error, LedgerCorrupt) else without_secrets(error)
        event = e.HookFailed(hook, request_id, logged, self.now())
        is_sound = False
        try:
            self.observe(event)
            is_sound = not self.ledger.is_corrupt
        except BaseException as again:  # noqa: BLE001 -- reporting a failure must not become one
            raise_if_unstoppable(again)
        if not is_sound and not self.is_disabled:
            self._stop_deciding()

    def _stop_deciding(self) -> None:
        """Make no more decisions. Loads and asynchronous saves still go out; other saves are withheld."""
        self._disable()
        self.messages.error(
            "the ledger is corrupt, caching is off: restart the engine when convenient, and report this with the log"
        )
        for job in self.owed.issued_since(0):
            if not (isinstance(job, e.LoadIssued) or (isinstance(job, e.SaveIssued) and job.is_async)):
                self._withhold_job(job, e.Withheld.HOOK_FAILED, "the ledger is corrupt")

    def _disable(self) -> None:
        self.is_disabled = True
        self._disabled_ns = self.now()

    @property
    def _is_overdue(self) -> bool:
        """Whether the journal has been disabled for so long that pending copies are overdue."""
        silent_ns = self.now() - self._disabled_ns
        return (
            self._num_steps_disabled >= self.configuration.max_silent_steps
            and silent_ns >= self.configuration.max_silent_ms * 1_000_000
        )

    def pass_step(self) -> None:
        """Count a step of the disabled journal, and report overdue copies as failed, so that vLLM stops waiting.

        The disabled ledger does not decide this itself. Saves are included, because vLLM keeps blocks for them.
        """
        self._num_steps_disabled += 1
        if self._is_overdue:
            for copy in self.owed.under_way():
                error = "the workers did not report the copy in time, and the disabled ledger decides nothing"
                self._fail(copy.job_id, copy.request_id, e.Withheld.OVERDUE, error)


# --- vLLM's contract ----------------------------------------------------------------------------------------------


def breach_of_answer(answer: e.LookupAnswered, asked: e.LookupRequested, projections: Projections) -> str:
    """Return how this answer to the lookup `asked` breaks vLLM's contract; empty if it does not."""
    computed, promised = asked.num_computed_tokens, answer.num_external_tokens
    if (answer.num_computed_tokens, answer.num_tokens) != (computed, asked.num_tokens):
        return (
            f"{computed} of {asked.num_tokens} tokens are computed, but the answer assumes {answer.num_computed_tokens}"
        )
    if promised == 0:
        return "the answer is asynchronous, but has nothing to load" if answer.is_async else ""
    if promised < 0 or computed + promised > asked.num_tokens - 1:
        return (
            f"{promised} tokens were promised and {computed} are computed, but at least one of the "
            f"{asked.num_tokens} tokens must be left to compute"
        )
    record = projections.tracker.get(asked.request_id)
    num_saved = 0 if record is None else _num_saved_tokens(record, projections)
    if computed + promised > num_saved:
        return f"tokens up to {computed + promised} were promised, but only {num_saved} are saved"
    if computed % projections.geometry.block_size:
        return f"a load was promised from token {computed} on, which is inside a block"
    must_be_async = projections.geometry.windows.num_groups > 1
    is_refused = must_be_async and not answer.is_async
    return "a synchronous load was promised, but the model has several groups" if is_refused else ""


def _num_saved_tokens(record: RequestRecord, projections: Projections) -> int:
    """Return how many tokens can be loaded, from token 0 on; 0 if the request is quarantined."""
    if record.trust is not TrustRegion.TRUSTED:
        return 0
    # The projection's count, never an earlier answer: a handler may have answered anything.
    num_chunks = projections.lookup_cache.num_hit_chunks(record)
    num_tokens = num_chunks * projections.geometry.chunk_size
    tail = record.tail
    if tail is None or not tail.is_saved or tail.first_token > num_tokens:
        return num_tokens
    return max(num_tokens, tail.end_token)


def breach_of_load(job: e.LoadIssued, observed: e.Event, projections: Projections) -> str:
    """Return how a load that was decided after the event `observed` breaks vLLM's contract; empty if it does not."""
    if not isinstance(observed, e.BlocksAllocated) or not observed.num_external_tokens:
        return "a load was issued, but vLLM has accepted no load"
    record = projections.tracker.get(job.request_id)
    answer = None if record is None else record.claimed
    if answer is None or observed.request_id != job.request_id:
        return "a load was issued that no lookup promised"
    expected = (answer.num_computed_tokens, observed.num_external_tokens, answer.is_async)
    issued = (job.first_token, job.num_tokens, job.is_async)
    if issued != expected:
        return f"a load (first token, tokens, asynchronous) {issued} was issued, but vLLM accepted {expected}"
    pages = projections.geometry.pages_spanning(job.first_token, job.num_tokens)
    return _breach_of_pages(job, pages, observed.block_ids, projections) or _breach_of_missing(job, projections)


def _breach_of_missing(job: e.LoadIssued, projections: Projections) -> str:
    if NO_SLOT in job.slots and not (
        projections.geometry.windows.has_any
        and all(block == NULL_BLOCK for block, slot in zip(job.block_ids, job.slots, strict=True) if slot == NO_SLOT)
    ):
        return "the load leaves out a block that vLLM allocated for it"
    return ""


def breach_of_save(job: e.SaveIssued | e.TailSaveIssued, decided: Sequence[e.Event], projections: Projections) -> str:
    """Return how a save, one of the decisions `decided`, breaks vLLM's contract; empty if it does not."""
    if isinstance(job, e.SaveIssued):
        pages = projections.geometry.pages_of(job.chunks)
        before_forward, is_async = job.before_forward, job.is_async
    else:
        pages = projections.geometry.pages_spanning(job.first_token, job.num_tokens)
        before_forward, is_async = True, False
    record = projections.tracker.of(job.ordinal)
    if record is not None and record.block_ids:
        return _breach_of_pages(job, pages, record.block_ids, projections)
    is_kept = is_async and any(isinstance(decision, e.BlocksHeld) for decision in decided)
    if not before_forward and not is_kept:
        return "a save reads blocks that are not kept until the save is done"
    lost = () if record is None else record.lost_block_ids or ()
    return _breach_of_pages(job, pages, lost, projections)


def _breach_of_pages(
    job: e.LoadIssued | e.SaveIssued | e.TailSaveIssued,
    pages: Sequence[int],
    table: Sequence[int],
    projections: Projections,
) -> str:
    num_slots, num_blocks = projections.configuration.num_slots, len(table)
    if not len(pages) == len(job.block_ids) == len(job.slots):
        return f"the numbers of pages, blocks and slots differ: {len(pages)}, {len(job.block_ids)} and {len(job.slots)}"
    is_whole = min(job.slots, default=0) >= 0 and max(job.slots, default=-1) < num_slots
    if is_whole and max(pages, default=-1) < num_blocks and tuple(map(table.__getitem__, pages)) == job.block_ids:
        return ""  # the usual case, in one comparison
    for page, block, slot in zip(pages, job.block_ids, job.slots, strict=True):
        if slot == NO_SLOT:
            continue
        if not 0 <= slot < num_slots:
            return f"slot {slot} is outside the pool of {num_slots} slots"
        if page >= num_blocks or table[page] != block:
            return f"block {block} is not at place {page} of the request's block table"
    return ""


# --- what happens when a hook raises --------------------------------------------------------------------------------


class ReportsFailures(Protocol):
    """An object whose hooks must not raise into vLLM; see `guarded`."""

    def hook_failed(self, hook: str, request_id: str, error: BaseException) -> None:
        """Record that a hook raised."""


@attrs.frozen
class Fallback:
    """What replaces a hook that raises: an answer, and methods that are called."""

    answer: Any = None
    steps: tuple[str, ...] = ()
    """Names of methods that are called in this order after the failure is recorded, each with the hook's arguments.

    A method is called even if an earlier one raised. The last result other than None becomes the hook's answer.
    """
    fails_as: str = ""
    """Name of the failed hook in the log; empty: the hook's own name. If a method of `steps` fails, the log has the
    hook's own name."""


def guarded(hooks: Mapping[str, Fallback]) -> Callable[[type[_Owner]], type[_Owner]]:
    """Make the hooks of a class never raise. `hooks`: method name → what happens if the method raises."""

    def decorate(owner: type[_Owner]) -> type[_Owner]:
        for name, fallback in hooks.items():
            setattr(owner, name, _guarded(getattr(owner, name), name.lstrip("_"), fallback))
        return owner

    return decorate


def _guarded(hook: Callable[..., Any], name: str, fallback: Fallback) -> Callable[..., Any]:
    @functools.wraps(hook)
    def call(self: ReportsFailures, /, *arguments: Any, **named: Any) -> Any:
        try:
            return hook(self, *arguments, **named)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the engine lives
            raise_if_unstoppable(error)
            self.hook_failed(fallback.fails_as or name, _request_id(arguments), error)
            return _fall_back(self, name, fallback, arguments)

    return call


def _fall_back(owner: ReportsFailures, hook: str, fallback: Fallback, arguments: Sequence[object]) -> Any:
    answer = fallback.answer
    for step in fallback.steps:
        try:
            found = getattr(owner, step)(*arguments)
        except BaseException as error:  # noqa: BLE001 -- see above
            raise_if_unstoppable(error)
            owner.hook_failed(hook, _request_id(arguments), error)
        else:
            answer = answer if found is None else found
    return answer


def _request_id(arguments: Sequence[object]) -> str:
    """Return the log's id for the request that a hook was called with; empty if it got no request."""
    try:
        return logged_request_id(str(getattr(arguments[0], "request_id", ""))) if arguments else ""
    except BaseException as error:  # noqa: BLE001 -- read from a live object of vLLM, as what just failed
        raise_if_unstoppable(error)
        return ""
