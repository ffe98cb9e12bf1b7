"""Divergences: differences between the decisions in a log and the decisions that today's code makes.

This module must not know how events are replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import attrs

from kvledger.lifecycle.events import Event


@attrs.frozen
class Divergence:
    """A difference between a log's decisions and those of today's code.

    `sequence` is the sequence number where they differ. `recorded` is the log's decision, None if the log has none
    there. `decided` is the decision of today's code, None if it makes none.
    """

    sequence: int
    recorded: Event | None
    decided: Event | None

    def __str__(self) -> str:
        recorded = "nothing" if self.recorded is None else str(self.recorded)
        decided = "nothing" if self.decided is None else str(self.decided)
        return f"at sequence {self.sequence} the log has {recorded}, this code decides {decided}"


class Divergences(list[Divergence]):
    """The first `MAX_KEPT` divergences, and the number of all divergences in `num_found`.

    Only the first ones are stored, because other code may decide differently at every event. `keeps`, if set, gets the
    sequence number and request id of each divergence and returns whether to count it. The id is empty if the decision
    is about no request.
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
