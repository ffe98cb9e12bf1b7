"""Ends that vLLM waits for: the ends of asynchronous loads, and of copies for which vLLM keeps blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvledger.adapters.recorded import payloads
from kvledger.lifecycle import events as e
from kvledger.lifecycle import on
from kvledger.lifecycle.audit import AuditModel, Checker

MAX_SILENT_NS = 60 * 10**9
"""Nanoseconds after which an end that vLLM waits for counts as forgotten."""


class RuleOfEnds(Checker):
    """Base of rules about ends that vLLM waits for. Ends are stored by request id, because reports have only ids."""

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self.waiting: dict[str, tuple[int, int]] = {}
        """Request id → sequence number and time of the event that issued an asynchronous load."""
        self.kept: dict[str, tuple[int, int]] = {}
        """Request id → sequence number and time of the answer that keeps the request's blocks."""

    @on(e.LoadIssued)
    def _issued(self, event: e.LoadIssued) -> None:
        if event.is_async:
            self.waiting[event.request_id] = self.moment.sequence, self.moment.time_ns

    @on(payloads.EndReturned)
    def _end_returned(self, answer: payloads.EndReturned) -> None:
        if answer.keeps_blocks and self.moment.life is not None:
            self.kept[self.moment.life.request_id] = self.moment.sequence, self.moment.time_ns


