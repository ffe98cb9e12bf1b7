"""The rules of the standard core, one module for each subject. Checkers run in the order of `RULES`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.rules import (
    digests,
    evictions,
    exchanged,
    failed_loads,
    filled_blocks,
    jobs,
    keys,
    lives,
    lookups,
    order,
    read_blocks,
    recorded,
    save_interval,
    saves,
    slots,
    tables,
    tokens,
)

_SUBJECTS = (
    *(recorded, lives, lookups, failed_loads, tokens, keys, saves, save_interval),
    *(digests, slots, evictions, tables, filled_blocks, read_blocks, jobs, order, exchanged),
)
RULES: Mapping[str, type[Checker]] = MappingProxyType(
    {
        checker.rule: checker
        for subject in _SUBJECTS
        for checker in vars(subject).values()
        if isinstance(checker, type) and checker.__module__ == subject.__name__ and issubclass(checker, Checker)
    }
)
"""Rule → its checker."""
