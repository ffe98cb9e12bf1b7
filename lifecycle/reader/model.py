"""All state that the reader computes from a log. It is folded once, and all visitors query it."""

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
"""Name of a part → names of the parts that must be folded with it: the part queries them, or they hold slots, too."""
EVERY_PART = frozenset({*_ASKS, "forgotten"})


class StoredModel(msgspec.Struct, forbid_unknown_fields=True):
    """State of a `Model` after an event, as plain values."""

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
    """Name of a part that only a subclass of `Model` has → state of that part."""


class Model:
    """All state that the reader computes from the events so far. The model folds an event before visitors get it."""

    def __init__(self, tables: machine.Tables, configuration: LedgerConfiguration) -> None:
        self.configuration = configuration
        self.request_events = tables.request_events
        """Classes of the events about one request."""
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
            Exception: of any class, if no log can lead to the stored state.
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
        """Restore the parts that only a subclass has. `Model` itself has none."""

    def lost(self) -> None:
        """Forget everything that missing events may have changed. Lives are kept, but their counts become bounds."""
        for part in (self.lives, self.tables, self.copies, self.slots, self.chunks, self.tails, self.answers):
            part.lost()

    def parts(self) -> Mapping[str, object]:
        """Name → part, in the order in which the parts fold an event.

        Tables and tails come before the lives, because they need a life that the event may end. Copies come before the
        chunks, because the chunks need the job that the event settles.
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
        """Return pairs (event class, fold) of the parts in `needs`, and of parts that these parts query."""
        wanted = set(needs)
        if wanted >= EVERY_PART:
            chosen = self.parts()
        else:
            wanted |= {asked for name in wanted for asked in _ASKS[name]}
            chosen = {name: part for name, part in self.parts().items() if name in wanted}
        return [*self.lives.meetings(), *(fold for part in chosen.values() for fold in marked(part))]
