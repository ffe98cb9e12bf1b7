"""What must hold of the reasons in any log, and which events of it concern one request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from kvledger.adapters.figures import Figures, Totals
from kvledger.adapters.tools.reasons import Accounts, LoadFate, Reason, RequestHistory, Sums
from kvledger.lifecycle import Core, LedgerConfiguration, fold
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Model, Reader

CORE = Core.standard()
_OF_SHARERS = (
    e.RequestArrived,
    e.ChunkKeysObserved,
    e.SaveIssued,
    e.SaveCompleted,
    e.SaveFailed,
    e.SaveDeclined,
    e.LoadIssued,
    e.LoadCompleted,
    e.LoadFailed,
    e.SessionContinued,
    e.RequestPreempted,
    e.RequestFinished,
    e.RequestReleased,
)

_LOOKUP = (e.LookupAnswered,)
_ADMISSION = (*_LOOKUP, e.BlocksAllocated, e.StepScheduled)
PROOFS: dict[Reason, tuple[type[e.Event], ...]] = {
    Reason.NEW: _ADMISSION,
    Reason.SALTED: _ADMISSION,
    Reason.LAST_TOKEN: _ADMISSION,
    Reason.PARTIAL_CHUNK: (*_ADMISSION, e.RequestPreempted),
    Reason.UNSAVED: (e.ChunkKeysObserved, e.RequestPreempted),
    Reason.SAVING: (e.SaveIssued, e.TailSaveIssued),
    Reason.DEFERRAL_EXHAUSTED: (e.SaveIssued, e.TailSaveIssued),
    Reason.DECLINED: (e.SaveDeclined,),
    Reason.SAVE_FAILED: (e.SaveFailed,),
    Reason.EVICTED: (e.ChunksEvicted,),
    Reason.TAINTED: (e.ChunksTainted,),
    Reason.RESET: (e.CacheReset,),
    Reason.STALE: (e.CacheReset,),
    Reason.BEHIND_GAP: (*_LOOKUP, e.SaveCompleted),
    Reason.WINDOW: _LOOKUP,
    Reason.SLOWER: _LOOKUP,
    Reason.LOAD_FAILED: (e.LoadFailed, e.TokensRolledBack),
    Reason.QUARANTINED: (e.RequestQuarantined,),
    Reason.UNALIGNED: _LOOKUP,
    Reason.RIVAL_LOAD: _LOOKUP,
    Reason.NO_KEY: _ADMISSION,
    Reason.COMPUTING: (e.ChunkKeysObserved,),
    Reason.EVICTED_UNSAVED: (e.ChunkKeysObserved, e.RequestFinished, e.RequestPreempted),
    Reason.RESET_UNSAVED: (e.ChunkKeysObserved, e.RequestFinished, e.RequestPreempted),
    Reason.NEVER_GIVEN: (e.ChunkKeysObserved, e.RequestFinished, e.RequestPreempted),
    Reason.NEVER_OFFERED: (e.ExtensionObserved, e.ExtensionNoted, e.StepScheduled),
    Reason.NOT_OFFERED: _LOOKUP,
    Reason.SHORT_OF_UNIT: (e.ExtensionObserved, e.ExtensionNoted, e.StepScheduled, *_LOOKUP),
    Reason.SKIPPED: (e.RequestArrived,),
    Reason.RECORDED: (*_LOOKUP, e.ChunkKeysObserved, e.RequestPreempted),
    Reason.NOT_CLAIMED: (e.BlocksAllocated,),
    Reason.NOT_DELIVERED: (e.InvariantViolated,),
    Reason.HOOK_FAILED: (e.HookFailed,),
    Reason.WITHHELD: (e.DecisionWithheld,),
    Reason.NO_LOOKUP: (e.BlocksAllocated, e.StepScheduled),
    Reason.ROLLED_BACK: (e.TokensRolledBack,),
    Reason.UNKNOWN: (),
}
"""What the first proof of each reason must be, where nothing is lost."""


def check_proofs(events: Sequence[tuple[int, e.Event]], stories: Sequence[RequestHistory]) -> None:
    """Every reason is proven by an event of the kind that it needs, from before the tokens were missed."""
    by_sequence = dict(events)
    for story in stories:
        told = [(lookup.last_sequence, lookup.spans) for lookup in story.lookups]
        told += [(admission.sequence, admission.missed) for admission in story.admissions]
        told += [(again.sequence, again.spans) for again in story.recomputations]
        for sequence, spans in told:
            for span in spans:
                assert span.evidence, f"{story.request_id}: {span} has no proof"
                proof = by_sequence[span.evidence[0]]
                assert isinstance(proof, PROOFS[span.reason]), f"{story.request_id}: {span} is proven by {proof}"
                assert max(span.evidence) <= sequence, f"{story.request_id}: {span} is proven by what came later"


def concerning(events: Sequence[tuple[int, e.Event]], request_id: str) -> list[tuple[int, e.Event]]:
    """As much as the accounts of a request may depend upon: its own events, steps that name it and the one behind a
    preemption, what saved, evicted or tainted the same chunks, and what happened to all.
    """
    observed = [event for _, event in events if isinstance(event, e.ChunkKeysObserved)]
    keys = {key for event in observed if event.request_id == request_id for key in event.keys}
    sharers = {event.request_id for event in observed if not keys.isdisjoint(event.keys)}
    arrivals = (event for _, event in events if isinstance(event, e.RequestArrived))
    ordinals = {event.ordinal for event in arrivals if event.request_id == request_id}
    awaits_step = False
    chosen = []
    for sequence, event in events:
        whose = getattr(event, "request_id", None)
        concerns = (
            whose == request_id
            or (whose in sharers and isinstance(event, _OF_SHARERS))
            or (isinstance(event, e.ChunksEvicted | e.ChunksTainted) and not keys.isdisjoint(event.keys))
            or isinstance(event, e.CacheReset | e.PrefixCacheReset)
            or (isinstance(event, e.HookFailed) and not whose)
        )
        if isinstance(event, e.StepScheduled):
            concerns = awaits_step or any(ordinal in ordinals for ordinal, *_ in (*event.advanced, *event.extended))
            awaits_step = False
        elif isinstance(event, e.RequestPreempted) and concerns:
            awaits_step = True
        if concerns:
            chosen.append((sequence, event))
    return chosen


def stories_of(
    events: Sequence[tuple[int, e.Event]], configuration: LedgerConfiguration, request_id: str | None = None
) -> list[RequestHistory]:
    """The stories of all requests, or of one, in the order in which they ended."""
    ended: list[RequestHistory] = []
    model = Model(CORE.tables, configuration)
    accounts = Accounts(model, request_id=request_id, on_end=ended.append, keeps_histories=True)
    Reader(model, [accounts]).take(events)
    return ended + accounts.histories


def figures_of(events: Iterable[tuple[int, e.Event]], configuration: LedgerConfiguration, core: Core = CORE) -> Figures:
    """The totals of a log, counted by reading it."""
    projections = core.new_projections(configuration)
    totals = Totals(projections)
    fold(core, events, configuration, start=projections)
    return totals.figures


def differences_of(sums: Sums, figures: Figures | None = None) -> list[str]:
    """Where sums do not add up; each entry names both sides. Empty unless kvledger is wrong.

    Args:
        sums: of all requests, or of one life.
        figures: the totals of the same events; without them only the sums themselves are compared.
    """
    there = sums.num_retained + sums.num_claimed + sums.num_elsewhere
    balances = [
        ("tokens needed", sums.num_needed, there + sums.missed.total()),
        ("tokens offered", sums.num_offered, sums.offered.total()),
        ("tokens to load", sums.num_to_load, sums.to_load.total()),
        ("tokens recomputed", sums.num_recomputed, sums.recomputed.total()),
    ]
    if figures is not None:
        balances += [
            ("tokens offered, by the totals", figures.num_tokens_offered, sums.num_offered),
            ("tokens loaded, by the totals", figures.num_tokens_loaded, sums.to_load[LoadFate.LOADED]),
            ("tokens recomputed, by the totals", figures.num_tokens_recomputed, sums.num_recomputed),
        ]
    return [f"{name}: {whole}, their parts add up to {parts}" for name, whole, parts in balances if whole != parts]


def check_reasons(events: Sequence[tuple[int, e.Event]], configuration: LedgerConfiguration) -> Sums:
    """The reasons add up to the totals of the log, and for each life; returns the sums."""
    model = Model(CORE.tables, configuration)
    Reader(model, [accounts := Accounts(model)]).take(events)
    sums = accounts.sums()
    differences = differences_of(sums, figures_of(events, configuration))
    assert not differences, f"the reasons do not add up: {differences}"
    return sums


def _reported_later(whole: Sums, sums: Sums, events: Sequence[tuple[int, e.Event]]) -> None:
    """A story is told when another request takes its id, also where its load is reported later, done or failed."""
    arrivals = [event.request_id for _, event in events if isinstance(event, e.RequestArrived)]
    if len(set(arrivals)) < len(arrivals):
        later = sums.to_load - whole.to_load
        assert later.keys() <= {LoadFate.LOADED, LoadFate.FAILED}, later
        whole.to_load[LoadFate.UNDER_WAY] -= later.total()
        whole.to_load += later


def _own(story: RequestHistory) -> RequestHistory:
    """The story without what other requests change: times of decisions, and how many blocks all hold together."""
    return attrs.evolve(
        story,
        spent=None,
        lookups=[attrs.evolve(each, num_held=0) for each in story.lookups],
        admissions=[attrs.evolve(each, num_held=0) for each in story.admissions],
        preemptions=[attrs.evolve(each, num_held=0) for each in story.preemptions],
    )


def check_stories(events: Sequence[tuple[int, e.Event]], configuration: LedgerConfiguration) -> list[RequestHistory]:
    """Each story adds up and is proven, together they are the whole, and each is the same from what concerns it."""
    stories = stories_of(events, configuration)
    whole = Sums()
    for story in stories:
        differences = differences_of(story.sums)
        assert not differences, f"the story of {story.request_id} does not add up: {differences}"
        whole.add(story.sums)
    sums = check_reasons(events, configuration)
    _reported_later(whole, sums, events)
    assert whole == sums
    check_proofs(events, stories)
    for request_id in {story.request_id for story in stories}:
        alone = map(_own, stories_of(concerning(events, request_id), configuration, request_id))
        its = (_own(story) for story in stories if story.request_id == request_id)
        assert list(alone) == list(its), request_id
    return stories
