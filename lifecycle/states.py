"""The states of a request and of a job, and the meaning of each state.

A request is in one state of each of its regions: its phase (`RequestState`), `blocks`, `first`, `current` and `trust`.
A job is in one state of `work` and of `source`. `table.py` defines to which state an event leads. `handlers.py` defines
what kvledger decides in a state.
"""

from __future__ import annotations

import enum


class RequestState(enum.StrEnum):
    """Phase of a request, as known from its events."""

    NEW = "new"
    """vLLM has accepted the request and computed nothing for it. A load may already be filling the request's blocks."""

    CHUNKED_PREFILL = "chunked_prefill"
    """Some of the request's known tokens are computed or in a step in flight. The others wait for a later step."""

    RUNNING = "running"
    """Every known token of the request is computed or in a step in flight. The request decodes."""

    PREEMPTED = "preempted"
    """vLLM freed the request's blocks. Only the host pool and vLLM's prefix cache may still have KV of the request."""

    RECOVERING = "recovering"
    """The request was preempted and has blocks again. A load or a recomputation fills them."""

    FINISHED = "finished"
    """vLLM will not schedule the request again. Copies for it may be in flight. kvledger forgets the request when the
    last of these copies is settled."""


class BlocksRegion(enum.StrEnum):
    """Whether a request has blocks, and whether a load fills them."""

    NONE = "none"
    """The request holds no blocks."""

    GRANTED = "granted"
    """The request holds blocks, and no load of the request's current generation is filling them."""

    LOADING = "loading"
    """The request holds blocks, and a load of the request's current generation is filling them."""


class FirstRegion(enum.StrEnum):
    """Whether the request must compute tokens before it is offered another load."""

    COMPUTED = "computed"
    """No load of the request has failed since the latest step that computed tokens for the request."""

    COMPUTES_FIRST = "computes_first"
    """A load of the request failed, and no later step has computed tokens for the request."""


class CurrentRegion(enum.StrEnum):
    """Whether tokens that the request computes may be saved."""

    CURRENT = "current"
    """None of the tokens in the request's blocks were computed before the last cache reset."""

    STALE = "stale"
    """The cache was reset while the request held blocks. Tokens computed on top of these blocks must not be saved."""


class TrustRegion(enum.StrEnum):
    """Whether the request may use the cache."""

    TRUSTED = "trusted"
    """Everything that kvledger knows about the request is consistent."""

    QUARANTINED = "quarantined"
    """The request gets no more hits and no more saves. It computes its tokens."""


class WorkRegion(enum.StrEnum):
    """Progress of a job."""

    ISSUED = "issued"
    """At least one rank has not reported the job."""

    OVERDUE = "overdue"
    """At least one rank has not reported the job, although kvledger asked the workers for their reports."""

    GIVEN_UP = "given_up"
    """The job is a save that counts as failed. A rank that has not reported the job may still write the job's slots."""

    SETTLED = "settled"
    """The job is over. No rank reads or writes the job's blocks and slots any more."""


class SourceRegion(enum.StrEnum):
    """Whether the request of a job still has the blocks that the job reads or writes."""

    OWNED = "owned"
    """The request has the job's blocks, or the copy runs within a step."""

    FENCED = "fenced"
    """vLLM took the job's blocks or may overwrite them, so the next step waits for the copy."""


INITIAL_STATE = RequestState.NEW
