"""Mutants of a request's end: recorded twice, followed by more work, or never recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvledger.adapters.vllm.scheduler_side import SchedulerSide
from kvledger.lifecycle import events as e
from kvledger.lifecycle import handlers
from kvledger.lifecycle.decisions import saves
from kvledger.lifecycle.handlers import Finished
from mutants.catalogue.parts import wrapped
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import Worlds


@mutant("LEGAL_TRANSITION", "vllm#33377", "vllm#25067", scene=Worlds())
def ends_twice(touch: Touch) -> Sequence[Patch]:
    """The connector records the end of a request twice if a copy of the request is in flight."""

    def finish(original: Any, side: SchedulerSide, request: Any, num_blocks: int) -> Any:
        held = original(side, request, num_blocks)
        if side._tracker.get(request.request_id) is not None:
            touch()
            original(side, request, num_blocks)
        return held

    return [wrapped(SchedulerSide, "_finish", finish)]


@mutant("FINISH_IS_LAST", "vllm#49635", scene=Worlds())
def saved_after_the_end(touch: Touch) -> Sequence[Patch]:
    """When a copy of an ended request is settled, the connector issues another save for this request."""
    last_tables: dict[tuple[int, int], tuple[int, ...]] = {}

    def save_on_finish(turn: Any, event: e.RequestFinished) -> None:
        last_tables[id(turn.projections), turn.record.ordinal] = tuple(turn.record.lost_block_ids or ())
        saves.save_on_finish(turn, event)

    def settled(original: Any, handler: Any, turn: Any, job: Any) -> None:
        record, projections = turn.record, turn.projections
        table = last_tables.pop((id(projections), record.ordinal), ())
        num_tokens = projections.configuration.chunk_size
        slots = projections.slots.candidates(projections.configuration.pages_per_chunk)
        pages = projections.geometry.pages_of((0,))
        if len(table) > pages[-1] and len(slots) == len(pages) and num_tokens <= record.num_tokens - 1:
            touch()
            blocks = tuple(table[page] for page in pages)
            turn.decide(e.SaveIssued(
                *record.life, projections.jobs.next_job_id, (0,), slots, blocks,
                before_forward=True, is_async=False, cause=turn.cause,
            ))  # fmt: skip
        original(handler, turn, job)

    return [
        (handlers, "save_on_finish", save_on_finish),
        wrapped(Finished, "transfer_settled", settled),
    ]


@mutant("RELEASE_ALL", "vllm#30745", "vllm#44100", "aibrix#2231", scene=Worlds())
def never_released(touch: Touch) -> Sequence[Patch]:
    """The connector never forgets a request that ends without any computed tokens."""
    original = handlers.release_if_settled

    def release(turn: Any) -> None:
        if turn.projections.tracker.num_computed_tokens(turn.record):
            original(turn)
        else:
            touch()

    return [(handlers, "release_if_settled", release)]


@mutant("DELAY_FREE_CONTRACT", "vllm#46240", "vllm#50297", scene=Worlds())
def held_for_nobody(touch: Touch) -> Sequence[Patch]:
    """The connector makes vLLM keep the blocks of every ended request, even if no copy reads them."""

    def save_on_finish(turn: Any, event: e.RequestFinished) -> None:
        decided: list[e.Event] = []

        def note(decision: e.Event) -> e.Event:
            decided.append(decision)
            return decision

        saves.save_on_finish(turn.altered(note), event)
        if not any(isinstance(decision, e.BlocksHeld) for decision in decided):
            touch()
            turn.decide(e.BlocksHeld(*turn.record.life, turn.cause))

    return [(handlers, "save_on_finish", save_on_finish)]
