"""Projections compute kvledger's state from the events of a log. `Projections` combines all projections of one log.

Before `Projections` folds an event, it finds the event's subject. The transition tables say whether the request's
states refuse the event. The core's `gating` says which projections fold a refused observation. The ledger, a replay
and all readers therefore fold each event in the same way.

Nothing here drops an event, reads a clock or does I/O. Folding a recorded event never fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import msgspec

from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.errors import suppressed
from kvledger.lifecycle.events import (
    Event,
    LoadCompleted,
    LoadFailed,
    RequestDecision,
    RequestEvent,
    SaveCompleted,
    SaveFailed,
    StepScheduled,
    trigger_of,
)
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.machine import Tables
from kvledger.lifecycle.projections.base import NO_SUBJECT, Before, Fold, Projection, Subject
from kvledger.lifecycle.projections.costs import TokenCosts
from kvledger.lifecycle.projections.extensions import Extensions
from kvledger.lifecycle.projections.jobs import Jobs
from kvledger.lifecycle.projections.lookup_cache import LookupCache
from kvledger.lifecycle.projections.owed import Owed
from kvledger.lifecycle.projections.pool import HostSlots, Pool
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.projections.sub_states import SubStates
from kvledger.lifecycle.projections.tracker import RequestTracker

__all__ = ["CORE_PROJECTIONS", "Fold", "Projection", "ProjectionSpec", "Projections", "is_reserved"]

OWED = ("owed",)
"""First phase: pending jobs and ends, so that they are known even if a later fold fails. Reads no other projection."""
RECORDS = ("extensions", "sub_states", "tracker")
"""Second phase: one record per request. `sub_states` needs the state before the event, so it precedes `tracker`."""
IMAGES = ("slots", "jobs", "lookup_cache", "pool", "costs")
"""Third phase: everything computed from the records."""
CORE_PROJECTIONS = (*OWED, *RECORDS, *IMAGES)
"""The core's projections, in the order in which they fold. An extension's projections follow in order of declaration.

Otherwise the order within a phase does not matter; a test folds in other orders.
"""

_encode = msgspec.msgpack.Encoder(enc_hook=list).encode
"""Encodes arrays and the queue of chunks as lists."""


@attrs.frozen
class ProjectionSpec:
    """How to create one projection of an extension."""

    name: str
    """The attribute of `Projections` that holds the projection."""
    make: Callable[[Projections], Projection]
    """Creates the projection. Called after the core's projections and all projections declared earlier were created."""


_SETTLING = (LoadCompleted, LoadFailed, SaveCompleted, SaveFailed)
Find = Callable[[Any], Subject]
Keeps = Callable[["Projections", bytes], bool]
"""Whether an extension wants the chunk with this key to be evicted after all others."""


class _Folds(NamedTuple):
    owed: Fold | None
    others: tuple[Fold, ...]


class _Route(NamedTuple):
    find: Find
    """Returns the subject of an event that is not folded yet."""
    folds: _Folds
    if_refused: _Folds


