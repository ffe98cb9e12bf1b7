"""A hit limit: never use more than a share of the prompt, however much is there.

What LMCache calls `HitLimitLookupClient`. Useful to keep some prefill work, as when a host is slower than
the device at long prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvledger.lifecycle.events import Event
from kvledger.lifecycle.projections.tracker import RequestRecord

if TYPE_CHECKING:
    from kvledger.lifecycle.policies import LookupPolicy


class HitLimit:
    """Wraps a policy; `max_share` is the greatest usable part of the prompt, 0 to 1."""

    def __init__(self, inner: LookupPolicy, max_share: float) -> None:
        self._inner = inner
        self._max_share = max_share

    def usable_tokens(self, num_hit_tokens: int, record: RequestRecord) -> int:
        """What the wrapped policy allows, cut at the share of the prompt."""
        limit = int(record.num_prompt_tokens * self._max_share)
        return min(self._inner.usable_tokens(num_hit_tokens, record), limit)

    def folds(self) -> Mapping[type[Event], Callable[..., None]]:
        """The folds of the wrapped policy."""
        return self._inner.folds()
