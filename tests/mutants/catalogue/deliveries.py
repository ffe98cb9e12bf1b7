"""Mutants that hand out a job twice, or notify vLLM twice, without cause or never."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvledger.adapters.vllm.edge import Edge
from kvledger.adapters.vllm.journal import Journal
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.copies import BlocksEnd
from kvledger.lifecycle.projections.owed import Owed
from mutants.catalogue.parts import wrapped
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import Walks, Worlds


@mutant("DELIVERED_ONCE", "vllm-ascend#16729", scene=Walks())
def handed_out_again(touch: Touch) -> Sequence[Patch]:
    """The connector gives the workers the same jobs again in the next step."""

    def delivered(original: Any, owed: Owed, event: e.EffectsDelivered, sequence: int) -> None:
        jobs = dict(owed.state.unsent)
        original(owed, event, sequence)
        again = {job_id: jobs[job_id] for job_id in event.job_ids if job_id in jobs}
        if again:
            touch()
            owed.state.unsent.update(again)

    return [wrapped(Owed, "_delivered", delivered)]


@mutant("DELIVERED_ONCE", "LMCache#4355", "LMCache#4762", scene=Walks())
def told_again(touch: Touch) -> Sequence[Patch]:
    """The end of an asynchronous load stays queued after vLLM got it, so vLLM gets it again."""

    def delivered(original: Any, owed: Owed, event: e.EffectsDelivered, sequence: int) -> None:
        received = dict(owed.state.received)
        ends = {ordinal: owed.state.ends[ordinal] for ordinal in received}
        original(owed, event, sequence)
        if event.received:
            touch()
            owed.state.received.update(received)
            owed.state.ends.update(ends)

    return [wrapped(Owed, "_delivered", delivered)]


@mutant("DELIVERED_ONCE", "vllm#43226", "vllm#53079", scene=Worlds())
def told_to_nobody(touch: Touch) -> Sequence[Patch]:
    """The connector reports to vLLM that an ended request's blocks can be freed, though vLLM has freed them already."""

    def finished(original: Any, owed: Owed, event: e.RequestFinished, sequence: int) -> None:
        ordinal = owed.present(event.request_id)
        original(owed, event, sequence)
        if ordinal != e.NO_LIFE and not owed.state.under_way:
            touch()
            owed._ends_of(ordinal, event.request_id).blocks = BlocksEnd.FREE_AGAIN
            owed.state.sent[ordinal] = None

    def answered(original: Any, edge: Edge, request_id: str, _keeps_blocks: bool) -> None:
        original(edge, request_id, bool(edge._held))

    # The edge would notice first that blocks are kept; whether a reported end was owed is another question.
    return [wrapped(Owed, "_finished", finished), wrapped(Edge, "finished", answered)]


def forgetting(touch: Touch, *kinds: str) -> Sequence[Patch]:
    """Patch that drops the notifications of vLLM in these queues when a copy ends."""

    def end(original: Any, owed: Owed, copy: Any, *, has_failed: bool) -> None:
        original(owed, copy, has_failed=has_failed)
        for queue in (getattr(owed.state, kind) for kind in kinds):
            if copy.ordinal in queue:
                del queue[copy.ordinal]
                touch()

    return [wrapped(Owed, "_end", end)]


@mutant("DELIVERED_ONCE", scene=Worlds(connector=(("load_mode", "async"),)))
def end_of_load_forgotten(touch: Touch) -> Sequence[Patch]:
    """The connector never reports the end of an asynchronous load to vLLM, so the request waits forever."""
    return forgetting(touch, "received", "failed")


@mutant("DELIVERED_ONCE", scene=Worlds(connector=(("save_mode", "async"),)))
def end_of_save_forgotten(touch: Touch) -> Sequence[Patch]:
    """The connector never reports the end of an asynchronous save, so an ended request's blocks are never freed."""
    return forgetting(touch, "sent")


@mutant("DELIVERED_ONCE", scene=Worlds())
def refused_although_issued(touch: Touch) -> Sequence[Patch]:
    """The connector issues a load but reports its blocks as unfilled. The load overwrites what vLLM computes there."""

    def observe(original: Any, journal: Journal, event: e.Event) -> list[e.Event]:
        decisions: list[e.Event] = original(journal, event)
        if not isinstance(event, e.BlocksAllocated):
            return decisions
        others = [decision for decision in decisions if not isinstance(decision, e.LoadIssued)]
        if len(others) != len(decisions):
            touch()
        return others

    return [wrapped(Journal, "observe", observe)]
