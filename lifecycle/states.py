"""The states of a request and of a transfer job, and what is known in each.

A request is in one state of each of its regions: the phase, and the regions next to it. A job has regions of its
own. This module holds names and their meaning, nothing else. Which event leads from where to where stands in
`table.py`; what a state does with an event stands in `handlers.py`.
"""

from __future__ import annotations

import enum


class RequestState(enum.StrEnum):
    """Where a request stands, as far as its events tell."""

    NEW = "new"
    """Accepted, nothing computed. It may hold blocks that an external load is filling."""

    CHUNKED_PREFILL = "chunked_prefill"
    """Part of its known tokens is computed or in flight, more of them are to come."""

    RUNNING = "running"
    """Every known token is computed or in flight; it decodes."""

    PREEMPTED = "preempted"
    """Its blocks are gone. What it had computed is only in the log, the host pool or the prefix cache."""

    RECOVERING = "recovering"
    """It has blocks again and KV is coming back into them, by load or by recomputation."""

    FINISHED = "finished"
    """It will not be scheduled again. Copies of it may still be in flight; it leaves when the last is settled."""


class BlocksRegion(enum.StrEnum):
    """What a request's life has to be computed or loaded into."""

    NONE = "none"
    """It holds no blocks."""

    GRANTED = "granted"
    """It holds blocks, and no load of this life fills them."""

    LOADING = "loading"
    """It holds blocks, and a load of this life fills them."""


class FirstRegion(enum.StrEnum):
    """Whether the request has to compute something before it is offered another load."""

    COMPUTED = "computed"
    """No load of this life has failed since a step computed something for it."""

    COMPUTES_FIRST = "computes_first"
    """Its load failed, and no step has computed anything for it since."""


class CurrentRegion(enum.StrEnum):
    """Whether what the request has computed is worth saving."""

    CURRENT = "current"
    """Nothing of what it holds was computed before the last reset."""

    STALE = "stale"
    """A reset came while it held blocks: nothing that this life computes may be saved."""


class TrustRegion(enum.StrEnum):
    """Whether the cache helps the request."""

    TRUSTED = "trusted"
    """What is known about it agrees with itself."""

    QUARANTINED = "quarantined"
    """It gets no hits and no saves any more; it recomputes."""


class WorkRegion(enum.StrEnum):
    """How far a transfer job is."""

    ISSUED = "issued"
    """A rank at least has not reported."""

    OVERDUE = "overdue"
    """The same, although the workers were asked for a report."""

    GIVEN_UP = "given_up"
    """A save that counts as failed; a rank that has not reported may still write its slots."""

    SETTLED = "settled"
    """Nothing is read or written any more."""


class SourceRegion(enum.StrEnum):
    """Whose blocks a transfer job reads or writes."""

    OWNED = "owned"
    """The request has them, or the copy was issued for the step itself."""

    FENCED = "fenced"
    """They were taken, and the next step waits for the copy."""


INITIAL_STATE = RequestState.NEW
