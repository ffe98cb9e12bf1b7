"""The six states of a request, and what is known about a request in each.

This room holds names and their meaning, nothing else. Which event leads from where to where
stands in `table.py`; what a state does with an event stands in `handlers/`.
"""

from __future__ import annotations

import enum

from kvledger.lifecycle.members import members_at_hand


@members_at_hand
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
    """It will not be scheduled again. It may still owe transfers, and leaves when the last is settled."""


INITIAL_STATE = RequestState.NEW
TERMINAL_STATE = RequestState.FINISHED
