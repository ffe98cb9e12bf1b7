"""Helpers of many mutants: they change a decision, an observation or a method."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kvledger.adapters.vllm.journal import Journal
from kvledger.lifecycle import events as e
from kvledger.lifecycle import handlers
from mutants.mutant import Patch

LOOKING_UP = LOADING = SAVING = (handlers,)
"""The modules whose names for these decisions are patched."""

Change = Callable[[Any, Any], e.Event | None]
"""(event, journal) → the event to record instead; None records nothing."""


def written_as(change: Change) -> Patch:
    """Patch that makes the connector record another observation than the one it made."""
    observe = Journal.observe

    def observing(journal: Journal, event: e.Event) -> list[e.Event]:
        written = change(event, journal)
        return [] if written is None else observe(journal, written)

    return Journal, "observe", observing


def decided_otherwise(owner: Any, name: str, change: Callable[..., e.Event | None]) -> Patch:
    """Patch that replaces each decision of a function by `change(decision, turn, *arguments)`; None drops it."""
    decide = getattr(owner, name)

    def deciding(turn: Any, *arguments: Any, **named: Any) -> e.Event | None:
        changed = turn.altered(lambda decision: change(decision, turn, *arguments))
        found: e.Event | None = decide(changed, *arguments, **named)
        return None if found is None else change(found, turn, *arguments)

    return owner, name, deciding


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Patch:
    """Patch that calls a method as `around(original, *arguments)`."""
    original = getattr(owner, name)

    @wraps(original)  # with the events that it is marked with
    def calling(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    return owner, name, calling
