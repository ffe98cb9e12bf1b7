"""Tokens of each life that are computed or in flight after the last step, and the lives that decode one token per step.

While a request decodes one token per step, its number of computed tokens is derived from the number of steps. A step of
256 decoding requests therefore costs nothing here, and the log contains only the differences from this expectation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.ranges import Count, LifeOrdinal, SumOfTokens


class ComputedTokens(msgspec.Struct, forbid_unknown_fields=True):
    """Computed tokens by the ordinal of a life. Part of the tracker's state."""

    num_steps: Count = 0
    last_counts: dict[LifeOrdinal, SumOfTokens] = {}
    """Ordinal → number of computed tokens. Outdated for lives in `decoding`."""
    decoding: dict[LifeOrdinal, SumOfTokens] = {}
    """Ordinal → computed tokens minus `num_steps`, for requests that decode one token per step."""

    def count(self, ordinal: int) -> int:
        """Return the computed tokens of a life; 0 if the life is unknown."""
        ahead = self.decoding.get(ordinal)
        return self.last_counts.get(ordinal, 0) if ahead is None else ahead + self.num_steps

    def unexpected(
        self, counts: Iterable[tuple[str, int]], record_of: Callable[[str], RequestRecord | None]
    ) -> list[tuple[str, int]]:
        """Return the pairs (request id, computed tokens), except those of decoding requests with the expected count."""
        if not self.decoding:
            return list(counts)
        expected, now = self.decoding.get, self.num_steps
        return [
            (request_id, count)
            for request_id, count in counts
            if (record := record_of(request_id)) is None or expected(record.ordinal) != count - now
        ]

    def set(self, ordinal: int, num_computed_tokens: int) -> None:
        """Set the computed tokens of a life. The life is no longer expected to decode."""
        self.decoding.pop(ordinal, None)
        self.last_counts[ordinal] = num_computed_tokens

    def forget(self, ordinal: int) -> None:
        """Forget a life that is over."""
        self.decoding.pop(ordinal, None)
        self.last_counts.pop(ordinal, None)

    def step(self, event: e.StepScheduled) -> None:
        """Count a step. Rows about unknown lives are ignored."""
        last_counts, decoding = self.last_counts, self.decoding
        for ordinal in event.paused:
            if ordinal in decoding:
                self.set(ordinal, self.count(ordinal))
        self.num_steps = num_steps = self.num_steps + 1
        for ordinal, num_computed_tokens, num_scheduled_tokens, num_tokens in event.advanced:
            if ordinal in last_counts:
                last_counts[ordinal] = count = num_computed_tokens + num_scheduled_tokens
                if num_scheduled_tokens == 1 and count >= num_tokens:
                    decoding[ordinal] = count - num_steps
                elif ordinal in decoding:
                    del decoding[ordinal]
