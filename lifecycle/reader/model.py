"""Everything that a log implies, folded once for all of its readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from kvledger.lifecycle import machine
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.marks import marked
from kvledger.lifecycle.reader.answers import Answers, StoredAnswers
from kvledger.lifecycle.reader.chains import Chains
from kvledger.lifecycle.reader.chunks import Chunks, StoredChunks
from kvledger.lifecycle.reader.copies import Copies, StoredCopies
from kvledger.lifecycle.reader.forgotten import Forgotten
from kvledger.lifecycle.reader.layout import Layout
from kvledger.lifecycle.reader.lives import Lives, StoredLives
from kvledger.lifecycle.reader.moment import Moment, StoredMoment, Visits
from kvledger.lifecycle.reader.slots import Slots
from kvledger.lifecycle.reader.stored import StoredState
from kvledger.lifecycle.reader.tables import StoredTables, Tables
from kvledger.lifecycle.reader.tails import StoredTails, Tails

_ASKS: Mapping[str, frozenset[str]] = {
    "lives": frozenset(),
    "tables": frozenset({"lives"}),
    "copies": frozenset({"lives"}),
    "chunks": frozenset({"lives", "copies", "tails"}),
    "tails": frozenset({"lives", "copies", "chunks"}),
    "answers": frozenset({"lives", "forgotten"}),
}
"""Part → other parts that it queries, or that count the same slots."""
EVERY_PART = frozenset({*_ASKS, "forgotten"})


class StoredModel(msgspec.Struct, forbid_unknown_fields=True):
    """State of a model, as plain values."""

    moment: StoredMoment
    lives: StoredLives
    tables: StoredTables
    slots: dict[int, int]
    copies: StoredCopies
    chunks: StoredChunks
    tails: StoredTails
    answers: StoredAnswers
    chains: list[list[bytes]]
    besides: dict[str, StoredState]
    """Name → state of a part that only another class of model has."""


class Model:
    """State after each event. The model folds an event before a visitor is called with that event."""

    def __init__(self, tables: machine.Tables, configuration: LedgerConfiguration) -> None:
        self.configuration = configuration
        self.request_events = tables.request_events
        """Classes of the events in the life of one request."""
        self.layout = layout = Layout(configuration.block_size, configuration.chunk_size, configuration.windows)
        self.moment = moment = Moment()
        self.forgotten = Forgotten()
        self.lives = lives = Lives(tables, layout.chunk_size, moment)
        self.tables = Tables(lives, layout, moment)
        self.slots = Slots(configuration.num_slots)
        self.copies = Copies(lives, layout, configuration.num_ranks, moment)
        self.chunks = Chunks(self.copies, layout, self.slots, moment)
        self.tails = Tails(lives, self.slots, moment, layout.chunk_size)
        keeps = configuration.keep_for_preempted
        self.answers = Answers(lives, layout.chunk_size, moment, self.forgotten, keep_for_preempted=keeps)

    def stored(self) -> StoredModel:
        """Return the state."""
        moment, chains = self.moment, Chains()
        return StoredModel(
            StoredMoment(moment.sequence, moment.cause, moment.time_ns),
            self.lives.stored(chains),
            self.tables.stored(),
            self.slots.stored(),
            self.copies.stored(chains),
            self.chunks.stored(),
            self.tails.stored(),
            self.answers.stored(chains),
            chains.chains,
            self._stored_besides(chains),
        )

    def _stored_besides(self, _chains: Chains) -> dict[str, StoredState]:
        return {}

    def resume(self, stored: StoredModel, *, trusts_other_code: bool = False) -> None:
        """Restore a stored state. Call this before the first event.

        Raises:
            Exception: no log leads to such a state.
        """
        moment, chains = self.moment, Chains(stored.chains)
        moment.sequence, moment.cause = stored.moment.sequence, stored.moment.cause
        moment.time_ns = stored.moment.time_ns
        self.lives.resume(stored.lives, chains)
        self.tables.resume(stored.tables)
        self.slots.resume(stored.slots)
        self.copies.resume(stored.copies, chains)
        self.chunks.resume(stored.chunks)
        self.tails.resume(stored.tails)
        self.answers.resume(stored.answers, chains)
        self._resume_besides(stored.besides, chains, trusts_other_code=trusts_other_code)

    def _resume_besides(self, _stored: Mapping[str, StoredState], _chains: Chains, *, trusts_other_code: bool) -> None:
        """Restore the parts that only another class of model has."""

    def lost(self) -> None:
        """Forget what is not known because events are missing. Of lives, keep what must still be true."""
        for part in (self.lives, self.tables, self.copies, self.slots, self.chunks, self.tails, self.answers):
            part.lost()

    def parts(self) -> Mapping[str, object]:
        """Name → part, in folding order.

        Tables and tails fold before the lives, because they need a life that the event may end. Copies fold before the
        chunks, which need to know what was saved.
        """
        return {
            "forgotten": self.forgotten,
            "tables": self.tables,
            "tails": self.tails,
            "answers": self.answers,
            "lives": self.lives,
            "copies": self.copies,
            "chunks": self.chunks,
        }

    def folds(self, needs: Iterable[str] = EVERY_PART) -> Visits:
        """(event class, fold) of these parts and of those that they query. Folds run before visitors."""
        wanted = set(needs)
        if wanted >= EVERY_PART:
            chosen = self.parts()
        else:
            wanted |= {asked for name in wanted for asked in _ASKS[name]}
            chosen = {name: part for name, part in self.parts().items() if name in wanted}
        return [*self.lives.meetings(), *(fold for part in chosen.values() for fold in marked(part))]
