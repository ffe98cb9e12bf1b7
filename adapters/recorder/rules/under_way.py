"""Which copies are under way, and which blocks are given to be filled; what the rules about both have in common.

A copy is under way from the metadata that hands it to the workers until the log tells its end: by its job, by its
request, or because its step is over (`payloads.ENDS`). One whose end no log shows is over at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import ClassVar, NamedTuple

from kvledger.adapters.recorder import payloads
from kvledger.adapters.recorder.payloads import payload_of
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Check, Model, Moment, Violation
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


class RuleOfCopies:
    """A rule about copies that begin, or about blocks that are given while copies are under way."""

    rule: ClassVar[str]
    judges_loads: ClassVar[bool]
    """Whether `begins` wants loads; else it wants saves."""

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self.model = model
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
        return [
            (e.LookupRequested, self._asked),
            (e.BlocksAllocated, self._allocated),
            (e.RequestReleased, self._released),
            (e.StepScheduled, self._step),
            (e.ExtensionObserved, self._observed),
            (e.ExtensionNoted, self._noted),
        ]

    # --- for the rules ------------------------------------------------------------------------

    def begins(self, begun: Begun, moment: Moment) -> Iterator[Violation]:
        """A copy begins; the others are under way."""
        yield from ()

    def step_built(self, moment: Moment) -> Iterator[Violation]:
        """All copies of the step have begun, and `given` is complete."""
        yield from ()

    def under_way(self, *, loads: bool) -> Iterator[Begun]:
        """Copies of one direction."""
        return (begun for begun in chain(*self._under_way.values()) if begun.copy.is_load is loads)

    def violation(self, moment: Moment, begun: Begun, detail: str, *evidence: int) -> Violation:
        """About a copy."""
        return Violation(self.rule, moment.sequence, begun.request_id, None, detail, evidence)

    # --- what is under way --------------------------------------------------------------------

    def _observed(self, event: e.ExtensionObserved, moment: Moment) -> list[Violation] | None:
        copy = payload_of(event)
        if not isinstance(copy, payloads.Transferred):
            return None
        ordinal = -1 if moment.life is None else moment.life.ordinal
        return self._begin(Begun(moment.sequence, event.request_id, ordinal, copy), moment)

    def _begin(self, begun: Begun, moment: Moment) -> list[Violation]:
        if begun.copy.job in self._awaited:
            return []
        found = list(self.begins(begun, moment)) if begun.copy.is_load is self.judges_loads else []
        if begun.copy.ends_with:
            self._under_way.setdefault(begun.copy.job, []).append(begun)
        return found

    def _noted(self, event: e.ExtensionNoted, moment: Moment) -> list[Violation] | None:
        told = payload_of(event)
        if isinstance(told, payloads.TransferredFor):
            return self._begin(Begun(moment.sequence, told.request_id, -1, told.copy), moment)
        if isinstance(told, payloads.Returned):
            if told.hook == "build_connector_meta":
                found = list(self.step_built(moment)) if self.given and self._under_way else None
                self.given.clear()
                return found
        elif isinstance(told, payloads.TransfersEnded | payloads.TransfersAwaited):
            if isinstance(told, payloads.TransfersAwaited):
                self._awaited = frozenset(told.jobs)
            for job in told.jobs:
                self._under_way.pop(job, None)
        elif isinstance(told, payloads.ReportedToVLLM):
            self._hear({*told.finished_recving, *told.failed_recving}, is_load=True)
            self._hear(set(told.finished_sending), is_load=False)
        return None

    def _hear(self, request_ids: set[str], *, is_load: bool) -> None:
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

    def _asked(self, event: e.LookupRequested, _moment: Moment) -> None:
        configuration = self.model.configuration
        self._num_own[event.request_id] = (
            event.num_computed_tokens // configuration.block_size * len(configuration.windows)
        )

    def _allocated(self, event: e.BlocksAllocated, moment: Moment) -> None:
        num_own = self._num_own.get(event.request_id)
        self._num_own[event.request_id] = len(event.block_ids)
        self.num_filled[event.request_id] = num_own or 0
        if moment.life is not None and num_own is not None:
            self.given.update(dict.fromkeys(event.block_ids[num_own:], moment.life.ordinal))
            self.given.pop(NULL_BLOCK, None)

    def _released(self, event: e.RequestReleased, moment: Moment) -> None:
        if moment.life is not None and moment.life.ordinal == event.ordinal:
            self._num_own.pop(event.request_id, None)
            self.num_filled.pop(event.request_id, None)

    def _step(self, event: e.StepScheduled, _moment: Moment) -> None:
        self._awaited = frozenset()
        if self._under_way:
            self._end(lambda begun: begun.copy.ends_with == payloads.STEP)
        for ordinal, block_ids in event.extended:
            self.given.update(dict.fromkeys(block_ids, ordinal))
        self.given.pop(NULL_BLOCK, None)
