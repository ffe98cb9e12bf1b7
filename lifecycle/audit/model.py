"""The state that rules query: the reader's model, and the parts that only rules need."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Self

from kvledger.lifecycle import events as e
from kvledger.lifecycle import machine
from kvledger.lifecycle.audit.costs import Costs, Measured
from kvledger.lifecycle.audit.room import Room, StoredRoom
from kvledger.lifecycle.audit.violations import Violations
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.reader.chains import Chains
from kvledger.lifecycle.reader.model import Model
from kvledger.lifecycle.reader.records import Life
from kvledger.lifecycle.reader.stored import StoredState


class AuditModel(Model):
    """The reader's model, and the parts that only rules need. Each event is folded before checkers get the event."""

    def __init__(self, tables: machine.Tables, configuration: LedgerConfiguration, violations: Violations) -> None:
        super().__init__(tables, configuration)
        self.violations = violations
        """Violations that checkers reported."""
        self.room = Room(self.lives, self.copies, self.chunks, self.answers, self.moment)
        self.costs = Costs(self.lives, self.moment)

    def reporting_to(self, violations: Violations) -> Self:
        """Return a copy that shares all parts with this model, but collects violations in `violations`."""
        model = copy(self)
        model.violations = violations
        return model

    def _stored_besides(self, chains: Chains) -> dict[str, StoredState]:
        return {
            "room": StoredState.of(self.room, self.room.stored(chains)),
            "costs": StoredState.of(self.costs, self.costs.state),
        }

    def _resume_besides(self, stored: Mapping[str, StoredState], chains: Chains, *, trusts_other_code: bool) -> None:
        room = stored["room"].state_for(self.room, StoredRoom, trusts_other_code=trusts_other_code)
        self.room.resume(room, chains)
        self.costs.state = stored["costs"].state_for(self.costs, Measured, trusts_other_code=trusts_other_code)

    def parts(self) -> Mapping[str, object]:
        """Name → part, in the order in which the parts fold an event.

        `costs` comes first, because it needs the states that lives had before a step. `room` comes last, because it
        needs all other parts.
        """
        return {"costs": self.costs, **super().parts(), "room": self.room}

    def is_slower_to_load(self, answer: e.LookupAnswered, num_usable_tokens: int) -> bool:
        """Whether the answer must offer no tokens, because computing the usable ones costs less than loading them."""
        is_more = min(num_usable_tokens, answer.num_tokens - 1) > answer.num_computed_tokens
        return is_more and self.costs.is_slower and not self.configuration.offers_slow_loads

    def longest_seen(self, life: Life, num_tokens: int) -> int:
        """Return the length in tokens of the longest prefix that a load can fill, at most `num_tokens`.

        A load can fill a prefix if every page that the next token sees through its windows is stored.
        """
        layout, chunks, tail = self.layout, self.chunks, self.tails.saved(life)

        def is_stored(page: int, end_token: int) -> bool:
            # The slots of the chunk with the page's last needed token hold all needed tokens of the page.
            last_token = min(end_token, layout.tokens_of_page(page).stop) - 1
            (chunk,) = layout.chunks_of(range(last_token, last_token + 1))
            slots = chunks.slots_of(life.keys[chunk]) if chunk < len(life.keys) else None
            if slots is not None and slots[page - layout.pages_of_chunk(chunk).start] != NO_SLOT:
                return True
            if tail is None or end_token > tail.end_token:
                return False
            place = page - layout.pages_of(range(tail.first_token, tail.end_token)).start
            return 0 <= place < len(tail.slots) and tail.slots[place] != NO_SLOT

        return layout.longest_seen(num_tokens, is_stored)
