"""Lookup policies: what may be made of a hit. Wrappers that compose, built from the configuration.

A policy sees a number of hit tokens and the request's record, and answers how many of them may be used. A
policy that counts is a projection as well: it folds events and remembers nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.events import Event
from kvledger.lifecycle.policies.chunk_statistics import ChunkStatistics
from kvledger.lifecycle.policies.hit_limit import HitLimit
from kvledger.lifecycle.policies.longest_prefix import LongestPrefix
from kvledger.lifecycle.projections.tracker import RequestRecord, RequestTracker

__all__ = ["ChunkStatistics", "HitLimit", "LongestPrefix", "LookupPolicy", "build_policy"]


class LookupPolicy(Protocol):
    """Decides how many tokens of a hit may be used."""

    def usable_tokens(self, num_hit_tokens: int, record: RequestRecord) -> int:
        """At most `num_hit_tokens`; depends on nothing but its arguments and folded events."""

    def folds(self) -> Mapping[type[Event], Callable[..., None]]:
        """Event class -> fold, of this policy and of those it wraps."""


def build_policy(configuration: LedgerConfiguration, tracker: RequestTracker) -> LookupPolicy:
    """The longest prefix, wrapped in what the configuration asks for."""
    policy: LookupPolicy = LongestPrefix()
    if configuration.max_hit_share < 1:
        policy = HitLimit(policy, configuration.max_hit_share)
    if configuration.chunk_statistics:
        policy = ChunkStatistics(policy, tracker, configuration.chunk_size)
    return policy