class CompletionOnce(RuleOfEnds):
    """COMPLETION_ONCE: vLLM gets the end of each asynchronous load, and each release of kept blocks, exactly once.

    vLLM asserts that it knows each reported request. If the request has ended, vLLM frees its blocks
    (`v1/core/sched/scheduler.py`, _update_from_kv_xfer_finished, 0.32).

    Verifies: for the reports:

    - Each id in `finished_recving` and `failed_recving` is the id of a request that waits for a load.
    - Each id in `finished_sending` is the id of an ended request whose blocks are kept.
    - No end is reported twice, and no other request is reported.
    - If the load of an ended request is reported, the release of its kept blocks is not reported afterwards, because
      vLLM has freed these blocks.
    - If the recorded connector is a child of a `MultiConnector`, its workers report only ends of its own loads and of
      blocks that it keeps.
    - If a `MultiConnector` is recorded, no child reports a load for which another child was chosen, or the release of
      blocks that only other children keep. Each worker reports a release once, even while the `MultiConnector` waits
      for another child.

    Does not verify: ends of loads and of kept blocks from before the log or the audit; that an end is ever reported
    (LIVENESS).
    """

    rule = "COMPLETION_ONCE"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._ended: dict[tuple[str, bool], int] = {}
        """(request id, whether of kept blocks) → sequence number of the report to vLLM, until the id arrives again."""
        self._is_alone = True
        self._is_from_beginning = True
        self._chosen: dict[str, payloads.LoadChosen] = {}
        """Request id → child of a recorded `MultiConnector` that loads for it."""
        self._named: set[tuple[str, bool, int]] = set()
        """(request id, whether of kept blocks, child) of violations. Each violation is reported once in a life."""
        self._kept_by: dict[str, frozenset[int]] = {}
        """Request id → children of a recorded `MultiConnector` that keep its blocks, if the log names them."""
        self._reported_by_workers: dict[str, set[tuple[int, int]]] = {}
        """Request id → (child, rank) of workers that reported the release of its blocks, until vLLM gets the end."""
        self._reporters: dict[tuple[str, bool], dict[str, None]] = {}
        """(request id, whether of kept blocks) → classes of the connectors that reported the end in this output."""

    def begin(self) -> None:
        """Begin in the middle of a log: accept ends that may have been pending before."""
        self._is_alone = self._is_from_beginning = False

    @on(e.LogNote)
    def _noted(self, event: e.LogNote) -> None:
        if event.text.startswith(payloads.CHILD):
            self._is_alone = False

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        for was_kept in (False, True):
            self._ended.pop((event.request_id, was_kept), None)
        self._chosen.pop(event.request_id, None)
        self._kept_by.pop(event.request_id, None)
        self._reported_by_workers.pop(event.request_id, None)
        self._named = {named for named in self._named if named[0] != event.request_id} if self._named else self._named

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        if not self._is_alone:  # another child may load into them
            self._ended.pop((event.request_id, False), None)

    @on(payloads.EndReturned)
    def _kept(self, answer: payloads.EndReturned) -> None:
        if answer.kept_by and self.moment.life is not None:
            self._kept_by[self.moment.life.request_id] = frozenset(answer.kept_by)

    @on(payloads.LoadChosen)
    def _load_chosen(self, chosen: payloads.LoadChosen) -> None:
        if self.moment.life is not None:
            self._chosen[self.moment.life.request_id] = chosen

    @on(payloads.WorkersReported)
    def _output_begins(self, _ends: payloads.WorkersReported) -> None:
        self._reporters.clear()

    @on(payloads.ReportedBy)
    def _reported_by(self, ends: payloads.ReportedBy) -> None:
        received = dict.fromkeys((*ends.finished_recving, *ends.failed_recving))
        for ids, owed, was_kept in ((received, self.waiting, False), (ends.finished_sending, self.kept, True)):
            for request_id in ids:
                self._reporters.setdefault((request_id, was_kept), {})[ends.connector] = None
                what = self._breach_of(request_id, ends, owed, was_kept=was_kept)
                if was_kept:
                    self._reported_by_workers.setdefault(request_id, set()).add((ends.child, ends.rank))
                if what and (request_id, was_kept, ends.child) not in self._named:
                    self._named.add((request_id, was_kept, ends.child))
                    end = "the release of kept blocks" if was_kept else "the end of an asynchronous load"
                    detail = f"{ends.connector} reports {end} of {request_id!r}, {what}"
                    self.broken(detail, owed.get(request_id, (0, 0))[0], request_id=request_id)

    def _breach_of(
        self, request_id: str, ends: payloads.ReportedBy, owed: Mapping[str, tuple[int, int]], *, was_kept: bool
    ) -> str:
        if was_kept and (ends.child, ends.rank) in self._reported_by_workers.get(request_id, ()):
            return "a second time"
        is_owed = request_id in owed or (request_id, was_kept) in self._ended or not self._is_from_beginning
        if ends.child == payloads.OWN:
            return "" if is_owed else "but has no such end pending"
        if was_kept and not is_owed:  # a kvledger child removes it before vLLM gets it
            return "but no child has such an end pending"
        keepers = self._kept_by.get(request_id, frozenset()) if was_kept else frozenset()
        if keepers and ends.child not in keepers:
            return "but only other children keep these blocks"
        chosen = None if was_kept or request_id not in owed else self._chosen.get(request_id)
        return "" if chosen is None or chosen.child == ends.child else f"but {chosen.connector} loads for it"

    @on(payloads.ReportedToVLLM)
    def _reported(self, ends: payloads.ReportedToVLLM) -> None:
        self._check(dict.fromkeys((*ends.finished_recving, *ends.failed_recving)), ends.finished_sending)

    def _check(self, received: Iterable[str], sent: Iterable[str]) -> None:
        for request_id in sent:
            self._kept_by.pop(request_id, None)
            self._reported_by_workers.pop(request_id, None)
        for request_id in self.kept.keys() & set(received) if self._is_alone else ():  # requests that have ended
            del self.kept[request_id]
            self._ended[request_id, True] = self.moment.sequence
        for ids, owed, was_kept, what in (
            (received, self.waiting, False, "the end of an asynchronous load"),
            (sent, self.kept, True, "the release of kept blocks"),
        ):
            for request_id in ids:
                known = owed.pop(request_id, None)
                before = self._ended.get((request_id, was_kept), 0)
                if known is not None:
                    self._ended[request_id, was_kept] = self.moment.sequence
                elif before or self._is_alone:
                    again = "a second time" if before else "but does not wait for it"
                    reporters = ", ".join(self._reporters.get((request_id, was_kept), ()))
                    source = f" from {reporters}" if reporters else ""
                    detail = f"vLLM gets {what} of {request_id!r}{source}, {again}"
                    self.broken(detail, before, request_id=request_id)


class Liveness(RuleOfEnds):
    """LIVENESS: every end that vLLM waits for is reported.

    Verifies: at each step, vLLM has waited at most a minute for each end of an asynchronous load, and for each release
    of kept blocks.
    Does not verify: ends that were pending for less than a minute when the log ended; anything after the last step.
    """

    rule = "LIVENESS"

    @on(payloads.ReportedToVLLM)
    def _reported(self, ends: payloads.ReportedToVLLM) -> None:
        for request_id in (*ends.finished_recving, *ends.failed_recving):
            self.waiting.pop(request_id, None)
            self.kept.pop(request_id, None)  # it has ended, and vLLM frees the blocks now
        for request_id in ends.finished_sending:
            self.kept.pop(request_id, None)

    @on(e.StepScheduled)
    def _step(self, event: e.StepScheduled) -> None:
        ends = (self.waiting, "the end of its asynchronous load"), (self.kept, "the release of its kept blocks")
        for pending, what in ends:
            for request_id, (sequence, time_ns) in list(pending.items()):
                if event.time_ns - time_ns > MAX_SILENT_NS:
                    del pending[request_id]
                    detail = f"vLLM has waited {(event.time_ns - time_ns) // 10**9} s for {what}"
                    self.broken(detail, sequence, request_id=request_id)
