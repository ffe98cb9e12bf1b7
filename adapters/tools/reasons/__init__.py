"""Gives every missed and every recomputed token exactly one reason. The token counts add up to the log's totals.

`Accounts` counts the tokens without using these totals, so that tests can compare both counts. `Accounts` reads no
clock and does no I/O. `docs/reasons.md` defines what is counted.
"""

from kvledger.adapters.tools.reasons.accounts import Accounts
from kvledger.adapters.tools.reasons.admissions import is_same_answer
from kvledger.adapters.tools.reasons.advice import advice
from kvledger.adapters.tools.reasons.chunk_history import ChunkFact, ChunkStatus
from kvledger.adapters.tools.reasons.reason import BY_DESIGN, Reason
from kvledger.adapters.tools.reasons.request_history import Admission, Lookup, Recomputation, RequestHistory, SharedLoad
from kvledger.adapters.tools.reasons.spans import Span
from kvledger.adapters.tools.reasons.sums import LoadFate, OfferFate, Sums

__all__ = [
    "BY_DESIGN",
    "Accounts",
    "Admission",
    "ChunkFact",
    "ChunkStatus",
    "LoadFate",
    "Lookup",
    "OfferFate",
    "Reason",
    "Recomputation",
    "RequestHistory",
    "SharedLoad",
    "Span",
    "Sums",
    "advice",
    "is_same_answer",
]
