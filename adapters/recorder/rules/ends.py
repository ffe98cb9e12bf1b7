"""The ends that vLLM waits for: of asynchronous loads, and of what its blocks are kept for."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.adapters.recorder import payloads
from kvledger.lifecycle import events as e
from kvledger.lifecycle import on
from kvledger.lifecycle.audit import Checker, Model, Start

MAX_SILENT_NS = 60 * 10**9
"""After so long something that vLLM waits for counts as forgotten."""


class RuleOfEnds(Checker):
    """A rule about who is owed an end, by request id: vLLM knows it by nothing else."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.waiting: dict[str, tuple[int, int]] = {}
        """Request id -> event that issued an asynchronous load, and its time."""
        self.kept: dict[str, tuple[int, int]] = {}
        """Request id -> event that said its blocks are kept, and its time."""

    @on(e.LoadIssued)
    def _issued(self, event: e.LoadIssued) -> None:
        if event.is_async:
            self.waiting[event.request_id] = self.moment.sequence, self.lives.time_ns

    @on(payloads.EndReturned)
    def _end_returned(self, answer: payloads.EndReturned) -> None:
        if answer.keeps_blocks and self.moment.life is not None:
            self.kept[self.moment.life.request_id] = self.moment.sequence, self.lives.time_ns


class CompletionOnce(RuleOfEnds):
    """COMPLETION_ONCE: each asynchronous load and each kept request is reported to vLLM once, and nothing else.

    vLLM asserts that it knows whoever is named, and frees the blocks of who has ended
    (`v1/core/sched/scheduler.py`, _update_from_kv_xfer_finished, 0.32).

    Verifies: each id in `finished_recving` and `failed_recving` is of a request that waits for a load, each in
    `finished_sending` of one whose blocks are kept; each of them once. A load that is reported of a request that has
    ended frees its blocks, also those that were to be kept: nobody may name it after that.
    Does not verify: ids of nobody who was ever owed anything, where the recorder stands in a `MultiConnector` or the
    log does not begin at its beginning: they may be owed by others; that an end comes (LIVENESS).
    """

    rule = "COMPLETION_ONCE"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._ended: dict[tuple[str, bool], int] = {}
        """(request id, whether it was kept) -> event by which vLLM had it, until the id arrives again."""
        self._is_alone = True

    def begin(self, _start: Start) -> None:
        """What is owed from before is not known."""
        self._is_alone = False

    @on(e.LogNote)
    def _noted(self, event: e.LogNote) -> None:
        if event.text.startswith(payloads.CHILD):
            self._is_alone = False

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        for was_kept in (False, True):
            self._ended.pop((event.request_id, was_kept), None)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        if not self._is_alone:  # another child may load into them
            self._ended.pop((event.request_id, False), None)

    @on(payloads.ReportedToVLLM)
    def _reported(self, ends: payloads.ReportedToVLLM) -> None:
        self._check(dict.fromkeys((*ends.finished_recving, *ends.failed_recving)), ends.finished_sending)

    def _check(self, received: Iterable[str], sent: Iterable[str]) -> None:
        for request_id in self.kept.keys() & set(received) if self._is_alone else ():  # who has ended
            del self.kept[request_id]
            self._ended[request_id, True] = self.moment.sequence
        for ids, owed, was_kept, what in (
            (received, self.waiting, False, "an asynchronous load"),
            (sent, self.kept, True, "blocks that are kept"),
        ):
            for request_id in ids:
                known = owed.pop(request_id, None)
                before = self._ended.get((request_id, was_kept), 0)
                if known is not None:
                    self._ended[request_id, was_kept] = self.moment.sequence
                elif before or self._is_alone:
                    again = "a second time" if before else "who is owed none"
                    detail = f"vLLM gets an end of {what} of {request_id!r}, {again}"
                    self.broken(detail, before, request_id=request_id)


class Liveness(RuleOfEnds):
    """LIVENESS: what vLLM waits for comes to its end.

    Verifies: at each step, that no asynchronous load and no kept blocks have been without an end for a minute.
    Does not verify: what was younger when the log ended; what an engine waits for that makes no steps any more.
    """

    rule = "LIVENESS"

    @on(payloads.ReportedToVLLM)
    def _reported(self, ends: payloads.ReportedToVLLM) -> None:
        for request_id in (*ends.finished_recving, *ends.failed_recving):
            self.waiting.pop(request_id, None)
            self.kept.pop(request_id, None)  # it has ended, and vLLM frees it now
        for request_id in ends.finished_sending:
            self.kept.pop(request_id, None)

    @on(e.StepScheduled)
    def _step(self, event: e.StepScheduled) -> None:
        for who, what in ((self.waiting, "its asynchronous load"), (self.kept, "what its blocks are kept for")):
            for request_id, (sequence, time_ns) in list(who.items()):
                if event.time_ns - time_ns > MAX_SILENT_NS:
                    del who[request_id]
                    detail = f"vLLM has waited for the end of {what} for {(event.time_ns - time_ns) // 10**9} s"
                    self.broken(detail, sequence, request_id=request_id)
