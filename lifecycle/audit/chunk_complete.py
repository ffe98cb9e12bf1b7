"""CHUNK_COMPLETE: only settled tokens are saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.settled_tokens import SETTLED_EVENTS, SettledTokens
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent


class ChunkComplete:
    """Every saved chunk, and every saved tail, ends at or before the settled tokens that the log had told by then.

    Verifies: this for saves after a step, a preemption and the end; at the end the last sampled token does not
    count, whatever the status: it was never computed.
    Does not verify: that the settled count itself was right, nor the order of writes on the device.
    """

    rule: ClassVar[str] = "CHUNK_COMPLETE"
    looks_at: ClassVar[frozenset[type[e.Event]]] = SETTLED_EVENTS | {e.SaveIssued, e.TailSaveIssued}

    def __init__(self) -> None:
        self._settled = SettledTokens()

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Compare the end of a save with what is settled."""
        event = step.event
        if isinstance(event, e.SaveIssued | e.TailSaveIssued):
            num_settled_tokens, sequence = self._settled.of(event.request_id)
            if isinstance(event, e.TailSaveIssued):
                what, num_tokens = "the tail", event.first_token + event.num_tokens
            else:
                deepest = max(event.chunks, default=-1)
                what, num_tokens = f"chunk {deepest}", (deepest + 1) * projections.configuration.chunk_size
            if num_tokens > num_settled_tokens:
                detail = f"{what} ends at token {num_tokens}, but only {num_settled_tokens} tokens were settled"
                yield violation(self.rule, step, projections, detail, sequence, event.cause)
        else:
            self._settled.fold(step, projections)
