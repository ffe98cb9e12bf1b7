"""The state that a log implies, computed without the code that decides, so that an error there cannot hide itself.

The reader folds observations and recorded decisions, and uses nothing of `projections/` or `decisions/`. `layout.py`
computes where tokens are. The reader shares only the events and the transition table with the code that decides.
"""

from kvledger.lifecycle.marks import marked
from kvledger.lifecycle.reader.model import EVERY_PART, Model
from kvledger.lifecycle.reader.moment import Moment, Visits, num_intact_tokens
from kvledger.lifecycle.reader.records import NEVER, Copy, Life, Spent
from kvledger.lifecycle.reader.stored import NotResumable
from kvledger.lifecycle.reader.visitor import Reader, Visitor

__all__ = [
    "EVERY_PART",
    "NEVER",
    "Copy",
    "Life",
    "Model",
    "Moment",
    "NotResumable",
    "Reader",
    "Spent",
    "Visitor",
    "Visits",
    "marked",
    "num_intact_tokens",
]
