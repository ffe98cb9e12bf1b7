"""CHUNK_COMPLETE: only settled tokens are saved."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import on


class ChunkComplete(Checker):
    """Every saved chunk, and every saved tail, ends at or before the settled tokens that the log had by then.

    Verifies: this for saves after a step, a preemption and the end; at the end the last sampled token does not
    count, whatever the status: it was never computed.
    Does not verify: that the settled count itself was right, nor the order of writes on the device.
    """

    rule = "CHUNK_COMPLETE"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._chunk_size = model.configuration.chunk_size

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued) -> None:
        chunks = event.chunks
        deepest = max(chunks) if len(chunks) > 1 else chunks[0] if chunks else -1
        num_tokens = (deepest + 1) * self._chunk_size
        known = self.settled.known(event.request_id)
        if known is None or num_tokens > known[0]:
            self._check(event, f"chunk {deepest}", num_tokens)

    @on(e.TailSaveIssued)
    def _tail_save_issued(self, event: e.TailSaveIssued) -> None:
        self._check(event, "the tail", event.first_token + event.num_tokens)

    def _check(self, event: e.SaveIssued | e.TailSaveIssued, what: str, num_tokens: int) -> None:
        num_settled_tokens, sequence = self.settled.of(event.request_id)
        if num_tokens > num_settled_tokens:
            detail = f"{what} ends at token {num_tokens}, but only {num_settled_tokens} tokens were settled"
            self.broken(detail, sequence, event.cause)
