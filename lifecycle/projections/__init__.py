"""Projections: what a log means, each a fold of its events; here those of one log, put together.

Nothing here refuses an event, reads a clock or does I/O: folding a recorded event never fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.errors import suppressed
from kvledger.lifecycle.events import Event
from kvledger.lifecycle.gate import Find, Gate
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.projections.base import Fold, Projection
from kvledger.lifecycle.projections.chunk_index import ChunkIndex
from kvledger.lifecycle.projections.extensions import Extensions
from kvledger.lifecycle.projections.host_slots import HostSlots
from kvledger.lifecycle.projections.lookup_cache import LookupCache
from kvledger.lifecycle.projections.obligations import Obligations
from kvledger.lifecycle.projections.sub_states import SubStates
from kvledger.lifecycle.projections.token_costs import TokenCosts
from kvledger.lifecycle.projections.totals import Totals
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.projections.transfers import Transfers
from kvledger.lifecycle.subject import Subject

if TYPE_CHECKING:
    from kvledger.lifecycle.core import Core

__all__ = ["CORE_PROJECTIONS", "Fold", "Projection", "ProjectionSpec", "Projections", "is_reserved"]

CORE_PROJECTIONS = (
    # What is owed, so that it is known whatever fails after it.
    "obligations",
    # Records of requests. Sub-states move before their phase; the sums see states as they were.
    *("extensions", "sub_states", "totals", "tracker"),
    # What follows from the records. A settled copy leaves after all others have folded its settlement.
    *("slots", "lookups", "chunks", "costs", "transfers"),
)
"""The projections of the core, in the order in which they fold. Those of extensions follow."""

_encode = msgspec.msgpack.Encoder(enc_hook=list).encode
"""Arrays and the order of chunks become lists."""


@attrs.frozen
class ProjectionSpec:
    """How one projection of an extension is made."""

    name: str
    """The attribute of `Projections` that it is."""
    make: Callable[[Projections], Projection]
    """Given those of the core, and those of extensions that were declared before it."""


class Projections:
    """All projections of one log."""

    def __init__(self, core: Core, configuration: LedgerConfiguration, *, only: Collection[str] | None = None) -> None:
        """With `only`, no others fold; those of the core are there and stay empty."""
        self.core = core
        self.configuration = configuration
        self.geometry = Geometry(configuration.block_size, configuration.chunk_size, configuration.windows)
        self.obligations = Obligations(configuration.num_ranks)
        self.extensions = Extensions(self)
        self.slots = HostSlots(configuration.num_slots)
        self.tracker = RequestTracker(core, configuration, self.geometry, self.slots)
        self.sub_states = SubStates(core, self.tracker, self.extensions)
        self.transfers = Transfers(self.tracker, self.geometry, core.compiled, configuration.num_ranks)
        self.chunks = ChunkIndex(
            self.tracker,
            self.geometry,
            self.slots,
            self.transfers,
            keep_for_preempted=configuration.keep_for_preempted,
        )
        self.lookups = LookupCache(self.tracker, configuration.chunk_size, self.chunks, self.fold)
        self.costs = TokenCosts(self.tracker)
        self.totals = Totals(self.tracker, self.transfers)
        self.gate = Gate(core, self.tracker)
        names = [name for name in CORE_PROJECTIONS if only is None or name in only]
        self._order: dict[str, Any] = {name: getattr(self, name) for name in names}
        self._specs = {spec.name: spec for spec in core.projections}
        for name, spec in self._specs.items():
            made = spec.make(self)
            setattr(self, name, made)
            if only is None or name in only:
                self._order[name] = made
        self._make_routes()

    def _make_routes(self) -> None:
        """Note which folds each class of events goes to."""
        maps = {name: self._folds_of(name) for name in self._order}
        owed = maps.pop("obligations", {})
        closed_fold = self.core.gating.closed_fold
        self._find: dict[type[Event], Find] = {}
        self._owed: dict[type[Event], Fold] = {}
        self._folds: dict[type[Event], tuple[Fold, ...]] = {}
        self._closed: dict[type[Event], tuple[Fold | None, tuple[Fold, ...]]] = {}
        """Of observations that may be refused: what folds them then."""
        for event_class in self.core.events.values():
            closed = closed_fold.get(event_class.id, ())
            self._find[event_class] = self.gate.finder(event_class)
            if event_class in owed:
                self._owed[event_class] = owed[event_class]
            folds = {name: folds[event_class] for name, folds in maps.items() if event_class in folds}
            self._folds[event_class] = tuple(folds.values())
            owed_if_refused = owed.get(event_class) if "obligations" in closed else None
            folds_if_refused = tuple(fold for name, fold in folds.items() if name in closed)
            self._closed[event_class] = owed_if_refused, folds_if_refused

    def subject_of(self, event: Event) -> Subject:
        """Whom an event is about that is not folded yet."""
        return self._find[type(event)](event)

    def fold(self, event: Event, sequence: int, subject: Subject | None = None) -> None:
        """Fold one event, of an illegal one what the gating says. Total: it never fails for what was recorded."""
        event_class = type(event)
        if subject is None:
            subject = self._find[event_class](event)
        if subject.is_refused:
            owed, folds = self._closed[event_class]
        else:
            owed, folds = self._owed.get(event_class), self._folds[event_class]
        if owed is not None:
            owed(event, sequence)
        for fold in folds:
            fold(event, sequence, subject)

    def fold_obligations(self, event: Event, sequence: int) -> None:
        """Fold one event for what is owed, and for nothing else: where the others cannot be relied on any more."""
        fold = self._owed.get(type(event))
        if fold is not None:
            fold(event, sequence)

    def kept_last(self) -> Collection[bytes]:
        """Keys of chunks that extensions want to be evicted after all others."""
        kept: set[bytes] = set()
        for keeper in self.core.keepers:
            kept |= self.extensions.ask(keeper.name, "kept", lambda its: frozenset(its.kept(self)), keeper) or set()
        return kept

    def forget(self, extension: str) -> None:
        """Give the projections of an extension their state before the first event."""
        for name in self._order:
            if self.core.extension_of(name) == extension:
                with suppressed():  # its code; then it stays as it is, and folds nothing
                    self._order[name] = self._specs[name].make(self)
                    setattr(self, name, self._order[name])

    def _folds_of(self, name: str) -> Mapping[type[Event], Fold]:
        folds: Mapping[type[Event], Fold] = self._order[name].folds()
        extension = self.core.extension_of(name)
        if not extension:
            return folds
        where = f"projection {name}"
        return {
            event_class: partial(self.extensions.fold, extension, where, fold) for event_class, fold in folds.items()
        }

    def named(self) -> Mapping[str, Projection]:
        """Every projection by its name, in the order in which they fold."""
        return self._order

    def states(self) -> dict[str, msgspec.Struct]:
        """Everything that is known, by projection; those that remember nothing are left out."""
        return {name: its.state for name, its in self._order.items() if getattr(its, "state", None) is not None}

    def snapshot(self) -> dict[str, bytes]:
        """The states' encodings. The order of what they hold is state, too, so these are compared, never the states."""
        return {name: _encode(state) for name, state in self.states().items()}


def is_reserved(name: str) -> bool:
    """Whether an attribute of `Projections` that is no projection has this name, or may have it one day."""
    return name in ("core", "configuration", "geometry", "gate") or name.startswith("_") or hasattr(Projections, name)
