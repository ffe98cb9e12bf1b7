"""Computes the state from a log, without the code that decides.

An error in the code that decides can therefore not hide itself. The reader folds observations and recorded decisions,
and uses no code of `projections/` or `decisions/`. `layout.py` computes which pages hold which tokens. The reader and
the code that decides have only the events and the transition tables in common.
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
