"""States of a request and of a transfer job, and what each means.

A request is in one state of each of its regions: its phase (`RequestState`), `blocks`, `first`, `current` and `trust`.
A job is in one state of `work` and of `source`. `table.py` defines which event leads where, `handlers.py` what kvledger
decides in a state.
"""

from __future__ import annotations

import enum


class RequestState(enum.StrEnum):
    """Phase of a request, as known from its events."""

    NEW = "new"
    """Accepted, nothing computed. A load may already be filling its blocks."""

    CHUNKED_PREFILL = "chunked_prefill"
    """Some known tokens are computed or in flight; the others are still to be scheduled."""

    RUNNING = "running"
    """Every known token is computed or in flight; the request decodes."""

    PREEMPTED = "preempted"
    """vLLM freed its blocks. What it had computed is at most in the host pool and in vLLM's prefix cache."""

    RECOVERING = "recovering"
    """It has blocks again, which a load or a recomputation fills."""

    FINISHED = "finished"
    """vLLM will not schedule it again. Copies of it may be in flight; it is forgotten when the last one is settled."""


class BlocksRegion(enum.StrEnum):
    """Whether a request has blocks, and whether a load fills them."""

    NONE = "none"
    """It holds no blocks."""

    GRANTED = "granted"
    """It holds blocks, and no load of this generation is filling them."""

    LOADING = "loading"
    """It holds blocks, and a load of this generation is filling them."""


class FirstRegion(enum.StrEnum):
    """Whether the request must compute something before it is offered another load."""

    COMPUTED = "computed"
    """No load has failed since a step last computed something for it."""

    COMPUTES_FIRST = "computes_first"
    """A load failed, and no step has computed anything for it since."""


class CurrentRegion(enum.StrEnum):
    """Whether what the request computes may be saved."""

    CURRENT = "current"
    """Nothing that it holds was computed before the last cache reset."""

    STALE = "stale"
    """The cache was reset while the request held blocks. Nothing that it computes on top of them may be saved."""


class TrustRegion(enum.StrEnum):
    """Whether the request may use the cache."""

    TRUSTED = "trusted"
    """Everything known about it is consistent."""

    QUARANTINED = "quarantined"
    """It gets no more hits and saves; it recomputes."""


class WorkRegion(enum.StrEnum):
    """How far a transfer job is."""

    ISSUED = "issued"
    """At least one rank has not reported."""

    OVERDUE = "overdue"
    """At least one rank has not reported, although the workers were asked to."""

    GIVEN_UP = "given_up"
    """A save that counts as failed. A rank that has not reported may still write its slots."""

    SETTLED = "settled"
    """No rank reads or writes its blocks and slots any more."""


class SourceRegion(enum.StrEnum):
    """Whether the request still has the blocks that a transfer job reads or writes."""

    OWNED = "owned"
    """The request has them, or the copy runs within its step."""

    FENCED = "fenced"
    """vLLM took them, so the next step waits for the copy."""


INITIAL_STATE = RequestState.NEW