class Projections:
    """All projections of one log."""

    def __init__(
        self,
        tables: Tables,
        configuration: LedgerConfiguration,
        *,
        added: Iterable[ProjectionSpec] = (),
        keepers: Mapping[str, Keeps] = MappingProxyType({}),
        only: Collection[str] | None = None,
    ) -> None:
        """Create the projections of a log. Do not call this; call `Core.new_projections`.

        Args:
            tables: the transition tables.
            configuration: the log's configuration.
            added: the projections of extensions.
            keepers: extension name → function that says whether the extension wants a chunk evicted after all others.
            only: names of the projections that fold; the others stay empty. Default: all.
        """
        self.tables = tables
        self.configuration = configuration
        self.geometry = Geometry(configuration.block_size, configuration.chunk_size, configuration.windows)
        self.owed = Owed(tables, configuration.num_ranks)
        self.extensions = Extensions({each.name: each.version for each in tables.extensions}, self.forget)
        self.slots = HostSlots(configuration.num_slots)
        self.tracker = RequestTracker(tables, configuration, self.geometry, self.slots)
        self.sub_states = SubStates(tables, self.tracker, self.extensions)
        self.jobs = Jobs(self.owed, self.tracker, self.geometry)
        self.pool = Pool(
            self.tracker,
            self.geometry,
            self.slots,
            self.jobs,
            keep_for_preempted=configuration.keep_for_preempted,
            keeper=self.keeper,
        )
        self.lookup_cache = LookupCache(self.pool)
        self.costs = TokenCosts(self.tracker)
        self._keepers = keepers
        self._extension_of = {name: each.name for each in tables.extensions for name in each.projections}
        names = [name for name in CORE_PROJECTIONS if only is None or name in only]
        self._order: dict[str, Any] = {name: getattr(self, name) for name in names}
        self._specs = {spec.name: spec for spec in added}
        for name, spec in self._specs.items():
            made = spec.make(self)
            setattr(self, name, made)
            if only is None or name in only:
                self._order[name] = made
        self._routes = self._routes_by_class()

    def _routes_by_class(self) -> dict[type[Event], _Route]:
        folds_of = {name: self._folds_of(name) for name in self._order}
        owed = folds_of.pop("owed", {})
        routes: dict[type[Event], _Route] = {}
        for event_class in self.tables.events.values():
            closed = self.tables.gating.closed_fold.get(event_class.id, ())
            others = {name: folds[event_class] for name, folds in folds_of.items() if event_class in folds}
            routes[event_class] = _Route(
                self._finder(event_class),
                _Folds(owed.get(event_class), tuple(others.values())),
                _Folds(
                    owed.get(event_class) if "owed" in closed else None,
                    tuple(fold for name, fold in others.items() if name in closed),
                ),
            )
        return routes

    # --- subjects ------------------------------------------------------------------------------

    def subject_of(self, event: Event) -> Subject:
        """Return the subject of an event that is not folded yet."""
        return self._routes[type(event)].find(event)

    def _finder(self, event_class: type[Event]) -> Find:
        tracker, jobs, legal = self.tracker, self.jobs, self.tables.legal
        only_trigger = "" if event_class.variants else event_class.id
        may_refuse = self.tables.may_refuse(event_class)
        unknown = Subject(is_refused=may_refuse)

        def decided(event: RequestDecision) -> Subject:
            request = tracker.of(event.ordinal)
            if request is None:
                return NO_SUBJECT
            current = request if request.generation == event.generation else None
            return Subject(request, current, only_trigger or trigger_of(event))

        def observed(event: RequestEvent) -> Subject:
            request = tracker.get(event.request_id)
            if request is None:
                return unknown
            trigger = only_trigger or trigger_of(event)
            is_refused = may_refuse and (request.state, request.blocks) not in legal[trigger]
            # `before_of`, inlined to save a call per observation.
            before = Before(
                request.generation, request.state, request.blocks, request.first, request.current, request.trust
            )
            return Subject(request, request, trigger, before, is_refused)

        def settled(event: LoadCompleted | LoadFailed | SaveCompleted | SaveFailed) -> Subject:
            request, copy = tracker.of(event.ordinal), jobs.get(event.job_id)
            current = None if request is None or request.generation != event.generation else request
            return Subject(request, current, only_trigger or trigger_of(event), copy=copy)

        if event_class in _SETTLING:
            return settled
        if issubclass(event_class, RequestDecision):
            return decided
        if issubclass(event_class, RequestEvent):
            return observed
        return self._scheduled if event_class is StepScheduled else lambda _event: NO_SUBJECT

    def _scheduled(self, step: StepScheduled) -> Subject:
        # A step concerns many requests, so each row is checked separately.
        record_of, legal = self.tracker.of, self.tables.legal["tokens.scheduled"]
        refused: dict[int, Before] = {}
        for row in step.advanced:
            record = record_of(row[0])
            if record is not None and (record.state, record.blocks) not in legal:
                refused[row[0]] = before_of(record)
        return Subject(refused_rows=refused) if refused else NO_SUBJECT

    # --- folds ---------------------------------------------------------------------------------

    def fold(self, event: Event, sequence: int) -> Subject:
        """Fold one event and return its subject. Only projections that the core's `gating` names fold a refused event.

        Folding a recorded event never fails.
        """
        find, folds, if_refused = self._routes[type(event)]
        subject = find(event)
        owed, others = if_refused if subject.is_refused else folds
        if owed is not None:
            owed(event, sequence)
        for fold in others:
            fold(event, sequence, subject)
        return subject

    def follow(self, calls: Mapping[type[Event], Fold]) -> None:
        """From now on, call these functions with each event of their class, its sequence number and its subject.

        The functions run after `Owed` and before the other projections. They are not called with refused events.
        """
        for event_class, call in calls.items():
            route = self._routes[event_class]
            folds = route.folds._replace(others=(call, *route.folds.others))
            self._routes[event_class] = route._replace(folds=folds)

    def fold_owed(self, event: Event, sequence: int) -> None:
        """Fold one event in `Owed` only. Used after another projection has failed."""
        owed = self._routes[type(event)].folds.owed
        if owed is not None:
            owed(event, sequence)

    def keeper(self) -> Callable[[bytes], bool] | None:
        """Return a function that says whether an extension wants a chunk evicted last.

        Return None if no extension chooses chunks.
        """
        return self._is_kept if self._keepers else None

    def _is_kept(self, key: bytes) -> bool:
        return any(
            self.extensions.ask(extension, "keeps", lambda keeps: bool(keeps(self, key)), keeps)
            for extension, keeps in self._keepers.items()
        )

    def forget(self, extension: str) -> None:
        """Reset the projections of an extension to their state before the first event."""
        for name in self._order:
            if self.extension_of(name) == extension:
                with suppressed():  # extension code: if it raises, the old projection stays and folds nothing
                    self._order[name] = self._specs[name].make(self)
                    setattr(self, name, self._order[name])

    def _folds_of(self, name: str) -> Mapping[type[Event], Fold]:
        folds: Mapping[type[Event], Fold] = self._order[name].folds()
        extension = self.extension_of(name)
        if not extension:
            return folds
        where = f"projection {name}"
        return {
            event_class: partial(self.extensions.fold, extension, where, fold) for event_class, fold in folds.items()
        }

    def extension_of(self, name: str) -> str:
        """Return the name of a projection's extension; empty for the core's projections."""
        return self._extension_of.get(name, "")

    def named(self) -> Mapping[str, Projection]:
        """Name → projection, in fold order."""
        return self._order

    def states(self) -> dict[str, msgspec.Struct]:
        """Projection name → its state. Projections without state are left out."""
        return {name: its.state for name, its in self._order.items() if getattr(its, "state", None) is not None}

    def snapshot(self) -> dict[str, bytes]:
        """Projection name → its encoded state.

        Compare these bytes instead of the states: comparing dicts ignores the order of their entries, which matters.
        """
        return {name: _encode(state) for name, state in self.states().items()}


def before_of(request: RequestRecord) -> Before:
    """Return the request's current generation and states."""
    return Before(request.generation, request.state, request.blocks, request.first, request.current, request.trust)


def is_reserved(name: str) -> bool:
    """Whether a projection must not have this name, because `Projections` uses it or may use it later."""
    return name in ("tables", "configuration", "geometry") or name.startswith("_") or hasattr(Projections, name)
