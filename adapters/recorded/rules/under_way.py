"""Base of the rules about copies in flight, and about blocks that a request gets while copies are in flight.

A copy begins with the metadata that gives it to the workers. The copy's field `ends_with` says how the log shows its
end (`payloads.ENDS`). A copy whose end is not in the log counts as ended at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import ClassVar, NamedTuple

from kvledger.adapters.recorded import payloads
from kvledger.lifecycle import events as e
from kvledger.lifecycle import on
from kvledger.lifecycle.audit import AuditModel, Checker
from kvledger.lifecycle.events import NULL_BLOCK


class Begun(NamedTuple):
    """A copy that has begun, the sequence number of its event, and its request."""

    sequence: int
    request_id: str
    ordinal: int
    """Ordinal of the request's life; -1: no life has the copy's blocks any more."""
    copy: payloads.Transferred

    @property
    def block_ids(self) -> frozenset[int]:
        """Return the copy's blocks. Null blocks, which stand for tokens outside a window, are left out."""
        return frozenset(self.copy.block_ids) - {NULL_BLOCK}


class RuleOfCopies(Checker):
    """Base of rules that judge copies when they begin, or blocks that a request gets while copies are in flight."""

    judges_loads: ClassVar[bool]
    """Whether `begins` is called for loads. If False, `begins` is called for saves."""

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._under_way: dict[str, list[Begun]] = {}
        """Job → the job's copies in flight."""
        self._awaited: frozenset[str] = frozenset()
        """Jobs that end before the current step computes anything."""
        self.given: dict[int, int] = {}
        """New block → ordinal of the life that got it for the current step."""

    # --- for the rules ------------------------------------------------------------------------

    def begins(self, begun: Begun) -> None:
        """Judge a copy that begins. `under_way` yields the copies that began before and are in flight."""

    def step_built(self) -> None:
        """Judge a step. All copies of the step have begun, and `given` has all blocks that requests got."""

    def under_way(self, *, loads: bool) -> Iterator[Begun]:
        """Yield the loads in flight. If `loads` is False, yield the saves in flight."""
        return (begun for begun in chain(*self._under_way.values()) if begun.copy.is_load is loads)

    def given_away(self, *, loads: bool) -> None:
        """Report each load in flight if another life got one of its blocks. If `loads` is False, check saves."""
        for begun in self.under_way(loads=loads):
            taken = {block for block in begun.block_ids if self.given.get(block, begun.ordinal) != begun.ordinal}
            # Other requests may share a block in the very step in which one computes it, and save it after that.
            taken = taken and taken.difference(self.tables.of(begun.ordinal))
            if taken:
                what = f"load {begun.copy.job} still fills it" if loads else f"save {begun.copy.job} still reads it"
                detail = f"block {min(taken)} goes to another request while {what}"
                self.broken(detail, begun.sequence, request_id=begun.request_id)

    # --- copies in flight ---------------------------------------------------------------------

    @on(payloads.Transferred)
    def _copied(self, copy: payloads.Transferred) -> None:
        life = self.moment.life
        if life is not None:
            self._begin(Begun(self.moment.sequence, life.request_id, life.ordinal, copy))

    @on(payloads.TransferredFor)
    def _copied_for(self, copied: payloads.TransferredFor) -> None:
        self._begin(Begun(self.moment.sequence, copied.request_id, -1, copied.copy))

    def _begin(self, begun: Begun) -> None:
        if begun.copy.job not in self._awaited:
            if begun.copy.is_load is self.judges_loads:
                self.begins(begun)
            if begun.copy.ends_with:
                self._under_way.setdefault(begun.copy.job, []).append(begun)

    @on(payloads.Returned)
    def _returned(self, returned: payloads.Returned) -> None:
        if returned.hook == "build_connector_meta":
            if self.given and self._under_way:
                self.step_built()
            self.given.clear()

    @on(payloads.TransfersAwaited)
    def _are_awaited(self, awaited: payloads.TransfersAwaited) -> None:
        self._awaited = frozenset(awaited.jobs)

    @on(payloads.TransfersAwaited, payloads.TransfersEnded)
    def _are_over(self, over: payloads.TransfersAwaited | payloads.TransfersEnded) -> None:
        for job in over.jobs:
            self._under_way.pop(job, None)

    @on(payloads.ReportedToVLLM)
    def _reported(self, ends: payloads.ReportedToVLLM) -> None:
        self._end_of({*ends.finished_recving, *ends.failed_recving}, is_load=True)
        self._end_of(set(ends.finished_sending), is_load=False)

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

    # --- given blocks -------------------------------------------------------------------------

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        life = self.moment.life
        if life is not None and life.num_old >= 0:
            self.given.update(dict.fromkeys(event.block_ids[life.num_old :], life.ordinal))
            self.given.pop(NULL_BLOCK, None)

    @on(e.StepScheduled)
    def _step(self, event: e.StepScheduled) -> None:
        self._awaited = frozenset()
        if self._under_way:
            self._end(lambda begun: begun.copy.ends_with == payloads.STEP)
        for ordinal, block_ids in event.extended:
            self.given.update(dict.fromkeys(block_ids, ordinal))
        self.given.pop(NULL_BLOCK, None)
