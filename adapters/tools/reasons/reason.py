"""The reasons: each token that an admission leaves to compute has exactly one. docs/reasons.md has their proofs."""

from __future__ import annotations

import enum
from typing import Self


class Reason(enum.StrEnum):
    """Why a token was left to compute. `meaning`: the same in words, about several tokens."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:  # noqa: D102 -- as of any enumeration with a second value
        reason = str.__new__(cls, value)
        reason._value_ = value
        reason.meaning = meaning
        return reason

    NEW = "new", "nobody had computed them before"
    SALTED = "salted", "nobody had computed them under the request's cache salt"
    LAST_TOKEN = "last_token", "the last known token is always computed, because the next one is sampled from it"
    PARTIAL_CHUNK = "partial_chunk", "behind the last whole chunk, so nothing is saved under a key"
    UNSAVED = "unsaved", "no save had been issued: they had not settled, or were less than a save interval"
    SAVING = "saving", "their save was still under way"
    DEFERRAL_EXHAUSTED = (
        "deferral_exhausted",
        "their save was still under way, after the scheduler had waited as often as is allowed",
    )
    DECLINED = "declined", "not saved, because the host pool had no room or a load had failed into their blocks"
    SAVE_FAILED = "save_failed", "their save failed"
    EVICTED = "evicted", "saved and evicted"
    TAINTED = "tainted", "tainted: a load of them had failed"
    RESET = "reset", "lost to a cache reset"
    STALE = "stale", "computed before a cache reset and not saved by then"
    BEHIND_GAP = (
        "behind_gap",
        "saved, but behind a chunk that was not there; a prefix ends at the first that is missing",
    )
    WINDOW = "window", "saved, but not what a sliding window sees at any later boundary"
    SLOWER = "slower", "saved, but loads took longer than computing, as measured while serving"
    LOAD_FAILED = "load_failed", "their load failed, or the load before had failed and the request had to compute first"
    QUARANTINED = "quarantined", "the request was quarantined: the cache is disabled for it"
    UNALIGNED = "unaligned", "saved, but the local prefix did not end at a block"
    RIVAL_LOAD = "rival_load", "saved, but another request's load was under way, and there is one at a time"
    NO_KEY = "no_key", "the keys of their chunks were not known"
    SKIPPED = "skipped", "the request reads no cached tokens, as its parameters ask"
    RECORDED = "recorded", "not offered by the recorded connector; why is not in the log"
    NOT_CLAIMED = "not_claimed", "offered, and not claimed by the scheduler"
    NOT_DELIVERED = "not_delivered", "claimed, and not loaded, because a rule was broken"
    HOOK_FAILED = "hook_failed", "no lookup was recorded, because a hook failed"
    WITHHELD = "withheld", "withheld from the scheduler, because the event log could not be written"
    NO_LOOKUP = "no_lookup", "no lookup was recorded"
    ROLLED_BACK = "rolled_back", "taken back by the scheduler"
    UNKNOWN = "unknown", "not known: the log lacks events"
    NEVER_GIVEN = "never_given", "computed before, and never given to the recorded connector's workers to save"
    EVICTED_UNSAVED = (
        "evicted_unsaved",
        "computed before, never given to the recorded connector's workers to save, and gone from vLLM's prefix cache",
    )
    RESET_UNSAVED = (
        "reset_unsaved",
        "computed before, never given to the recorded connector's workers to save, and lost to a reset of vLLM's cache",
    )
    COMPUTING = "computing", "another request was still computing them"
    NEVER_OFFERED = "never_offered", "saved, and never offered to any request by the recorded connector"
    NOT_OFFERED = (
        "not_offered",
        "saved and offered before, and not this time; when the recorded connector evicts is not in the log",
    )
    SHORT_OF_UNIT = "short_of_unit", "less than the recorded connector matches at a time"


BY_DESIGN = frozenset({Reason.NEW, Reason.SALTED, Reason.LAST_TOKEN, Reason.PARTIAL_CHUNK, Reason.SKIPPED})
"""Reasons that are not misses: no cache of this chunk size can avoid them, or the request does not want cached
tokens."""
