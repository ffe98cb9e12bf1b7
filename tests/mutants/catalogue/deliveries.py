"""Mistakes about what leaves the ledger: handed out again, told again, told to nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.obligations import Obligations
from mutants.catalogue.parts import wrapped
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import Walks, Worlds


@mutant("DELIVERED_ONCE", "vllm-ascend#16729", scene=Walks())
def handed_out_again(touch: Touch) -> Sequence[Patch]:
    """Jobs that the workers were given are given to them with the next step, too."""

    def delivered(original: Any, obligations: Obligations, event: e.EffectsDelivered, sequence: int) -> None:
        jobs = dict(obligations.state.jobs)
        original(obligations, event, sequence)
        again = {job_id: jobs[job_id] for job_id in event.job_ids if job_id in jobs}
        if again:
            touch()
            obligations.state.jobs.update(again)

    return [wrapped(Obligations, "_delivered", delivered)]


@mutant("DELIVERED_ONCE", "LMCache#4355", "LMCache#4762", scene=Walks())
def told_again(touch: Touch) -> Sequence[Patch]:
    """The end of an asynchronous load stays in the list of those that vLLM is to hear of."""

    def delivered(original: Any, obligations: Obligations, event: e.EffectsDelivered, sequence: int) -> None:
        received = dict(obligations.state.received)
        original(obligations, event, sequence)
        if event.received:
            touch()
            obligations.state.received.update(received)

    return [wrapped(Obligations, "_delivered", delivered)]


@mutant("DELIVERED_ONCE", "vllm#43226", "vllm#53079", scene=Worlds())
def told_to_nobody(touch: Touch) -> Sequence[Patch]:
    """VLLM is told that the blocks of every ended request are free, also where it was not told to keep them."""

    def finished(original: Any, obligations: Obligations, event: e.RequestFinished, sequence: int) -> None:
        ordinal = obligations.present(event.request_id)
        original(obligations, event, sequence)
        if ordinal != e.NO_LIFE and not obligations.state.in_flight:
            touch()
            obligations.state.sent[ordinal] = event.request_id

    return [wrapped(Obligations, "_finished", finished)]
