"""The transition tables of requests and jobs.

Rule 1: Only these tables move states. Handlers, projections and adapters set no state. They produce events, and the
        tables define to which states the events lead.
Rule 2: The tables do nothing else. Token counts, blocks, chunks and jobs belong to the projections.
Rule 3: An event is illegal if `PHASE` or `BLOCKS` names it but has no row for it in the present state. An illegal event
        stays in the log, kvledger records a broken rule, and the request recomputes. `GATING` defines what an illegal
        event changes nevertheless. The other regions refuse nothing: each has a row for every state and every event
        that it names.
Rule 4: No row leaves `finished`, no row starts from "any state", no pair of state and trigger occurs twice, and every
        state can be reached. `machine.py` refuses other tables.

Theory of operation
  Each region is a separate state machine. An event moves every region that names it, and is legal if all of these
  regions accept it. No region depends on the state of another region. `RequestArrived` creates a request in the initial
  state of each region, so it has no row.

  PHASE. A new request can be looked up any number of times. Lookups do not move it. `BlocksAllocated` does not move it
  either, because blocks are no progress. A step that schedules tokens of the request moves it: with `PrefillAdvanced`
  if known tokens remain for later steps, otherwise with `PrefillCompleted`. A preempted request becomes `recovering`
  when it has blocks again. It leaves `recovering` with `PrefillAdvanced` or `PrefillCompleted`, after its load has
  arrived.

  At the next turn of a streaming session, the request keeps its blocks and has new tokens to compute, so it becomes
  `chunked_prefill`. A running request also becomes `chunked_prefill` after a rollback, for example after a failed load.

  BLOCKS describes one generation. If a load is in flight when the next generation begins, the load belongs to the
  earlier generation. The region refuses a load unless the blocks are granted, because a generation has one load at a
  time. It refuses a lookup while a load fills the blocks, because vLLM looks up only requests that hold no blocks. A
  lookup with granted blocks leads to `none`: after a failed asynchronous load, vLLM frees the blocks and calls no hook.

  FIRST is whether a request must compute tokens before it is offered another load, because a load failed. A rollback to
  0 tokens begins a generation. A later `LoadFailed` of the earlier generation does not move the request. This is right:
  the request is running, and vLLM does not look it up, so it does not have to compute tokens first.

  CURRENT is whether the computed tokens may be saved. Tokens that are computed on top of stale tokens are stale too. A
  preemption leads back to `current`: whether the lost blocks may be saved depends on the state before the preemption.

  An event names a job by its id. If the job is of an earlier generation, the event moves the job, but not the request.

Triggers
  A trigger is an event's id, or `id/variant` if a field of the event decides which row applies. The event's class names
  that field. The variant `all` means that no computed token is kept. Three triggers are not events of their own:
  `tokens.scheduled` is the part of a step that is about one request, `cache.reset/held` is a reset for a request that
  holds blocks, and `transfer.reported/whole` is the report after which every rank has reported.

Not in the tables
  - The ranks that have reported, the ranks that reported twice, the number of resets before a job: these are sets and
    numbers, not states.
  - Whether a save read doubtful blocks: this is a property of the chunks, not of the copy.
  - The number of failed loads: it is a count, not a state.
  - The answer that was not claimed, the tail, the chunk keys: these are values, which are replaced as a whole.
  - Whether a tail or a chunk is saved: the state of its job shows this.
  - The uses of a chunk (promised, read, waited for): a chunk can have several uses at a time.
  - Blocks that could not be filled, that a request lost or that a window has moved past: a request has many such
    blocks, and its next block table replaces them.
  - Whether a request decodes one token per step: this only decides how steps are written.
  - Sub-states: extensions have rows for them. These rows refuse nothing, and lead to the phase to which the core's row
    leads. Audits check the phase, and a test checks the sub-states.

The diagrams in `docs/states.md`, the reference machines and the compiled tables are generated from these rows.
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
"""(sources, triggers, dest): each trigger leads from each source to dest. If dest is None, the state stays."""

STAY = None

NO_EVENTS = ("tokens.scheduled", "cache.reset/held", "transfer.reported/whole")


@attrs.frozen
class Region:
    """One state machine of a request or a job."""

    name: str
    states: type[State]
    initial: State
    rows: Rows
    may_refuse: bool = False
    """Whether a missing row makes an event illegal. If not, a missing row is an error in the table."""
    terminal: State | None = None
    """The state that no row leaves."""

    def flat(self) -> Iterable[tuple[State, str, State]]:
        """Yield each (source, trigger, dest)."""
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
        # The first scheduled tokens move a new request, and a recovering one once its load has arrived.
        ((S.NEW, S.CHUNKED_PREFILL, S.RECOVERING), "prefill.advanced", S.CHUNKED_PREFILL),
        ((S.NEW, S.CHUNKED_PREFILL, S.RECOVERING), "prefill.completed", S.RUNNING),
        # With two steps in flight, a step can preempt a request whose load is not reported yet, even a new one.
        (_COMPUTING, "request.preempted", S.PREEMPTED),
        (_UNFINISHED, "request.finished", S.FINISHED),
        # A preempted request waits without blocks. Lookups do not move it, blocks do.
        (S.PREEMPTED, "blocks.allocated", S.RECOVERING),
        ((S.NEW, S.CHUNKED_PREFILL, S.RECOVERING), "blocks.allocated", STAY),
        (S.RUNNING, (*_CONTINUED, *_ROLLED_BACK), S.CHUNKED_PREFILL),
        (S.CHUNKED_PREFILL, (*_CONTINUED, *_ROLLED_BACK), STAY),
        ((S.NEW, S.RECOVERING), _ROLLED_BACK, STAY),
        # Progress is recorded as `prefill.*`, which a handler decides.
        (_COMPUTING, ("tokens.scheduled", "blocks.observed"), STAY),
        (_WAITING, _LOOKING_UP, STAY),
        ((S.NEW, S.RECOVERING), "load.issued", STAY),
        (_UNFINISHED, "chunk.keys_observed", STAY),
        ((S.CHUNKED_PREFILL, S.RUNNING), "window.left", STAY),
        ((S.CHUNKED_PREFILL, S.RUNNING, S.PREEMPTED, S.RECOVERING, S.FINISHED), _SAVING, STAY),
        (S.PREEMPTED, "tail.save_issued", STAY),
        # A copy may end in any state of its request.
        (_ALL, (*_LOAD_REPORTS, "request.quarantined"), STAY),
        # Events of extensions move only sub-states.
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
        # `blocks.observed` without an allocation: a hook of kvledger failed. While loading: the report is late or lost.
        ((_NONE, _GRANTED), ("blocks.allocated", "blocks.observed"), _GRANTED),
        (_LOADING, ("blocks.allocated", "blocks.observed"), STAY),
        (_GRANTED, "load.issued", _LOADING),
        # From none: it was preempted or ended while it was loading.
        (_LOADING, _LOAD_SETTLED, _GRANTED),
        ((_NONE, _GRANTED), _LOAD_SETTLED, STAY),
        ((_NONE, _GRANTED, _LOADING), ("request.preempted", "request.finished"), _NONE),
        ((_NONE, _GRANTED), "lookup.requested", _NONE),
        ((_GRANTED, _LOADING), (*_CONTINUED, "tokens.rolled_back/all"), _GRANTED),
        (_NONE, (*_CONTINUED, "tokens.rolled_back/all"), STAY),
    ),
    may_refuse=True,
)
"""Whether the request holds blocks, and whether a load fills these blocks."""

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
"""Whether the request must compute tokens before it is offered another load."""

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
"""Whether tokens that the request computes may be saved."""

TRUST = Region(
    "trust",
    TrustRegion,
    TrustRegion.TRUSTED,
    ((tuple(TrustRegion), "request.quarantined", TrustRegion.QUARANTINED),),
)
"""Whether the request may use the cache."""

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
"""The progress of a job.

