"""Sums over a log: tokens that admissions needed, lookups offered, loads had to bring, or steps computed again.

Each kind of tokens is counted twice, as a whole and by reason or fate. Tests compare both counts with each other and
with the totals of the log.
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
    """vLLM allocated blocks, but claimed only a part of the offered tokens, or none."""
    ASKED_AGAIN = "asked_again"
    """vLLM allocated no blocks, and a later lookup replaced the answer."""
    WITHDRAWN = "withdrawn"
    """The request was preempted or ended, or its id was used again."""
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
    """Token counts of one life, or of a log. `Accounts.sums` adds the tokens whose fate is undecided."""

    num_admissions: int = 0
    num_needed: int = 0
    """Known tokens of the requests at their admissions."""
    num_retained: int = 0
    """Tokens found in vLLM's own prefix cache."""
    num_claimed: int = 0
    """Claimed tokens, counted at admissions."""
    num_elsewhere: int = 0
    """Tokens that had KV when the first step began, from another connector or from a local prefix given as blocks."""
    missed: Counter[Reason] = attrs.field(factory=Counter)
    """Reason → tokens left to compute at admissions. `misses` adds the tokens that failed to load."""
    num_offered: int = 0
    offered: Counter[OfferFate] = attrs.field(factory=Counter)
    num_to_load: int = 0
    """Tokens that loads had to bring, counted when the load is issued, or when it is clear that no load follows."""
    to_load: Counter[LoadFate] = attrs.field(factory=Counter)
    num_duplicated: int = 0
    """Tokens of loads that another load in flight was already loading."""
    duplicated: Counter[str] = attrs.field(factory=Counter)
    """Key of the last chunk in both loads (hexadecimal) → duplicated tokens. At most `MAX_KEPT` keys per life."""
    num_recomputed: int = 0
    """Tokens computed before a preemption and again after it."""
    recomputed: Counter[Reason] = attrs.field(factory=Counter)
    computed_twice: Counter[Reason] = attrs.field(factory=Counter)
    """Reason → tokens computed again without a preemption, because the scheduler took them back."""

    def misses(self) -> Counter[Reason]:
        """Return reason → number of all tokens that admissions did not get from the cache."""
        misses = Counter(self.missed)
        misses[Reason.LOAD_FAILED] += self.to_load[LoadFate.FAILED]
        misses[Reason.NOT_DELIVERED] += self.to_load[LoadFate.NOT_DELIVERED]
        return +misses

    def num_missed(self) -> int:
        """Return the number of missed tokens, without those that no cache could have provided."""
        return sum(count for reason, count in self.misses().items() if reason not in BY_DESIGN)

    def add(self, other: Sums) -> None:
        """Add the sums of another life or log."""
        for field in attrs.fields(Sums):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, Counter):
                mine.update(theirs)  # `+` would drop negative counts
            else:
                setattr(self, field.name, mine + theirs)

    def since(self, earlier: Sums) -> Sums:
        """Return the sums minus the earlier sums. Counts of fates that were undecided in `earlier` may be negative."""
        sums = Sums()
        for field in attrs.fields(Sums):
            mine, before = getattr(self, field.name), getattr(earlier, field.name)
            if isinstance(mine, Counter):
                getattr(sums, field.name).update(mine)
                getattr(sums, field.name).subtract(before)
            else:
                setattr(sums, field.name, mine - before)
        return sums
