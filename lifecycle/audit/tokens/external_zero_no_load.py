"""EXTERNAL_ZERO_NO_LOAD: an allocation that takes up nothing loads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.answers import Answers
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.moment import Check, Moment


class ExternalZeroNoLoad:
    """`num_external_tokens == 0` means no load, and releases the pending answer.

    Verifies: every load follows an allocation of its request, in the same holding of blocks, that took up external
    tokens; each allocation causes at most one load.
    Does not verify: that tokens taken up are loaded (a load that is missing shows as a divergence); that an answer is
    used once (ALLOC_MATCHES_LOOKUP).
    """

    rule: ClassVar[str] = "EXTERNAL_ZERO_NO_LOAD"

    def __init__(self) -> None:
        self._answers: Answers
        self._used: dict[str, int] = {}
        """Request id -> sequence of the last allocation that a load has used."""

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._answers = model.answers
        model.forgotten.at((*LIFE, e.RequestPreempted), self._used)
        return [(e.LoadIssued, self._load_issued)]

    def _load_issued(self, event: e.LoadIssued, moment: Moment) -> list[Violation] | None:
        allocation = self._answers.allocation(event.request_id)
        sequence = 0 if allocation is None else allocation.sequence
        is_taken_up = allocation is not None and allocation.num_external_tokens > 0
        if is_taken_up and self._used.get(event.request_id) != sequence:
            self._used[event.request_id] = sequence
            return None
        detail = f"load {event.job_id} of {event.num_tokens} tokens, but no allocation took up external tokens"
        return [violation(self.rule, moment, detail, sequence)]
