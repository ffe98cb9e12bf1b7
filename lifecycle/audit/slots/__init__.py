"""Slots: what lies in the host pool, for whom, and how long."""

from kvledger.lifecycle.audit.slots.evict_idle_only import EvictIdleOnly
from kvledger.lifecycle.audit.slots.hit_pinned import HitPinned
from kvledger.lifecycle.audit.slots.loadable_after_commit import LoadableAfterCommit
from kvledger.lifecycle.audit.slots.pin_balance import PinBalance
from kvledger.lifecycle.audit.slots.slot_exclusive import SlotExclusive
from kvledger.lifecycle.audit.slots.waiting_kept import WaitingKept

CHECKERS = (
    LoadableAfterCommit,
    SlotExclusive,
    EvictIdleOnly,
    HitPinned,
    PinBalance,
    WaitingKept,
)
