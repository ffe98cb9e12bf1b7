"""The reasons why tokens are left to compute. `docs/reasons.md` says which events prove each reason."""

from __future__ import annotations

import enum
from typing import Self


class Reason(enum.StrEnum):
    """Why a token was left to compute. `meaning` is the reason in words, in the plural, as of several tokens."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:  # noqa: D102 -- as of any enumeration with a second value
        reason = str.__new__(cls, value)
        reason._value_ = value
        reason.meaning = meaning
        return reason

    NEW = "new", "no request had computed them before"
    SALTED = "salted", "no request with this cache salt had computed them before"
    LAST_TOKEN = "last_token", "the last known token is always computed, because the next one is sampled from it"
    PARTIAL_CHUNK = "partial_chunk", "after the last whole chunk, so they have no key to be saved under"
    UNSAVED = "unsaved", "no save had been issued yet: the tokens had not settled, or were fewer than a save interval"
    SAVING = "saving", "their save was still in flight"
    DEFERRAL_EXHAUSTED = (
        "deferral_exhausted",
        "the save of these tokens was still in flight after the last allowed deferral of the lookup",
    )
    DECLINED = "declined", "not saved, because the host pool had no room or a load into their blocks had failed"
    SAVE_FAILED = "save_failed", "their save failed"
    EVICTED = "evicted", "saved and evicted"
    TAINTED = "tainted", "tainted, because a load of these tokens had failed"
    RESET = "reset", "lost to a cache reset"
    STALE = "stale", "computed before a cache reset and not saved by then"
    BEHIND_GAP = (
        "behind_gap",
        "saved, but an earlier chunk was missing, and a hit ends at the first missing chunk",
    )
    WINDOW = "window", "saved, but at every later chunk boundary, a token in a sliding window was missing"
    SLOWER = "slower", "saved, but loads took longer than computing, as measured while serving"
    LOAD_FAILED = (
        "load_failed",
        "their load failed, or the previous load had failed and the request had to compute first",
    )
    QUARANTINED = "quarantined", "the request was quarantined: the cache is disabled for it"
    UNALIGNED = "unaligned", "saved, but the hit in vLLM's own cache did not end at a block boundary"
    RIVAL_LOAD = "rival_load", "saved, but another request's load was in flight, and only one load runs at a time"
    NO_KEY = "no_key", "the keys of these tokens' chunks were not known"
    SKIPPED = "skipped", "the request's parameters ask not to read cached tokens"
    RECORDED = "recorded", "not offered by the recorded connector; the log does not contain the reason"
    NOT_CLAIMED = "not_claimed", "offered, but the scheduler did not claim them"
    NOT_DELIVERED = "not_delivered", "claimed, but not loaded, because a rule was broken"
    HOOK_FAILED = "hook_failed", "no lookup was recorded, because a hook failed"
    WITHHELD = "withheld", "withheld from the scheduler, because the event log could not be written"
    NO_LOOKUP = "no_lookup", "no lookup was recorded"
    ROLLED_BACK = "rolled_back", "rolled back by the scheduler"
    UNKNOWN = "unknown", "not known: the log lacks events"
    NEVER_GIVEN = "never_given", "computed before, but never given to the recorded connector's workers to save"
    EVICTED_UNSAVED = (
        "evicted_unsaved",
        "computed before, never given to the recorded connector's workers to save, and gone from vLLM's prefix cache",
    )
    RESET_UNSAVED = (
        "reset_unsaved",
        "computed before, never given to the recorded connector's workers to save, and lost to a reset of vLLM's cache",
    )
    COMPUTING = "computing", "another request was still computing them"
    NEVER_OFFERED = "never_offered", "saved, but the recorded connector never offered them to any request"
    NOT_OFFERED = (
        "not_offered",
        "saved and offered before, but not this time; the log does not contain the recorded connector's evictions",
    )
    SHORT_OF_UNIT = "short_of_unit", "fewer tokens than the recorded connector matches at a time"


BY_DESIGN = frozenset({Reason.NEW, Reason.SALTED, Reason.LAST_TOKEN, Reason.PARTIAL_CHUNK, Reason.SKIPPED})
"""Reasons that are not misses: no cache of this chunk size can avoid them, or the request does not want cached
tokens."""
