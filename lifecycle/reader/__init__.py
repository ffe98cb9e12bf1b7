"""What a log says, made apart from what decides: a mistake there must not hide itself.

Observations and recorded decisions go in, nothing of `projections/` or `decisions/`. Where tokens lie is computed in
`layout.py`. What is shared by nature is the vocabulary and the transition table.
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
