"""Why tokens were missed and computed again: every one of them has exactly one reason, and the reasons add up.

A fold of its own over the log, beside the projections and on purpose without them: what it says is compared with the
totals. It reads no clock and does no I/O; times are looked up by whoever tells the story. `docs/reasons.md` defines
what is counted.
"""

from kvledger.lifecycle.reasons.accounts import Accounts
from kvledger.lifecycle.reasons.chunk_history import ChunkFact, ChunkStatus
from kvledger.lifecycle.reasons.memory import Memory
from kvledger.lifecycle.reasons.reason import BY_DESIGN, Reason
from kvledger.lifecycle.reasons.spans import Span
from kvledger.lifecycle.reasons.story import Admission, Lookup, Recomputation, Story
from kvledger.lifecycle.reasons.sums import LoadFate, OfferFate, Sums

__all__ = [
    "BY_DESIGN",
    "Accounts",
    "Admission",
    "ChunkFact",
    "ChunkStatus",
    "LoadFate",
    "Lookup",
    "Memory",
    "OfferFate",
    "Reason",
    "Recomputation",
    "Span",
    "Story",
    "Sums",
]
