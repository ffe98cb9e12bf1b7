"""Which copies are under way, and which blocks are given to be filled; what the rules about both have in common.

A copy is under way from the metadata that hands it to the workers until the log has its end: by its job, by its
request, or because its step is over (`payloads.ENDS`). One whose end no log shows is over at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import ClassVar, NamedTuple

from kvledger.adapters.recorder import payloads
from kvledger.adapters.recorder.payloads import payload_of
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Checker, Model, on
from kvledger.lifecycle.windows import NULL_BLOCK


class Begun(NamedTuple):
    """A copy, and when and for whom it began."""

    sequence: int
    request_id: str
    ordinal: int
    """Of the life; -1 where it is nobody's who still has the blocks."""
    copy: payloads.Transferred

    @property
    def block_ids(self) -> frozenset[int]:
        """Without those that stand for what a window does not see."""
        return frozenset(self.copy.block_ids) - {NULL_BLOCK}


class RuleOfCopies(Checker):
    """A rule about copies that begin, or about blocks that are given while copies are under way."""

    judges_loads: ClassVar[bool]
    """Whether `begins` wants loads; else it wants saves."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._under_way: dict[str, list[Begun]] = {}
        """Job -> its copies."""
        self._awaited: frozenset[str] = frozenset()
        """Jobs that are over before this step computes anything."""
        self.given: dict[int, int] = {}
        """Block -> ordinal of the life that is to fill it from this step on."""
        self._num_own: dict[str, int] = {}
        """Request id -> blocks at the front of its table that the next allocation does not give anew."""
        self.num_filled: dict[str, int] = {}
        """Request id -> blocks at the front of its table that were filled when it was given the others."""

    # --- for the rules ------------------------------------------------------------------------

    def begins(self, begun: Begun) -> None:
        """A copy begins; the others are under way."""

    def step_built(self) -> None:
        """All copies of the step have begun, and `given` is complete."""

    def under_way(self, *, loads: bool) -> Iterator[Begun]:
        """Copies of one direction."""
        return (begun for begun in chain(*self._under_way.values()) if begun.copy.is_load is loads)

    def given_away(self, *, loads: bool) -> None:
        """Is a block of such a copy given to somebody else?"""
        for begun in self.under_way(loads=loads):
            taken = {block for block in begun.block_ids if self.given.get(block, begun.ordinal) != begun.ordinal}
            # What one request computes in a step others may share in that very step, and save behind it.
            taken = taken and taken.difference(self.tables.of(begun.ordinal) or ())
            if taken:
                what = f"load {begun.copy.job} still fills" if loads else f"save {begun.copy.job} still reads"
                detail = f"block {min(taken)} is given away, which {what}"
                self.broken(detail, begun.sequence, request_id=begun.request_id)

    # --- what is under way --------------------------------------------------------------------

    @on(e.ExtensionObserved)
    def _observed(self, event: e.ExtensionObserved) -> None:
        copy = payload_of(event)
        if isinstance(copy, payloads.Transferred):
            ordinal = -1 if self.moment.life is None else self.moment.life.ordinal
            self._begin(Begun(self.moment.sequence, event.request_id, ordinal, copy))

    def _begin(self, begun: Begun) -> None:
        if begun.copy.job not in self._awaited:
            if begun.copy.is_load is self.judges_loads:
                self.begins(begun)
            if begun.copy.ends_with:
                self._under_way.setdefault(begun.copy.job, []).append(begun)

    @on(e.ExtensionNoted)
    def _noted(self, event: e.ExtensionNoted) -> None:
        payload = payload_of(event)
        if isinstance(payload, payloads.TransferredFor):
            self._begin(Begun(self.moment.sequence, payload.request_id, -1, payload.copy))
        elif isinstance(payload, payloads.Returned):
            if payload.hook == "build_connector_meta":
                if self.given and self._under_way:
                    self.step_built()
                self.given.clear()
        elif isinstance(payload, payloads.TransfersEnded | payloads.TransfersAwaited):
            if isinstance(payload, payloads.TransfersAwaited):
                self._awaited = frozenset(payload.jobs)
            for job in payload.jobs:
                self._under_way.pop(job, None)
        elif isinstance(payload, payloads.ReportedToVLLM):
            self._end_of({*payload.finished_recving, *payload.failed_recving}, is_load=True)
            self._end_of(set(payload.finished_sending), is_load=False)

    def _end_of(self, request_ids: set[str], *, is_load: bool) -> None:
        if request_ids:
            self._end(
                lambda begun: (
                    begun.copy.ends_with == payloads.REQUEST
                    and begun.copy.is_load is is_load
                    and begun.request_id in request_ids
                )
            )

    def _end(self, is_over: Callable[[Begun], bool]) -> None:
        for job, copies in list(self._under_way.items()):
            left = [begun for begun in copies if not is_over(begun)]
            if left:
                self._under_way[job] = left
            else:
                del self._under_way[job]

    # --- what is given ------------------------------------------------------------------------

    @on(e.LookupRequested)
    def _asked(self, event: e.LookupRequested) -> None:
        configuration = self.configuration
        self._num_own[event.request_id] = (
            event.num_computed_tokens // configuration.block_size * len(configuration.windows)
        )

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        num_own = self._num_own.get(event.request_id)
        self._num_own[event.request_id] = len(event.block_ids)
        self.num_filled[event.request_id] = num_own or 0
        if self.moment.life is not None and num_own is not None:
            self.given.update(dict.fromkeys(event.block_ids[num_own:], self.moment.life.ordinal))
            self.given.pop(NULL_BLOCK, None)

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        if self.moment.life is not None and self.moment.life.ordinal == event.ordinal:
            self._num_own.pop(event.request_id, None)
            self.num_filled.pop(event.request_id, None)

    @on(e.StepScheduled)
    def _step(self, event: e.StepScheduled) -> None:
        self._awaited = frozenset()
        if self._under_way:
            self._end(lambda begun: begun.copy.ends_with == payloads.STEP)
        for ordinal, block_ids in event.extended:
            self.given.update(dict.fromkeys(block_ids, ordinal))
        self.given.pop(NULL_BLOCK, None)
