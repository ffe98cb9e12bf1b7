"""The selected part of a log.

A selection limits which events are shown. The state at a selected event still depends on all events before it.
"""

from __future__ import annotations

import attrs

from kvledger.lifecycle.audit import Violation


@attrs.frozen
class Selection:
    """The selected part of one log, as event numbers."""

    first_sequence: int = 1
    last_sequence: int | None = None
    """The last selected event; None: up to the end."""
    request_id: str | None = None
    """Select only this request."""

    @property
    def is_everything(self) -> bool:
        """Whether nothing is left out."""
        return self.first_sequence == 1 and self.last_sequence is None and self.request_id is None

    def holds(self, sequence: int) -> bool:
        """Whether the event with this number is in the selected range."""
        return self.first_sequence <= sequence and not self.is_over(sequence)

    def is_over(self, sequence: int) -> bool:
        """Whether the event with this number is after the selected range, so that reading can stop."""
        return self.last_sequence is not None and sequence > self.last_sequence

    def holds_request(self, request_id: str) -> bool:
        """Whether findings about this request id are selected. Findings about no request (empty id) always are."""
        return self.request_id is None or not request_id or request_id == self.request_id

    def concerns(self, sequence: int, request_id: str) -> bool:
        """Whether a finding at this event about this request (empty: about no request) is selected."""
        return self.holds(sequence) and self.holds_request(request_id)

    def concerns_violation(self, violation: Violation) -> bool:
        """Whether this violation is selected."""
        return self.concerns(violation.sequence, violation.request_id)
