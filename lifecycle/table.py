"""The tables of all states, and the only place that knows them.

Rule 1: everything that moves a request from one state to another stands in this file. No handler, no
        projection and no adapter sets a state; they produce events, and the tables define where those lead.
Rule 2: this file does not know what an event *does* besides moving a state. Token counts, blocks,
        chunks and jobs are the business of the projections.
Rule 3: what `PHASE` or `BLOCKS` names, and has no row for in the present state, is illegal. The event stays in the
        log, because it was seen; the states stay as they were; the violation is recorded and the request recomputes.
        The other regions refuse nothing: they have a row for each of their states and everything that they name.
Rule 4: no row leaves `finished`, no row starts from "any state", no pair stands twice, every state can be
        reached. `machine.py` refuses to compile tables that break this.

Theory of operation
  A request is born by `RequestArrived`, in the first state of each region; this is therefore not a row. Each region is
  a flat machine of its own: an event moves every region that names it, and is legal where all of them accept it.
  Nothing else stands between regions: where one moves does not hang on where another one is.

  PHASE. While a new request waits it is looked up any number of times; lookups never move it. `BlocksAllocated` does
  not move it either: holding blocks is no progress. What moves it is a step that schedules its tokens:
  `PrefillAdvanced` if known tokens remain for later steps, `PrefillCompleted` if none do. A preempted request passes
  through `recovering` as soon as it has blocks again, and leaves it the same two ways, once its load has arrived.

  A streaming session's next turn finds its blocks kept and new tokens to compute: that is `chunked_prefill`.
  A rollback, as after a failed load, likewise: known tokens are to be computed (again).

  BLOCKS is about one life: where the generation moves on, a load under way is an earlier life's. It refuses two things:
  a load unless blocks were granted, for a life has one load at a time; and a lookup while a load fills the blocks, for
  vLLM asks only about who holds none. After a failed asynchronous load it freed them without a word.

  FIRST: after a rollback to nothing, which comes before the `LoadFailed` of the life that ended with it, the request
  runs, and is not looked up: then there is nothing to compute first.

  CURRENT: what is computed on top of what a reset made stale is as stale. What a life lost is judged by what held
  before it was lost, so a preemption leads back to `current`.

  A job is known by its id. What concerns a job of an earlier life moves the job, not the request.

Triggers
  A trigger is an event's id, or `id/variant` where one of its fields decides, as its class says. `all`: nothing is kept
  of what was computed. Three are no events of their own:
  `tokens.scheduled` is a row of a step, `cache.reset/held` a reset for whoever holds blocks, and
  `transfer.reported/whole` the report with which no rank owes one any more.

What remains outside of the tables, and why
  Ranks that have reported, that reported twice, the epoch of a job: sets and numbers, not states. Doubt about what a
  save reads: it concerns the chunks, not the copy. Failed loads: counted. The answer that was not claimed, tails,
  keys: values, which something else replaces as a whole. Whether a tail or a chunk is saved: that follows from its job.
  Who keeps a chunk (promised, read, waited for): several at a time. Blocks that could not be filled, that a request
  lost or that a window leaves: they are blocks, of which a request has many, and the next table replaces them. Whether
  a request decodes one token a step: how steps are written. Sub-states: rows of extensions, which may refuse nothing
  and lead where their phase leads, and the phase is walked; so no audit runs a machine for them, and a test runs one.

The diagrams in `docs/states.md`, the reference machines and the compiled form are all generated from these rows.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

import attrs

from kvledger.lifecycle.states import (
    BlocksRegion,
    CurrentRegion,
    FirstRegion,
    SourceRegion,
    TrustRegion,
    WorkRegion,
)
from kvledger.lifecycle.states import RequestState as S

State = enum.StrEnum
Rows = tuple[tuple[State | tuple[State, ...], str | tuple[str, ...], State | None], ...]
"""(sources, triggers, dest): from each of the sources, each of the triggers leads to dest; None: the state stays."""

STAY = None

NO_EVENTS = ("tokens.scheduled", "cache.reset/held", "transfer.reported/whole")


@attrs.frozen
class Region:
    """One flat machine."""

    name: str
    states: type[State]
    initial: State
    rows: Rows
    may_refuse: bool = False
    """Whether a missing row makes an event illegal; elsewhere a missing row is a mistake in the table."""
    terminal: State | None = None
    """What no row leaves."""

    def flat(self) -> Iterable[tuple[State, str, State]]:
        """(source, trigger, dest), one by one."""
        for sources, triggers, dest in self.rows:
            for source in sources if isinstance(sources, tuple) else (sources,):
                for trigger in triggers if isinstance(triggers, tuple) else (triggers,):
                    yield source, trigger, source if dest is None else dest


_LOAD_SETTLED = ("load.completed", "load.failed")
_LOAD_REPORTS = (*_LOAD_SETTLED, "transfer.awaited/ask", "transfer.awaited/fence")
_SAVING = ("save.issued", "save.declined", "save.completed", "save.failed/quiet", "save.failed/silent")
_LOOKING_UP = ("lookup.requested", "lookup.answered", "lookup.deferred")
_ROLLED_BACK = ("tokens.rolled_back/all", "tokens.rolled_back/part")
_CONTINUED = ("session.continued/all", "session.continued/part")

_WAITING = (S.NEW, S.PREEMPTED, S.RECOVERING)
_COMPUTING = (S.NEW, S.CHUNKED_PREFILL, S.RUNNING, S.RECOVERING)
_UNFINISHED = (S.NEW, S.CHUNKED_PREFILL, S.RUNNING, S.PREEMPTED, S.RECOVERING)
_ALL = (*_UNFINISHED, S.FINISHED)

PHASE = Region(
    "phase",
    S,
    S.NEW,
    (
        # The first scheduled tokens move a new request, and one that recovers once its load has arrived.
        ((S.NEW, S.CHUNKED_PREFILL, S.RECOVERING), "prefill.advanced", S.CHUNKED_PREFILL),
        ((S.NEW, S.CHUNKED_PREFILL, S.RECOVERING), "prefill.completed", S.RUNNING),
        # A step can preempt a request whose load has not been reported yet (two steps in flight): also a new one.
        (_COMPUTING, "request.preempted", S.PREEMPTED),
        (_UNFINISHED, "request.finished", S.FINISHED),
        # A preempted request waits without blocks, polled again and again; blocks move it.
        (S.PREEMPTED, "blocks.allocated", S.RECOVERING),
        ((S.NEW, S.CHUNKED_PREFILL, S.RECOVERING), "blocks.allocated", STAY),
        (S.RUNNING, (*_CONTINUED, *_ROLLED_BACK), S.CHUNKED_PREFILL),
        (S.CHUNKED_PREFILL, (*_CONTINUED, *_ROLLED_BACK), STAY),
        ((S.NEW, S.RECOVERING), _ROLLED_BACK, STAY),
        # What is computed is in `prefill.*`, which a handler decides on it.
        (_COMPUTING, ("tokens.scheduled", "blocks.observed"), STAY),
        (_WAITING, _LOOKING_UP, STAY),
        ((S.NEW, S.RECOVERING), "load.issued", STAY),
        (_UNFINISHED, "chunk.keys_observed", STAY),
        ((S.CHUNKED_PREFILL, S.RUNNING), "window.left", STAY),
        ((S.CHUNKED_PREFILL, S.RUNNING, S.PREEMPTED, S.RECOVERING, S.FINISHED), _SAVING, STAY),
        (S.PREEMPTED, "tail.save_issued", STAY),
        # Reports of jobs arrive in any state: a copy does not care what becomes of its request.
        (_ALL, (*_LOAD_REPORTS, "request.quarantined"), STAY),
        # Events of extensions move sub-states alone.
        (_ALL, ("extension.observed", "extension.decided"), STAY),
        (S.FINISHED, ("blocks.held", "request.released"), STAY),
    ),
    may_refuse=True,
    terminal=S.FINISHED,
)
"""How far the request is."""

_NONE, _GRANTED, _LOADING = BlocksRegion
BLOCKS = Region(
    "blocks",
    BlocksRegion,
    _NONE,
    (
        # Observed without an allocation: a hook of ours failed. While loading: the report is late or lost.
        ((_NONE, _GRANTED), ("blocks.allocated", "blocks.observed"), _GRANTED),
        (_LOADING, ("blocks.allocated", "blocks.observed"), STAY),
        (_GRANTED, "load.issued", _LOADING),
        # None: it ended while it was loading.
        (_LOADING, _LOAD_SETTLED, _GRANTED),
        ((_NONE, _GRANTED), _LOAD_SETTLED, STAY),
        ((_NONE, _GRANTED, _LOADING), ("request.preempted", "request.finished"), _NONE),
        ((_NONE, _GRANTED), "lookup.requested", _NONE),
        ((_GRANTED, _LOADING), (*_CONTINUED, "tokens.rolled_back/all"), _GRANTED),
        (_NONE, (*_CONTINUED, "tokens.rolled_back/all"), STAY),
    ),
    may_refuse=True,
)
"""What it has to be computed or loaded into."""

_COMPUTED, _COMPUTES_FIRST = FirstRegion
FIRST = Region(
    "first",
    FirstRegion,
    _COMPUTED,
    (
        ((_COMPUTED, _COMPUTES_FIRST), "load.failed", _COMPUTES_FIRST),
        ((_COMPUTED, _COMPUTES_FIRST), "tokens.scheduled", _COMPUTED),
    ),
)
"""Whether it computes before it is offered another load."""

_CURRENT, _STALE = CurrentRegion
CURRENT = Region(
    "current",
    CurrentRegion,
    _CURRENT,
    (
        ((_CURRENT, _STALE), "cache.reset/held", _STALE),
        ((_CURRENT, _STALE), ("request.preempted", "tokens.rolled_back/all", "session.continued/all"), _CURRENT),
        ((_CURRENT, _STALE), "lookup.requested", _CURRENT),
        ((_CURRENT, _STALE), "session.continued/part", STAY),
    ),
)
"""Whether what it computes may be saved."""

TRUST = Region(
    "trust",
    TrustRegion,
    TrustRegion.TRUSTED,
    ((tuple(TrustRegion), "request.quarantined", TrustRegion.QUARANTINED),),
)
"""Whether the cache helps it."""

_ISSUED, _OVERDUE, _GIVEN_UP, _SETTLED = WorkRegion
WORK = Region(
    "work",
    WorkRegion,
    _ISSUED,
    (
        ((_ISSUED, _OVERDUE), "transfer.awaited/ask", _OVERDUE),
        ((_ISSUED, _OVERDUE), "transfer.awaited/fence", STAY),
        ((_ISSUED, _OVERDUE), (*_LOAD_SETTLED, "save.completed", "save.failed/quiet"), _SETTLED),
        ((_ISSUED, _OVERDUE), "save.failed/silent", _GIVEN_UP),
        (_GIVEN_UP, "transfer.reported/whole", _SETTLED),
    ),
    may_refuse=True,
    terminal=_SETTLED,
)
"""How far a job is. It may be asked after and fenced in either order, hence `source`."""

_OWNED, _FENCED = SourceRegion
SOURCE = Region(
    "source",
    SourceRegion,
    _OWNED,
    (
        ((_OWNED, _FENCED), "transfer.awaited/fence", _FENCED),
        ((_OWNED, _FENCED), "transfer.awaited/ask", STAY),
    ),
)
"""Whose blocks a job reads or writes."""

REGIONS = (PHASE, BLOCKS, FIRST, CURRENT, TRUST)
"""Of a request."""
JOB_REGIONS = (WORK, SOURCE)
"""Of a transfer job."""


@attrs.frozen
class Gating:
    """What becomes of observations about one request that its states refuse."""

    resync: Mapping[tuple[S, str], tuple[S, BlocksRegion]]
    """Refused in that phase; blocks must have been given all the same, in a hook of ours that failed. Where phase and
    blocks are afterwards. Of whatever else is refused and folded, the regions that accept it move."""
    closed_fold: Mapping[str, tuple[str, ...]]
    """Id of an observation that may be refused -> the projections that fold it all the same, because it happened all
    the same: who owns which blocks, and which life a request is in."""
    never: tuple[str, ...]
    """About one request, and folded in full whatever its states: what it holds and what it is owed ends or begins."""

    def rows(self) -> Iterable[tuple[str, str, str]]:
        """(event, state, where it leads or who folds it), one by one."""
        for (state, trigger), dests in self.resync.items():
            yield "resync", f"{trigger} in {state}", ", ".join(dests)
        for event_id, names in self.closed_fold.items():
            yield "closed fold", event_id, ", ".join(names) or "nobody"
        for event_id in self.never:
            yield "never refused", event_id, "everybody"


GATING = Gating(
    resync={
        (S.PREEMPTED, "tokens.scheduled"): (S.RECOVERING, _GRANTED),
        (S.PREEMPTED, "blocks.observed"): (S.RECOVERING, _GRANTED),
    },
    # A preemption that is refused counts, and begins another generation: vLLM counts it too, and what was issued for
    # the life before is stale. A lookup that is refused takes no blocks away: who computes owns what it owned.
    closed_fold={
        "blocks.allocated": ("owed", "tracker"),
        "blocks.observed": ("tracker",),
        "request.preempted": ("tracker",),
        "session.continued": ("tracker",),
        "tokens.rolled_back": ("tracker",),
        "chunk.keys_observed": (),
        "lookup.requested": (),
        "window.left": (),
    },
    never=("request.arrived", "request.finished"),
)
