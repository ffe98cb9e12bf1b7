"""Spans of tokens that have one reason, and operations on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from kvledger.adapters.tools.reasons.chunk_history import ChunkFact
from kvledger.adapters.tools.reasons.reason import Reason


@attrs.frozen
class Span:
    """Tokens from `first_token` to before `end_token`, the reason why they were left to compute, and its proof."""

    first_token: int
    end_token: int
    reason: Reason
    evidence: tuple[int, ...] = ()
    """Sequence numbers of events; the first is the main proof."""
    fact: ChunkFact | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.end_token - self.first_token


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the spans without empty spans. Adjacent spans with equal reason and proof become one span."""
    result: list[Span] = []
    for span in spans:
        if span.first_token >= span.end_token:
            continue
        last = result[-1] if result else None
        if last is not None and last.end_token == span.first_token and _same(last, span):
            result[-1] = Span(last.first_token, span.end_token, last.reason, last.evidence, last.fact)
        else:
            result.append(span)
    return tuple(result)


def _same(one: Span, other: Span) -> bool:
    return one.reason is other.reason and one.evidence == other.evidence and one.fact == other.fact


def within(spans: Sequence[Span], first_token: int, end_token: int) -> Iterator[Span]:
    """Yield the parts of the spans in a range. Tokens of the range that no span covers get the reason `UNKNOWN`."""
    at = first_token
    for span in spans:
        first, end = max(span.first_token, at), min(span.end_token, end_token)
        if first >= end:
            continue
        if first > at:
            yield Span(at, first, Reason.UNKNOWN)
        yield attrs.evolve(span, first_token=first, end_token=end)
        at = end
    if at < end_token:
        yield Span(at, end_token, Reason.UNKNOWN)


def replaced(spans: Sequence[Span], new: Span) -> tuple[Span, ...]:
    """Return the spans without the tokens of `new`, and with `new` in their place."""
    before = [attrs.evolve(span, end_token=min(span.end_token, new.first_token)) for span in spans]
    after = [attrs.evolve(span, first_token=max(span.first_token, new.end_token)) for span in spans]
    return joined((*before, new, *after))
