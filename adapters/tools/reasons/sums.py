"""The sums over a log: tokens that were needed at admissions, offered by lookups, to be loaded, and computed again.

Each is counted twice, as a whole and by reason or fate. Tests compare the two, and both with the totals of the log.
"""

from __future__ import annotations

import enum
from collections import Counter

import attrs

from kvledger.adapters.tools.reasons.reason import BY_DESIGN, Reason


class OfferFate(enum.StrEnum):
    """What became of tokens that a lookup offered."""

    CLAIMED = "claimed"
    NOT_CLAIMED = "not_claimed"
    """Blocks were given for fewer tokens than were offered, or for none of them."""
    ASKED_AGAIN = "asked_again"
    """No blocks were given; a later lookup replaced the answer."""
    WITHDRAWN = "withdrawn"
    """The request was preempted, ended, or its id was used again."""
    PENDING = "pending"
    LOST = "lost"
    """Events are missing from the log."""


class LoadFate(enum.StrEnum):
    """What became of tokens that were claimed."""

    LOADED = "loaded"
    FAILED = "failed"
    NOT_DELIVERED = "not_delivered"
    UNDER_WAY = "under_way"


@attrs.define
class Sums:
    """Tokens, counted since the log was opened. What is not yet decided is added by `Accounts.sums`."""

    num_admissions: int = 0
    num_needed: int = 0
    """Known tokens of the requests at their admissions."""
    num_retained: int = 0
    """Found in vLLM's own prefix cache."""
    num_claimed: int = 0
    """To be loaded, by admissions."""
    num_elsewhere: int = 0
    """There already when the first step began: by another connector, or of a local prefix given as blocks."""
    missed: Counter[Reason] = attrs.field(factory=Counter)
    """Left to compute at admissions; what failed to load comes on top, see `misses`."""
    num_offered: int = 0
    offered: Counter[OfferFate] = attrs.field(factory=Counter)
    num_to_load: int = 0
    """To be loaded, by jobs and undelivered admissions."""
    to_load: Counter[LoadFate] = attrs.field(factory=Counter)
    num_duplicated: int = 0
    """Of them tokens that another load was bringing at the same time."""
    duplicated: Counter[str] = attrs.field(factory=Counter)
    """Key of the last such chunk, in hexadecimal → these tokens, by the prefix that ends there. A bounded number of a
    life."""
    num_recomputed: int = 0
    """Computed before a preemption and again after it."""
    recomputed: Counter[Reason] = attrs.field(factory=Counter)
    computed_twice: Counter[Reason] = attrs.field(factory=Counter)
    """Computed again without a preemption, because the scheduler took them back."""

    def misses(self) -> Counter[Reason]:
        """All tokens that the cache did not bring to an admission, by reason."""
        misses = Counter(self.missed)
        misses[Reason.LOAD_FAILED] += self.to_load[LoadFate.FAILED]
        misses[Reason.NOT_DELIVERED] += self.to_load[LoadFate.NOT_DELIVERED]
        return +misses

    def num_missed(self) -> int:
        """Tokens that a cache could have spared and did not."""
        return sum(count for reason, count in self.misses().items() if reason not in BY_DESIGN)

    def add(self, other: Sums) -> None:
        """Count what another log counted, too."""
        for field in attrs.fields(Sums):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, Counter):
                mine.update(theirs)  # `+` would drop what counts negative
            else:
                setattr(self, field.name, mine + theirs)

    def since(self, earlier: Sums) -> Sums:
        """What was counted since then. What was pending or under way then counts negative once it is decided."""
        sums = Sums()
        for field in attrs.fields(Sums):
            mine, before = getattr(self, field.name), getattr(earlier, field.name)
            if isinstance(mine, Counter):
                getattr(sums, field.name).update(mine)
                getattr(sums, field.name).subtract(before)
            else:
                setattr(sums, field.name, mine - before)
        return sums
