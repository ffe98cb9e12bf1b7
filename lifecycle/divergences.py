"""Differences between the decisions in a log and today's code. It must not know how events are replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import attrs

from kvledger.lifecycle.events import Event


@attrs.frozen
class Divergence:
    """A difference between the log and today's decisions. `sequence` is that of the recorded event."""

    sequence: int
    recorded: Event | None
    decided: Event | None

    def __str__(self) -> str:
        recorded = "nothing" if self.recorded is None else str(self.recorded)
        decided = "nothing" if self.decided is None else str(self.decided)
        return f"at sequence {self.sequence} the log has {recorded}, this code decides {decided}"


class Divergences(list[Divergence]):
    """The first `MAX_KEPT` divergences; `num_found` counts all, because a log of other code may diverge at every event.

    `keeps`, if set, selects them by sequence number and request id (empty: about no request).
    """

    MAX_KEPT: ClassVar[int] = 1000

    def __init__(self) -> None:
        super().__init__()
        self.num_found = 0
        self.keeps: Callable[[int, str], bool] | None = None

    def append(self, divergence: Divergence) -> None:
        """Count the divergence if `keeps` selects it, and store it if there is room."""
        event = divergence.recorded or divergence.decided
        if self.keeps is not None and not self.keeps(divergence.sequence, getattr(event, "request_id", "")):
            return
        self.num_found += 1
        if len(self) < self.MAX_KEPT:
            super().append(divergence)
