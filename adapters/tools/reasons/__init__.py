"""Why tokens were missed and computed again: every one of them has exactly one reason, and the reasons add up.

A fold of its own over the log, next to the projections and on purpose without them: what it says is compared with the
totals. It reads no clock and does no I/O; times are looked up by whoever shows the history. `docs/reasons.md` defines
what is counted.
"""

from kvledger.adapters.tools.reasons.accounts import Accounts
from kvledger.adapters.tools.reasons.admissions import is_same_answer
from kvledger.adapters.tools.reasons.chunk_history import ChunkFact, ChunkStatus
from kvledger.adapters.tools.reasons.memory import State
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
    "State",
    "Sums",
    "is_same_answer",
]
