"""Mistakes that connectors have made, made here on purpose: a world must see each of them in the bytes, and say so.

That the audit names mistakes from the log alone is shown in `tests/mutants/`.

They are made in the code under test, not in what the checks look at. The seeds that find them are not told: whoever
changes how worlds are drawn must still find every one within `NUM_SEEDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvledger.adapters.vllm.observe import RequestReader
from kvledger.adapters.vllm.worker_side import WorkerSide
from kvledger.lifecycle import events as e
from kvledger.lifecycle import handlers, ledger
from kvledger.lifecycle.decisions import saves
from kvledger.lifecycle.projections.copies import CopyKind
from kvledger.lifecycle.projections.pool import Pool
from kvledger.lifecycle.projections.tracker import RequestTracker
from sim.checks import CHECKS
from sim.world import World

pytestmark = pytest.mark.scheduler

NUM_SEEDS = 60


def _save_one_token_too_many(turn: Any, event: Any) -> None:
    record, num_tokens = turn.record, saves.num_intact_tokens(event) + 1
    lost = record.lost_block_ids or ()
    if not saves._is_doubtful(record, turn.before.current):
        savable = saves.savable_pages(record, turn.projections.geometry, lost, num_tokens, None)
        source = saves.Source(lost, savable, num_tokens, record.generation, is_async=False, is_lost=True)
        saves.save_from(turn, source, 0)


def _call_failed_copies_done(turn: Any, job: Any) -> None:
    completed = e.LoadCompleted if job.kind is CopyKind.LOAD else e.SaveCompleted
    turn.decide(completed(*job.life, job_id=job.job_id, cause=turn.cause))


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "the token sampled last is saved though nobody computed it (vllm#54193)": (
        handlers,
        "save_on_finish",
        _save_one_token_too_many,
        "wrong",
    ),
    "a preemption counts one token too many as written": (
        RequestReader,
        "num_written_tokens",
        lambda _self, request, num_computed_tokens: min(num_computed_tokens + 1, request.num_tokens),
        "wrong KV",
    ),
    "blocks of preempted requests are copied after the forward": (
        WorkerSide,
        "before_forward",
        lambda _self, _jobs: None,
        "wrong KV",
    ),
    "a failed copy counts as done": (ledger, "settle", _call_failed_copies_done, "wrong KV"),
    "blocks that were not filled are not reported": (
        WorkerSide,
        "take_failed_block_ids",
        lambda _self: set(),
        "wrong KV",
    ),
    "a tail is not dropped when its request runs again": (
        RequestTracker,
        "_drop_tail",
        lambda _self, _record: None,
        "slots are held by nobody",
    ),
    "chunks survive a reset": (Pool, "_reset", lambda _self, _event, _sequence, _subject: None, "wrong KV"),
}


@pytest.mark.parametrize(
    "mistake",
    # Many worlds pass before one finds the last.
    [pytest.param(each, marks=[pytest.mark.long] if each == "chunks survive a reset" else []) for each in MUTANTS],
)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the worlds ends with the right complaint."""
    owner, name, mutant, complaint = MUTANTS[mistake]
    monkeypatch.setattr(owner, name, mutant)
    complaints = []
    for seed in range(NUM_SEEDS):
        try:
            with World(seed) as world:
                world.run()
                for check in CHECKS:
                    check(world)
        except AssertionError as trouble:
            complaints.append(f"seed {seed}: {trouble}")
            if complaint in str(trouble):
                return
    pytest.fail(f"no world complains of {complaint!r}, but of {complaints}")
