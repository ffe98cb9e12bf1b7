"""What vLLM's scheduler is owed: one end of each asynchronous load, one end of each delayed free. Exactly one.

vLLM knows these by request id alone and asserts on a second one, so no worker decides on its own: the ledger knows
jobs and ranks, and what it has decided is told once. A load that came through is told by the scheduler side itself. A
load that failed and blocks that may be freed are told by every worker in its next step, because only there vLLM takes
them (`v1/core/sched/scheduler.py` and `kv_connector/utils.py`, 0.32, and `MultiConnector`, which counts savers there).

Folded from decisions and nothing else, but for one thing: where the ledger is corrupt or fails over a report, reports
are counted here, so that no request waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.adapters.vllm.metadata import JobReport
from kvledger.lifecycle import events as e


@attrs.define
class _Job:
    request_id: str
    is_load: bool
    ranks: set[int]
    failed: bool = False


class Deliveries:
    """Takes up decisions, and hands out what is to be told now."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._jobs: dict[int, _Job] = {}
        """Asynchronous jobs in flight."""
        self._promised: set[str] = set()
        """Requests whose last answer was that a load will run beside the steps."""
        self._receiving: set[str] = set()
        """Requests that wait for the end of their load, or for vLLM to hear of it."""
        self._held: set[str] = set()
        """Finished requests out of whose blocks a copy was reading when they ended."""
        self._coming_back: set[str] = set()
        """Requests that have ended, whose blocks vLLM keeps until it hears of the end of a copy."""
        self._received: list[str] = []
        self._failed: list[str] = []
        self._sent: list[str] = []

    @property
    def is_owing(self) -> bool:
        """Whether something waits to be told."""
        return bool(self._received or self._failed or self._sent)

    def take_up(self, decision: e.Event) -> None:
        """One decision of the ledger."""
        if isinstance(decision, e.LookupAnswered):
            (self._promised.add if decision.is_async else self._promised.discard)(decision.request_id)
        elif isinstance(decision, e.LoadIssued | e.SaveIssued):
            if decision.is_async:
                is_load = isinstance(decision, e.LoadIssued)
                if is_load:
                    self._receiving.add(decision.request_id)
                self._jobs[decision.job_id] = _Job(decision.request_id, is_load, set(range(self._num_ranks)))
        elif isinstance(decision, e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed):
            self._settled(decision.job_id, failed=isinstance(decision, e.LoadFailed))
        elif isinstance(decision, e.BlocksHeld):
            # While a load has not ended vLLM keeps them anyway, and hears of one end only; one end is answered once.
            if decision.request_id not in self._receiving | self._coming_back:
                self._held.add(decision.request_id)
        elif isinstance(decision, e.RequestReleased):
            self._promised.discard(decision.request_id)
            self._free(decision.request_id)

    def withdraw(self, request_id: str) -> None:
        """The answer that was decided last was not given."""
        self._promised.discard(request_id)

    def refuse(self, request_id: str) -> bool:
        """A promised load will not be: tell of it as failed. False where the promise was of a synchronous one."""
        if request_id not in self._promised:
            return False
        self._promised.discard(request_id)
        if request_id not in self._receiving:  # else its job is recorded, and will come to an end
            self._receiving.add(request_id)
            self._failed.append(request_id)
        return True

    @property
    def is_freeing(self) -> bool:
        """Whether blocks of a request that has ended will be free when vLLM hears of the end of a copy."""
        return bool(self._coming_back)

    def is_held(self, request_id: str) -> bool:
        """Whether its blocks are to be kept, or are kept anyway until its load ends."""
        return request_id in self._held or request_id in self._receiving

    def keep(self, request_id: str) -> None:
        """Let `hold` say that its blocks are kept until no copy reads them."""
        self._held.add(request_id)

    def hold(self, request_id: str) -> bool:
        """A request ends now; whether vLLM is to keep its blocks. It does so by itself where a load has not ended."""
        is_held = request_id in self._held
        if is_held or request_id in self._receiving:
            self._coming_back.add(request_id)
        return is_held

    def heard(self, received: Iterable[str], sent: Iterable[str]) -> None:
        """VLLM knows of the end of these loads, and that the blocks of these requests are free."""
        self._receiving.difference_update(received)
        self._coming_back.difference_update(received, sent)

    def count(self, reports: Iterable[JobReport]) -> None:
        """Remember who has reported; nothing follows from it while the ledger decides."""
        for report in reports:
            job = self._jobs.get(report.job_id)
            if job is not None:
                job.ranks.discard(report.rank)
                job.failed |= not report.done

    def settle_counted(self) -> None:
        """Settle what every rank has reported, where the ledger did not."""
        for job_id, job in [(job_id, job) for job_id, job in self._jobs.items() if not job.ranks]:
            self._settled(job_id, failed=job.failed)
        for request_id in tuple(self._held):
            self._free_unless_read(request_id)

    def take_received(self) -> list[str]:
        """Requests whose load is in place."""
        received, self._received = self._received, []
        return received

    def take_failed(self) -> tuple[str, ...]:
        """Requests whose load failed."""
        failed, self._failed = tuple(self._failed), []
        return failed

    def take_sent(self) -> tuple[str, ...]:
        """Finished requests whose blocks nobody reads any more."""
        sent, self._sent = tuple(self._sent), []
        return sent

    def _settled(self, job_id: int, *, failed: bool) -> None:
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        if job.is_load:
            (self._failed if failed else self._received).append(job.request_id)
        else:
            self._free_unless_read(job.request_id)

    def _free_unless_read(self, request_id: str) -> None:
        if request_id in self._held and all(job.request_id != request_id for job in self._jobs.values()):
            self._free(request_id)

    def _free(self, request_id: str) -> None:
        if request_id not in self._held:
            return
        self._held.discard(request_id)
        if request_id in self._coming_back:
            self._sent.append(request_id)
