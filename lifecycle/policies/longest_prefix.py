"""The innermost policy: everything that is there may be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvledger.lifecycle.events import Event
from kvledger.lifecycle.projections.tracker import RequestRecord


class LongestPrefix:
    """Uses the whole hit."""

    def usable_tokens(self, num_hit_tokens: int, record: RequestRecord) -> int:
        """All of it."""
        return num_hit_tokens

    def folds(self) -> Mapping[type[Event], Callable[..., None]]:
        """Nothing to remember."""
        return {}
