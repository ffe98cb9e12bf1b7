"""Shapes that many mistakes share: a decision that is wrapped, an observation that is written down wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvledger.adapters.vllm.journal import Journal
from kvledger.lifecycle import events as e
from mutants.mutant import Patch

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
    """A room of decisions whose every decision goes through `change(decision, *arguments)`; None drops it."""
    decide = getattr(owner, name)

    def deciding(*arguments: Any, **named: Any) -> Iterator[e.Event]:
        for decision in decide(*arguments, **named):
            changed = change(decision, *arguments)
            if changed is not None:
                yield changed

    return owner, name, deciding


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Patch:
    """A method that is called as `around(original, *arguments)`."""
    original = getattr(owner, name)

    def calling(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    return owner, name, calling
