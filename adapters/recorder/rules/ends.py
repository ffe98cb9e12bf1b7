"""The ends that vLLM waits for: of asynchronous loads, and of what its blocks are kept for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.adapters.recorder import payloads
from kvledger.adapters.recorder.payloads import payload_of
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Check, Model, Moment, Start, Violation

MAX_SILENT_NS = 60 * 10**9
"""After so long something that vLLM waits for counts as forgotten."""


class _Owed:
    """Who is owed an end, by request id: vLLM knows it by nothing else."""

    def __init__(self, model: Model) -> None:
        self._lives = model.lives
        self.waiting: dict[str, tuple[int, int]] = {}
        """Request id -> event that issued an asynchronous load, and its time."""
        self.kept: dict[str, tuple[int, int]] = {}
        """Request id -> event that said its blocks are kept, and its time."""

    def checks(self) -> Iterable[tuple[type[e.Event], Check]]:
        return [(e.LoadIssued, self._issued), (e.ExtensionObserved, self._said)]

    def _issued(self, event: e.LoadIssued, moment: Moment) -> None:
        if event.is_async:
            self.waiting[event.request_id] = moment.sequence, self._lives.time_ns

    def _said(self, event: e.ExtensionObserved, moment: Moment) -> None:
        told = payload_of(event)
        if isinstance(told, payloads.EndReturned) and told.keeps_blocks:
            self.kept[event.request_id] = moment.sequence, event.time_ns


class CompletionOnce:
    """COMPLETION_ONCE: vLLM hears of each asynchronous load and of each kept request once, and of nobody else.

    vLLM asserts that it knows whoever is named, and frees the blocks of who has ended
    (`v1/core/sched/scheduler.py`, _update_from_kv_xfer_finished, 0.32).

    Verifies: each id in `finished_recving` and `failed_recving` is of a request that waits for a load, each in
    `finished_sending` of one whose blocks are kept; each of them once. A load that is reported of a request that has
    ended frees its blocks, also those that were to be kept: nobody may name it after that.
    Does not verify: ids of nobody who was ever owed anything, where the recorder stands in a `MultiConnector` or the
    log does not begin at its beginning: they may be owed by others; that an end comes (LIVENESS).
    """

    rule: ClassVar[str] = "COMPLETION_ONCE"

    def __init__(self) -> None:
        self._ended: dict[tuple[str, bool], int] = {}
        """(request id, whether it was kept) -> event by which vLLM heard of it, until the id arrives again."""
        self._is_alone = True

    def begin(self, _start: Start) -> None:
        """What is owed from before is not known."""
        self._is_alone = False

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._owed = _Owed(model)
        return [
            *self._owed.checks(),
            (e.RequestArrived, self._arrived),
            (e.BlocksAllocated, self._allocated),
            (e.LogNote, self._noted),
            (e.ExtensionNoted, self._reported),
        ]

    def _noted(self, event: e.LogNote, _moment: Moment) -> None:
        if event.text.startswith(payloads.CHILD):
            self._is_alone = False

    def _arrived(self, event: e.RequestArrived, _moment: Moment) -> None:
        for was_kept in (False, True):
            self._ended.pop((event.request_id, was_kept), None)

    def _allocated(self, event: e.BlocksAllocated, _moment: Moment) -> None:
        if not self._is_alone:  # another child may load into them
            self._ended.pop((event.request_id, False), None)

    def _reported(self, event: e.ExtensionNoted, moment: Moment) -> Iterator[Violation] | None:
        told = payload_of(event)
        if not isinstance(told, payloads.ReportedToVLLM):
            return None
        return self._check(dict.fromkeys((*told.finished_recving, *told.failed_recving)), told.finished_sending, moment)

    def _check(self, received: Iterable[str], sent: Iterable[str], moment: Moment) -> Iterator[Violation]:
        for request_id in self._owed.kept.keys() & set(received) if self._is_alone else ():  # who has ended
            del self._owed.kept[request_id]
            self._ended[request_id, True] = moment.sequence
        for ids, owed, was_kept, what in (
            (received, self._owed.waiting, False, "an asynchronous load"),
            (sent, self._owed.kept, True, "blocks that are kept"),
        ):
            for request_id in ids:
                known = owed.pop(request_id, None)
                before = self._ended.get((request_id, was_kept), 0)
                if known is not None:
                    self._ended[request_id, was_kept] = moment.sequence
                elif before or self._is_alone:
                    again = "a second time" if before else "who is owed none"
                    detail = f"vLLM hears of the end of {what} of {request_id!r}, {again}"
                    yield Violation(self.rule, moment.sequence, request_id, None, detail, (before,) if before else ())


class Liveness:
    """LIVENESS: what vLLM waits for comes to its end.

    Verifies: at each step, that no asynchronous load and no kept blocks have been without an end for a minute.
    Does not verify: what was younger when the log ended; what an engine waits for that makes no steps any more.
    """

    rule: ClassVar[str] = "LIVENESS"

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._owed = _Owed(model)
        return [*self._owed.checks(), (e.ExtensionNoted, self._reported), (e.StepScheduled, self._step)]

    def _reported(self, event: e.ExtensionNoted, _moment: Moment) -> None:
        told = payload_of(event)
        if isinstance(told, payloads.ReportedToVLLM):
            for request_id in (*told.finished_recving, *told.failed_recving):
                self._owed.waiting.pop(request_id, None)
                self._owed.kept.pop(request_id, None)  # it has ended, and vLLM frees it now
            for request_id in told.finished_sending:
                self._owed.kept.pop(request_id, None)

    def _step(self, event: e.StepScheduled, moment: Moment) -> list[Violation] | None:
        owed = self._owed
        if not owed.waiting and not owed.kept:
            return None
        found = []
        for who, what in ((owed.waiting, "its asynchronous load"), (owed.kept, "what its blocks are kept for")):
            for request_id, (sequence, time_ns) in list(who.items()):
                if event.time_ns - time_ns > MAX_SILENT_NS:
                    del who[request_id]
                    detail = f"vLLM has not heard of the end of {what} for {(event.time_ns - time_ns) // 10**9} s"
                    found.append(Violation(self.rule, moment.sequence, request_id, None, detail, (sequence,)))
        return found or None
