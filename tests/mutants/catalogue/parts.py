"""Shapes that many mistakes share: a decision that is wrapped, an observation that is written down wrongly."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kvledger.adapters.vllm.journal import Journal
from kvledger.lifecycle import events as e
from kvledger.lifecycle import handlers
from mutants.mutant import Patch

LOOKING_UP = LOADING = SAVING = (handlers,)
"""The modules in whose names such a decision is looked up."""

Change = Callable[[Any, Any], e.Event | None]
"""(event, journal) -> what is written instead, or None where nothing is."""


def written_as(change: Change) -> Patch:
    """The connector writes down another observation than the one it made, and believes it."""
    observe = Journal.observe

    def observing(journal: Journal, event: e.Event) -> list[e.Event]:
        written = change(event, journal)
        return [] if written is None else observe(journal, written)

    return Journal, "observe", observing


def decided_otherwise(owner: Any, name: str, change: Callable[..., e.Event | None]) -> Patch:
    """A function of `lifecycle/decisions/` whose every decision is `change(decision, *arguments)`; None drops it."""
    decide = getattr(owner, name)

    def deciding(turn: Any, *arguments: Any, **named: Any) -> e.Event | None:
        changed = turn.altered(lambda decision: change(decision, turn, *arguments))
        found: e.Event | None = decide(changed, *arguments, **named)
        return None if found is None else change(found, turn, *arguments)

    return owner, name, deciding


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Patch:
    """A method that is called as `around(original, *arguments)`."""
    original = getattr(owner, name)

    @wraps(original)  # with the events that it is marked with
    def calling(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    return owner, name, calling
