"""The reasons. Each token that an admission leaves to compute has exactly one of them."""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """Why a token was left to compute."""

    NEW = "new"
    """Nobody had computed it before, as far as the log tells. No miss."""
    LAST_TOKEN = "last_token"  # noqa: S105 -- a token of a model
    """The last known token is always computed, because the next one is sampled from it. No miss."""
    PARTIAL_CHUNK = "partial_chunk"
    """Behind the last whole chunk, so it has no key; only the tail of a preempted request covers such tokens."""

    UNSAVED = "unsaved"
    """Its chunk was known, or computed before, and no save of it had been issued: it had not settled by then."""
    SAVING = "saving"
    """The save of its chunk was still under way."""
    DEFERRAL_EXHAUSTED = "deferral_exhausted"
    """Likewise, and the scheduler had been asked to wait as often as is allowed."""
    DECLINED = "declined"
    """Its chunk was not saved, because the host pool had no room or a load had failed into its blocks."""
    SAVE_FAILED = "save_failed"
    EVICTED = "evicted"
    TAINTED = "tainted"
    """A load of its chunk had failed."""
    RESET = "reset"
    """Its chunk was saved, or being saved, when the cache was reset."""
    STALE = "stale"
    """It was computed before a reset and not saved by then, so it could not be saved any more."""
    BEHIND_GAP = "behind_gap"
    """Its chunk was there, behind one that was not; a prefix ends at the first that is missing."""

    WINDOW = "window"
    """Its chunk was there, but not what a sliding window sees at any later boundary."""
    LIMITED = "limited"
    """A policy allows less than what was there."""
    LOAD_FAILED = "load_failed"
    """It was to be loaded and the load failed, or the load before had failed and the request had to compute first."""
    QUARANTINED = "quarantined"
    """The request gets no help from the cache any more."""
    UNALIGNED = "unaligned"
    """The local prefix does not end at a block, and loads are whole pages."""
    RIVAL_LOAD = "rival_load"
    """Another request's load was under way; with several groups of layers there is one at a time."""
    NO_KEY = "no_key"
    """A whole chunk whose key was not known."""

    RECORDED = "recorded"
    """The recorded connector did not offer it; why is not in the log."""

    NOT_TAKEN_UP = "not_taken_up"
    """It was offered, and the scheduler took fewer tokens."""
    NOT_DELIVERED = "not_delivered"
    """It was taken up, and no load was issued, because a rule was broken."""
    HOOK_FAILED = "hook_failed"
    """No lookup was recorded: a hook of the connector raised."""
    WITHHELD = "withheld"
    """Decided, and kept from the scheduler because the log could not be written; it was answered 0 instead."""
    NO_LOOKUP = "no_lookup"
    """No lookup was recorded, and nothing tells why."""
    ROLLED_BACK = "rolled_back"
    """The scheduler took computed tokens back, and no failed load tells why."""
    UNKNOWN = "unknown"
    """The log does not tell, as where events are lost."""


BY_DESIGN = frozenset({Reason.NEW, Reason.LAST_TOKEN, Reason.PARTIAL_CHUNK})
"""What no cache of this chunk size could have spared."""
