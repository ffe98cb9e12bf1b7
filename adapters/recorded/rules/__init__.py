"""Rules for a recorder's log: the contract of vLLM's `KVConnectorBase_V1`, as far as the log shows it.

Some rules have the same name as a rule of the core and replace it, because the core's rule checks kvledger's own copies
and slots. All rules use only the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvledger.adapters.recorded.rules.answers import LastToken
from kvledger.adapters.recorded.rules.complete import ChunkComplete, LoadComplete
from kvledger.adapters.recorded.rules.copies import SrcBlockOwned, TableEq
from kvledger.adapters.recorded.rules.ends import CompletionOnce, Liveness
from kvledger.adapters.recorded.rules.exclusive import (
    BlockReuseFenced,
    LoadDstExclusive,
    LoadXorStores,
    SrcBlockStable,
)
from kvledger.adapters.recorded.rules.keys import SavedUnderKey
from kvledger.adapters.recorded.rules.resumed import ResumeCoversOutput
from kvledger.adapters.recorded.rules.saves import StoreContiguous
from kvledger.lifecycle.audit import Checker

_REPLACING = (
    LastToken,
    TableEq,
    SrcBlockOwned,
    LoadDstExclusive,
    LoadXorStores,
    SrcBlockStable,
    BlockReuseFenced,
    ChunkComplete,
    CompletionOnce,
    Liveness,
    StoreContiguous,
    ResumeCoversOutput,
)
"""Rules that replace those of the core, for a recorded connector's copies and answers."""
_OWN = (LoadComplete, SavedUnderKey)
"""Rules that the core does not have."""
RULES: Mapping[str, type[Checker]] = MappingProxyType({checker.rule: checker for checker in (*_REPLACING, *_OWN)})

_SLOTS = "the log does not show where a recorded connector stores what it saves"
_CHUNKS = "the log does not show which chunks a recorded connector saves"
_HITS = "the log does not show what a recorded connector could have answered"
_KEPT = "the log does not show why a recorded connector keeps blocks; COMPLETION_ONCE and LIVENESS check their release"
LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("LOADABLE_AFTER_COMMIT", "SLOT_EXCLUSIVE", "EVICT_IDLE_ONLY"),
                *("HIT_PINNED", "PIN_BALANCE", "WAITING_KEPT", "EVICTION_ORDER", "GROUP_AGREEMENT"),
            ),
            _SLOTS,
        ),
        **dict.fromkeys(
            ("CURSOR_LE_FRONTIER", "SETTLED_SAVED", "SAVE_INTERVAL", "RESET_EPOCH", "FAILED_LOAD_TAINT"),
            _CHUNKS,
        ),
        **dict.fromkeys(("LONGEST_HIT", "DEFER_BOUNDED"), _HITS),
        "LOOKUP_PURE": (
            "the log does not show what changes between two lookups of a request: the connector can evict KV, and "
            "other engines can store KV; if lookups have moved the start of a save, STORE_CONTIGUOUS reports it"
        ),
        **dict.fromkeys(("RELEASE_ALL", "DELAY_FREE_CONTRACT"), _KEPT),
        **{checker.rule: "" for checker in _REPLACING},
    }
)
"""Rule of the core → why it cannot be checked; empty if a rule of this package replaces it."""
