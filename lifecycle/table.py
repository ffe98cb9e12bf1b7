"""The transition table, and the only place that knows it.

Rule 1: everything that moves a request from one state to another stands in this file. No handler, no
        projection and no adapter sets a state; they produce events, and the table says where those lead.
Rule 2: this file does not know what an event *does* besides moving the state. Token counts, blocks,
        chunks and jobs are the business of the projections.
Rule 3: a pair (state, event) that is not here is illegal. The event stays in the log, because it was
        seen; the state stays as it was; the violation is recorded and the request recomputes.
Rule 4: no row leaves `finished`, no row starts from "any state", no pair stands twice, every state can be
        reached. `machine.py` refuses to compile a table that breaks this.

Theory of operation
  A request is born in `new` by `RequestArrived`, which is therefore not a row. While it waits it is looked
  up any number of times; lookups never move it. `BlocksAllocated` does not move a new request either: holding
  blocks is no progress. What moves it is a step that schedules its tokens: `PrefillAdvanced` if known tokens
  remain for later steps, `PrefillCompleted` if none do. A preempted request passes through `recovering` as
  soon as it has blocks again, and leaves it the same two ways, once its load (if any) has arrived.

  A streaming session's next turn finds its blocks kept and new tokens to compute: that is `chunked_prefill`.
  A rollback, as after a failed load, likewise: known tokens are to be computed (again).

What does not fit the machine is not a flag
  A load in flight, a tail being saved, a completion that is awaited: each is a job in the transfer
  projection (`projections/transfers.py`). Reports of jobs may arrive in almost any state, because a copy
  does not care whether its request has been preempted or has finished meanwhile; hence their many rows.

The diagram in `docs/states.md`, the reference machine and the compiled form are all generated from ROWS.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.states import RequestState as S


@attrs.frozen
class Row:
    """In `source`, `event` leads to `dest`."""

    source: S
    event: type[e.RequestEvent]
    dest: S


def _stay(state: S, *events: type[e.RequestEvent]) -> Iterable[Row]:
    return (Row(state, event, state) for event in events)


_LOAD_REPORTS = (e.LoadCompleted, e.LoadFailed, e.TransferAwaited)
_SAVE_REPORTS = (e.SaveCompleted, e.SaveFailed)
_SAVING = (e.SaveIssued, e.SaveDeclined, *_SAVE_REPORTS)
_LOOKING_UP = (e.LookupRequested, e.LookupAnswered, e.LookupDeferred)

ROWS: tuple[Row, ...] = (
    # new: looked up, given blocks, perhaps filled by a load; the first scheduled tokens move it.
    Row(S.NEW, e.PrefillAdvanced, S.CHUNKED_PREFILL),
    Row(S.NEW, e.PrefillCompleted, S.RUNNING),
    Row(S.NEW, e.RequestFinished, S.FINISHED),
    *_stay(S.NEW, e.ChunkKeysObserved, *_LOOKING_UP, e.BlocksAllocated, e.BlockTableObserved, e.LoadIssued),
    *_stay(S.NEW, *_LOAD_REPORTS, e.TokensRolledBack, e.RequestQuarantined),
    # A step can preempt a request whose load has not been reported yet (two steps in flight).
    Row(S.NEW, e.RequestPreempted, S.PREEMPTED),
    # chunked_prefill: one chunk of the prompt after another, saving what has settled.
    Row(S.CHUNKED_PREFILL, e.PrefillAdvanced, S.CHUNKED_PREFILL),
    Row(S.CHUNKED_PREFILL, e.PrefillCompleted, S.RUNNING),
    Row(S.CHUNKED_PREFILL, e.RequestPreempted, S.PREEMPTED),
    Row(S.CHUNKED_PREFILL, e.SessionContinued, S.CHUNKED_PREFILL),
    Row(S.CHUNKED_PREFILL, e.TokensRolledBack, S.CHUNKED_PREFILL),
    Row(S.CHUNKED_PREFILL, e.RequestFinished, S.FINISHED),
    *_stay(S.CHUNKED_PREFILL, e.ChunkKeysObserved, e.BlocksAllocated, e.BlockTableObserved, e.WindowLeft),
    *_stay(S.CHUNKED_PREFILL, *_SAVING, *_LOAD_REPORTS, e.RequestQuarantined),
    # running: decodes; only a preemption, a new turn, a rollback or the end take it out.
    Row(S.RUNNING, e.RequestPreempted, S.PREEMPTED),
    Row(S.RUNNING, e.SessionContinued, S.CHUNKED_PREFILL),
    Row(S.RUNNING, e.TokensRolledBack, S.CHUNKED_PREFILL),
    Row(S.RUNNING, e.RequestFinished, S.FINISHED),
    *_stay(S.RUNNING, e.ChunkKeysObserved, e.BlockTableObserved, e.WindowLeft),
    *_stay(S.RUNNING, *_SAVING, *_LOAD_REPORTS, e.RequestQuarantined),
    # preempted: waits without blocks, polled again and again; blocks move it.
    Row(S.PREEMPTED, e.BlocksAllocated, S.RECOVERING),
    Row(S.PREEMPTED, e.RequestFinished, S.FINISHED),
    *_stay(S.PREEMPTED, e.ChunkKeysObserved, *_LOOKING_UP),
    *_stay(S.PREEMPTED, e.TailSaveIssued, *_SAVING, *_LOAD_REPORTS, e.RequestQuarantined),
    # recovering: blocks again; leaves like a new request does, when its load has arrived.
    Row(S.RECOVERING, e.PrefillAdvanced, S.CHUNKED_PREFILL),
    Row(S.RECOVERING, e.PrefillCompleted, S.RUNNING),
    Row(S.RECOVERING, e.RequestPreempted, S.PREEMPTED),
    Row(S.RECOVERING, e.RequestFinished, S.FINISHED),
    *_stay(S.RECOVERING, e.ChunkKeysObserved, *_LOOKING_UP, e.BlocksAllocated, e.BlockTableObserved, e.LoadIssued),
    *_stay(S.RECOVERING, *_LOAD_REPORTS, *_SAVING, e.TokensRolledBack, e.RequestQuarantined),
    # finished: settles what it owes, then is released.
    *_stay(S.FINISHED, *_SAVING, *_LOAD_REPORTS, e.BlocksHeld, e.RequestQuarantined, e.RequestReleased),
)