`source` is a separate region, because an overdue job can become fenced, and a fenced job can become overdue.
"""

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
"""Whether the request still holds the job's blocks."""

REGIONS = (PHASE, BLOCKS, FIRST, CURRENT, TRUST)
"""The regions of a request."""
JOB_REGIONS = (WORK, SOURCE)
"""The regions of a job."""


@attrs.frozen
class Gating:
    """What an observation about one request still changes if it is illegal in the request's states."""

    resync: Mapping[tuple[S, str], tuple[S, BlocksRegion]]
    """(phase, trigger) → (phase, blocks) afterwards, for a refused observation that shows that the request has blocks.

    vLLM gave the request these blocks in a hook call that failed in kvledger. All other refused observations, if they
    are folded, move only the regions that accept them.
    """
    closed_fold: Mapping[str, tuple[str, ...]]
    """Id of an observation that may be refused → projections that fold the observation even then.

    They fold it because it changes which request has which blocks, or which generation a request is in.
    """
    never: tuple[str, ...]
    """Ids of observations about one request that are always folded in full, because they begin or end a life."""

    def rows(self) -> Iterable[tuple[str, str, str]]:
        """Yield (kind, observation, consequence) of each entry."""
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
    # A refused preemption begins another generation: vLLM counts it too, and earlier copies are stale. A refused lookup
    # takes no blocks away: a request that computes keeps its blocks.
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
