"""Ids of spans and traces, computed from the log and the event, so that a second export has the same ids.

All spans of a request are in one trace. This is the trace of the request's caller if the log contains the id of that
trace, otherwise a new trace.
"""

from __future__ import annotations

import hashlib
from typing import Final

from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, TraceFlags

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


def parent_of(trace_parent: bytes) -> SpanContext | None:
    """Return the span of a request's caller; None: unknown. vLLM's own span `llm_request` has the same parent."""
    trace_id, span_id = int.from_bytes(trace_parent[:16], "big"), int.from_bytes(trace_parent[16:24], "big")
    parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=_SAMPLED)
    return parent if parent.is_valid else None


class SpanIds(IdGenerator):
    """Computes the ids of one log's spans. The SDK gives the ids in `next` to the span that it starts next."""

    def __init__(self, log_id: str) -> None:
        self._log_id = log_id
        self.next = INVALID_SPAN_CONTEXT

    def generate_span_id(self) -> int:
        """Return the id of the next span."""
        return self.next.span_id

    def generate_trace_id(self) -> int:
        """Return the trace id of the next span. The SDK asks for it only if the span has no parent."""
        return self.next.trace_id

    def of_request(self, ordinal: int | None, trace_parent: bytes) -> SpanContext:
        """Return the ids of a life's span. If `ordinal` is None, return the ids of the span of the whole log.

        The whole log's span has a trace of its own.
        """
        if ordinal is None:
            return self._context(self._hash(16, "log"), "log")
        parent = parent_of(trace_parent)
        trace_id = self._hash(16, "trace", ordinal) if parent is None else parent.trace_id
        return self._context(trace_id, "request", ordinal)

    def within(self, parent: SpanContext, *what: str | int) -> SpanContext:
        """Return the ids of a span in the trace of `parent`. `what` must be different for each span of the log."""
        return self._context(parent.trace_id, *what)

    def _context(self, trace_id: int, *what: str | int) -> SpanContext:
        return SpanContext(trace_id, self._hash(8, *what), is_remote=False, trace_flags=_SAMPLED)

    def _hash(self, num_bytes: int, *what: str | int) -> int:
        text = "\0".join((self._log_id, *map(str, what)))
        return (
            int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=num_bytes).digest(), "big") or 1
        )
