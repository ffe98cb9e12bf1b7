"""The checkers of the standard core, by their rules; a folder for each subject."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvledger.lifecycle.audit import blocks, jobs, keys, lives, slots, tokens
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.recorded import Recorded

RULES: Mapping[str, type[Checker]] = MappingProxyType(
    {
        checker.rule: checker
        for checker in (
            Recorded,
            *lives.CHECKERS,
            *tokens.CHECKERS,
            *keys.CHECKERS,
            *slots.CHECKERS,
            *blocks.CHECKERS,
            *jobs.CHECKERS,
        )
    }
)
"""Rule -> its checker."""
