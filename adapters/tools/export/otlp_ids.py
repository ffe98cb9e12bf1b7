"""The ids of spans and traces: they follow from the log and the event, so that a second export gives the same.

All of a request's spans are in one trace: its caller's, where the log has that, else one of its own.
"""

from __future__ import annotations

import hashlib
from typing import Final

from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, TraceFlags

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


def parent_of(trace_parent: bytes) -> SpanContext | None:
    """The span of a request's caller, which is also the parent of vLLM's own `llm_request`."""
    trace_id, span_id = int.from_bytes(trace_parent[:16], "big"), int.from_bytes(trace_parent[16:24], "big")
    parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=_SAMPLED)
    return parent if parent.is_valid else None


class SpanIds(IdGenerator):
    """Of one log. The SDK is given those of `next`."""

    def __init__(self, log_id: str) -> None:
        self._log_id = log_id
        self.next = INVALID_SPAN_CONTEXT

    def generate_span_id(self) -> int:
        """The next span's."""
        return self.next.span_id

    def generate_trace_id(self) -> int:
        """The next span's, where it has no parent."""
        return self.next.trace_id

    def of_request(self, ordinal: int | None, trace_parent: bytes) -> SpanContext:
        """Of the span of a life; without one of the log's, below which stands what has no request."""
        if ordinal is None:
            return self._context(self._hash(16, "log"), "log")
        parent = parent_of(trace_parent)
        trace_id = self._hash(16, "trace", ordinal) if parent is None else parent.trace_id
        return self._context(trace_id, "request", ordinal)

    def within(self, parent: SpanContext, *what: str | int) -> SpanContext:
        """Of a span in the same trace, which `what` tells from all others of the log."""
        return self._context(parent.trace_id, *what)

    def _context(self, trace_id: int, *what: str | int) -> SpanContext:
        return SpanContext(trace_id, self._hash(8, *what), is_remote=False, trace_flags=_SAMPLED)

    def _hash(self, num_bytes: int, *what: str | int) -> int:
        text = "\0".join((self._log_id, *map(str, what)))
        return (
            int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=num_bytes).digest(), "big") or 1
        )
