"""CHUNK_COMPLETE: only settled tokens are saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.settled import SettledTokens


class ChunkComplete:
    """Every saved chunk, and every saved tail, ends at or before the settled tokens that the log had told by then.

    Verifies: this for saves after a step, a preemption and the end; at the end the last sampled token does not
    count, whatever the status: it was never computed.
    Does not verify: that the settled count itself was right, nor the order of writes on the device.
    """

    rule: ClassVar[str] = "CHUNK_COMPLETE"

    def __init__(self) -> None:
        self._settled: SettledTokens
        self._chunk_size = 0

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._settled = model.settled
        self._chunk_size = model.configuration.chunk_size
        return [(e.SaveIssued, self._save_issued), (e.TailSaveIssued, self._tail_save_issued)]

    def _save_issued(self, event: e.SaveIssued, moment: Moment) -> Iterator[Violation] | None:
        chunks = event.chunks
        deepest = max(chunks) if len(chunks) > 1 else chunks[0] if chunks else -1
        num_tokens = (deepest + 1) * self._chunk_size
        told = self._settled.told(event.request_id)
        if told is not None and num_tokens <= told[0]:
            return None
        return self._unsettled(event, f"chunk {deepest}", num_tokens, moment)

    def _tail_save_issued(self, event: e.TailSaveIssued, moment: Moment) -> Iterator[Violation] | None:
        num_tokens = event.first_token + event.num_tokens
        if num_tokens <= self._settled.of(event.request_id)[0]:
            return None
        return self._unsettled(event, "the tail", num_tokens, moment)

    def _unsettled(
        self,
        event: e.SaveIssued | e.TailSaveIssued,
        what: str,
        num_tokens: int,
        moment: Moment,
    ) -> Iterator[Violation]:
        num_settled_tokens, sequence = self._settled.of(event.request_id)
        if num_tokens <= num_settled_tokens:
            return
        detail = f"{what} ends at token {num_tokens}, but only {num_settled_tokens} tokens were settled"
        yield violation(self.rule, moment, detail, sequence, event.cause)
