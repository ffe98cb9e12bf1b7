"""Projections: each a small fold of the log, one file per question it answers; here those of one log, wired together.

A core names them, and the order in which they fold. Nothing here refuses an event, reads a clock or
does I/O: folding a recorded event never fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import msgspec

from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.errors import suppressed
from kvledger.lifecycle.events import Event
from kvledger.lifecycle.gate import Gate
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.marks import marked

if TYPE_CHECKING:
    from kvledger.lifecycle.core import Core
    from kvledger.lifecycle.projections.block_table import BlockTable
    from kvledger.lifecycle.projections.chunk_index import ChunkIndex
    from kvledger.lifecycle.projections.chunk_keys import ChunkKeys
    from kvledger.lifecycle.projections.extensions import Extensions
    from kvledger.lifecycle.projections.lookup_cache import LookupCache
    from kvledger.lifecycle.projections.obligations import Obligations
    from kvledger.lifecycle.projections.save_cursor import SaveCursor
    from kvledger.lifecycle.projections.tails import Tails
    from kvledger.lifecycle.projections.token_costs import TokenCosts
    from kvledger.lifecycle.projections.totals import Totals
    from kvledger.lifecycle.projections.tracker import RequestTracker
    from kvledger.lifecycle.projections.transfers import Transfers
    from kvledger.lifecycle.projections.unfilled import UnfilledBlocks

Fold = Callable[..., None]


_encode = msgspec.msgpack.Encoder(enc_hook=list).encode
"""Arrays and the order of chunks become lists."""


class Gated(NamedTuple):
    """What is done with events that may be refused."""

    accepts: Callable[[Any], bool]
    closed: tuple[Fold, ...]
    """The folds of those that are."""


class Projection:
    """One fold of the log; to be derived from. Its methods marked `@on(...)` are called with an event and its sequence.

    One that remembers anything has `state`: a struct of plain fields, and the only place where they are listed.
    """

    def index(self) -> None:
        """Make anew what follows from the state; called when the states of all projections are there."""

    def check(self) -> None:
        """Check what folds rely on and types do not say; called with a state that was read, before `index`.

        Raises:
            ValueError: no fold leads to such a state, and a later one might fail on it.
        """

    def folds(self) -> dict[type[Event], Fold]:
        """Event class -> fold, called as `fold(event, sequence)`.

        Raises:
            TypeError: two methods fold the same events, which of them first would not be said.
        """
        folds = marked(self)
        if len(dict(folds)) < len(folds):
            message = f"{type(self).__qualname__} has two methods for the same events; let one call the other"
            raise TypeError(message)
        return dict(folds)


@attrs.frozen
class ProjectionSpec:
    """How one projection is made."""

    name: str
    """The attribute of `Projections` that it is."""
    make: Callable[[Projections], Projection]
    """Given those of which it asks some; what it asks is made before it."""


class Projections:
    """All projections of one log."""

    extensions: Extensions
    obligations: Obligations
    tracker: RequestTracker
    blocks: BlockTable
    chunk_keys: ChunkKeys
    unfilled: UnfilledBlocks
    transfers: Transfers
    chunks: ChunkIndex
    tails: Tails
    lookups: LookupCache
    save_cursor: SaveCursor
    totals: Totals
    costs: TokenCosts

    def __init__(self, core: Core, configuration: LedgerConfiguration, *, only: Collection[str] | None = None) -> None:
        """With `only`, no others fold; they are made where one of these asks for them, and stay empty."""
        self.core = core
        self.configuration = configuration
        self.geometry = Geometry(configuration.block_size, configuration.chunk_size, configuration.windows)
        self._specs = {spec.name: spec for spec in core.projections}
        self._being_made: list[str] = []
        self._order: dict[str, Any] = {
            name: getattr(self, name) for name in self._specs if only is None or name in only
        }
        self.gate = Gate(core, self.tracker)
        maps = {name: self._folds_of(name) for name in self._order}
        self._folds: dict[type[Event], tuple[Fold, ...]] = {
            event_class: tuple(folds[event_class] for folds in maps.values() if event_class in folds)
            for event_class in core.events.values()
        }
        self._gated: dict[type[Event], Gated] = {
            event_class: Gated(
                accepts,
                tuple(
                    folds[event_class]
                    for name, folds in maps.items()
                    if event_class in folds and name in core.gating.closed_fold.get(event_class.id, ())
                ),
            )
            for event_class in core.events.values()
            if (accepts := self.gate.accepting(event_class)) is not None
        }

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Projection:
            """Make a projection where it is asked for first, which is where another one is made."""
            spec = self.__dict__.get("_specs", {}).get(name)
            if spec is None or name in self._being_made:
                needed = "" if spec is None else f"; it needs itself: {' -> '.join((*self._being_made, name))}"
                raise AttributeError(f"there is no projection {name!r}{needed}", name=name, obj=self)
            self._being_made.append(name)
            made = spec.make(self)
            self._being_made.remove(name)
            setattr(self, name, made)
            return made

    def fold(self, event: Event, sequence: int) -> None:
        """Fold one event, of an illegal one what the gating says. Total: it never fails for what was recorded."""
        event_class = type(event)
        gated = self._gated.get(event_class)
        for fold in self._folds[event_class] if gated is None or gated.accepts(event) else gated.closed:
            fold(event, sequence)

    def fold_obligations(self, event: Event, sequence: int) -> None:
        """Fold one event for what is owed, and for nothing else: where the others cannot be relied on any more."""
        fold = self.obligations.folds().get(type(event))
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
