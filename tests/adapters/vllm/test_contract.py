"""Each demand of vLLM's and of ours is broken in a handler: the engine lives, others are untouched, the log tells.

The handlers stand in the places of the standard ones and do one thing wrong, for requests named "bad" alone.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lifecycle_driver import Driver, keys_of
from sim.broken_ledger import fail_in_a_fold
from sim.modes import transfers_sync_and_async
from sim.reported import note_reports
from sim.slow_copies import delay

from kvledger.adapters.core import composed_core
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.vllm.journal import breach_of_answer
from kvledger.lifecycle import StateHandler
from kvledger.lifecycle import events as e
from kvledger.lifecycle.handlers import Finished, New, Preempted, Running
from kvledger.lifecycle.turn import Turn

pytestmark = pytest.mark.scheduler

NUM_OUTPUT_TOKENS = 41
"""The last step fills a chunk, so that something is saved when a request ends."""
_Decide = Callable[[Turn], None]
_Mistake = Callable[[_Decide, Turn], object]
"""Given what the standard handler does in a turn, and the turn."""


def handler(base: type[StateHandler], method: str, mistake: _Mistake) -> type[StateHandler]:
    """A handler that decides as `base` does, but for "bad" requests."""
    standard = getattr(base, method)

    def decide(self: Any, turn: Turn, *arguments: Any) -> object:
        if turn.record.request_id.startswith("bad"):
            return mistake(lambda turn: standard(self, turn, *arguments), turn)
        return standard(self, turn, *arguments)

    return type(f"Bad{base.__name__}", (base,), {method: decide})


def each(event_class: type[e.Event], change: Callable[[Any], Iterable[Any]]) -> _Mistake:
    """Change the decisions of a class, leave the others."""

    def mistake(decide: _Decide, turn: Turn) -> None:
        def changed(decision: e.Event) -> e.Event | None:
            if not isinstance(decision, event_class):
                return decision
            for other in change(decision):
                turn.decide(other)
            return None

        decide(turn.altered(changed))

    return mistake


def evolved(event_class: type[e.Event], **fields: Any) -> _Mistake:
    """Other fields in the decisions of a class; a function is given the field."""

    def change(decision: Any) -> list[Any]:
        new = {name: value(getattr(decision, name)) if callable(value) else value for name, value in fields.items()}
        return [msgspec.structs.replace(decision, **new)]

    return each(event_class, change)


def behind(decision: Any) -> _Mistake:
    """Something more behind what is decided; a function is given the turn."""

    def mistake(decide: _Decide, turn: Turn) -> None:
        decide(turn)
        turn.decide(decision(turn) if callable(decision) else decision)

    return mistake


def nothing(_decide: _Decide, _turn: Turn) -> None:
    """No decisions at all."""


def hold_first(decide: _Decide, turn: Turn) -> None:
    """Hold the blocks before anything else."""
    turn.decide(e.BlocksHeld(*turn.record.life, turn.cause))
    decide(turn)


def caught(decide: _Decide, turn: Turn) -> None:
    """Decide what is refused, take no notice, and go on."""
    with contextlib.suppress(Exception):
        turn.decide(e.CacheReset(1))
    decide(turn)


def raises(_turn: Turn) -> Any:
    """A failure half way."""
    message = "broken on purpose"
    raise RuntimeError(message)


def twice(decision: Any) -> list[Any]:
    """The same job, and once more under a number of its own."""
    return [decision, msgspec.structs.replace(decision, job_id=decision.job_id + 1)]


def shifted(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks of somebody else."""
    return tuple(block % 12 + 1 for block in blocks)


OTHER = "VLLM_CONTRACT"
OURS = "HANDLER_CONTRACT"
ANSWER, LOAD, SAVE = e.LookupAnswered, e.LoadIssued, e.SaveIssued


def issue_load(turn: Turn) -> e.LoadIssued:
    """A load that nobody has accepted."""
    record, projections = turn.record, turn.projections
    blocks = tuple(record.block_ids or ())[:1] or (1,)
    return e.LoadIssued(*record.life, projections.jobs.next_job_id, 0, 16, (0,), blocks, True, turn.cause)


MISTAKES: dict[str, tuple[type[StateHandler], str, _Mistake, str]] = {
    # lookups
    "more tokens than are known": (Preempted, "lookup_requested", evolved(ANSWER, num_external_tokens=10_000), OTHER),
    "every known token": (
        Preempted,
        "lookup_requested",
        each(ANSWER, lambda a: [msgspec.structs.replace(a, num_external_tokens=a.num_tokens - a.num_computed_tokens)]),
        OTHER,
    ),
    "less than nothing": (Preempted, "lookup_requested", evolved(ANSWER, num_external_tokens=-1), OTHER),
    "what is not saved": (New, "lookup_requested", evolved(ANSWER, num_external_tokens=16), OTHER),
    "asynchronous nothing": (New, "lookup_requested", evolved(ANSWER, num_external_tokens=0, is_async=True), OTHER),
    "an answer to another question": (
        Preempted,
        "lookup_requested",
        evolved(ANSWER, num_computed_tokens=lambda n: n + 16),
        OTHER,
    ),
    "a number that is none": (Preempted, "lookup_requested", evolved(ANSWER, num_external_tokens="16"), OURS),
    "no answer": (Preempted, "lookup_requested", nothing, ""),
    "deferred for ever": (
        Preempted,
        "lookup_requested",
        each(
            ANSWER,
            lambda a: [
                e.LookupDeferred(
                    a.request_id, a.ordinal, a.generation, a.num_computed_tokens, a.num_tokens, 1, 1, a.cause
                )
            ],
        ),
        OURS,
    ),
    # loads
    "no load": (Preempted, "blocks_allocated", nothing, ""),
    "less than was accepted": (Preempted, "blocks_allocated", evolved(LOAD, num_tokens=lambda n: n - 1), OTHER),
    "from elsewhere on": (Preempted, "blocks_allocated", evolved(LOAD, first_token=lambda n: n + 16), OTHER),
    "into blocks of others": (Preempted, "blocks_allocated", evolved(LOAD, block_ids=shifted), OTHER),
    "fewer slots than blocks": (Preempted, "blocks_allocated", evolved(LOAD, slots=lambda s: s[:-1]), OURS),
    "from beyond the pool": (Preempted, "blocks_allocated", evolved(LOAD, slots=lambda s: (10**9, *s[1:])), OURS),
    "a page left out": (Preempted, "blocks_allocated", evolved(LOAD, slots=lambda s: (-1, *s[1:])), OTHER),
    "in the other mode": (Preempted, "blocks_allocated", evolved(LOAD, is_async=lambda a: not a), OTHER),
    "loaded twice": (Preempted, "blocks_allocated", each(LOAD, twice), OURS),
    "one number for two jobs": (
        Preempted,
        "blocks_allocated",
        each(LOAD, lambda load: [load, load]),
        OURS,
    ),
    "a load that nobody accepted": (Preempted, "lookup_requested", behind(issue_load), OURS),
    "a load for one who computes": (Running, "tokens_settled", behind(issue_load), OURS),
    "a load for a new one": (New, "tokens_scheduled", lambda _decide, turn: turn.decide(issue_load(turn)), OTHER),
    # saves
    "saved from blocks of others": (Running, "tokens_settled", evolved(SAVE, block_ids=shifted), OTHER),
    "saved from lost blocks too late": (
        Running,
        "request_preempted",
        evolved(SAVE, before_forward=False),
        OTHER,
    ),
    "saved asynchronously from lost blocks": (
        Running,
        "request_preempted",
        evolved(SAVE, before_forward=False, is_async=True),
        OTHER,
    ),
    "saved beyond the pool": (Running, "tokens_settled", evolved(SAVE, slots=lambda s: (10**9, *s[1:])), OURS),
    "saved over another chunk": (Running, "tokens_settled", evolved(SAVE, slots=lambda s: (0, *s[1:])), OURS),
    "chunks that there are not": (Running, "tokens_settled", evolved(SAVE, chunks=(99,)), OURS),
    # ends
    "nothing at the end": (Running, "request_finished", nothing, ""),
    "held without a copy": (
        Running,
        "request_finished",
        hold_first,
        "",
    ),
    "held too late": (
        Finished,
        "transfer_settled",
        hold_first,
        "",
    ),
    "released while it runs": (
        Running,
        "tokens_settled",
        behind(lambda turn: e.RequestReleased(*turn.record.life, turn.cause)),
        OURS,
    ),
    "never released": (Finished, "transfer_settled", nothing, OURS),
    "said to be loaded": (
        Preempted,
        "blocks_allocated",
        behind(lambda turn: e.LoadCompleted(*turn.record.life, 1, turn.cause)),
        OURS,
    ),
    # what a handler may decide at all
    "a word": (Running, "tokens_settled", behind("yes"), OURS),
    "an observation": (Running, "tokens_settled", behind(e.CacheReset(1)), OURS),
    "a reason that is none": (
        Running,
        "tokens_settled",
        behind(lambda turn: e.RequestQuarantined(*turn.record.life, None, turn.cause)),  # type: ignore[arg-type]
        OURS,
    ),
    "a decision for another request": (
        Running,
        "tokens_settled",
        behind(lambda turn: e.RequestQuarantined("good 0", 0, 0, "envy", turn.cause)),
        OURS,
    ),
    "a decision for an earlier generation": (
        Running,
        "tokens_settled",
        behind(lambda turn: e.RequestQuarantined(*turn.record.life[:2], -1, "x", turn.cause)),
        OURS,
    ),
    "a decision for another life of the id": (
        Running,
        "tokens_settled",
        behind(lambda turn: e.RequestQuarantined(turn.record.request_id, 99, 0, "x", turn.cause)),
        OURS,
    ),
    "another cause": (
        Running,
        "tokens_settled",
        behind(lambda turn: e.RequestQuarantined(*turn.record.life, "x", 1)),
        OURS,
    ),
    "decisions that are returned": (Running, "tokens_settled", lambda *_: iter(()), OURS),
    "a refusal that is caught": (Running, "tokens_settled", caught, OURS),
    "a failure half way": (Running, "tokens_settled", behind(raises), "HANDLER_RAISED"),
}
"""Name -> (state's handler, its method, the mistake, the rule that the log names; none where nothing is broken)."""


def crowd(engine: Any) -> None:
    """Two requests that are served badly among two that are not; the blocks are too few for all."""
    for number in range(2):
        engine.add(f"good {number}", range(100 * number, 100 * number + 40), NUM_OUTPUT_TOKENS)
        engine.add(f"bad {number}", range(500 + 100 * number, 540 + 100 * number), NUM_OUTPUT_TOKENS)


@transfers_sync_and_async
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_handler_that_breaks_a_demand_costs_its_request_the_cache_and_nobody_anything_else(
    make_engine: Any,
    mistake: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The real scheduler asserts by itself; a wrong page would raise in the model; `verify` reads the log."""
    base, method, made, rule = MISTAKES[mistake]
    module = types.ModuleType("broken_handlers")
    module.__dict__["Broken"] = handler(base, method, made)
    monkeypatch.setitem(sys.modules, "broken_handlers", module)
    engine = make_engine(
        replays=False,
        num_blocks=14,
        chunk_size=16,
        enable_prefix_caching=False,
        handlers=["broken_handlers:Broken"],
        log_dir=str(tmp_path),
    )
    reported = note_reports(engine)
    crowd(engine)
    engine.run(max_steps=2000)
    said = {request_id: engine.prompts[request_id] + output for request_id, output in engine.outputs.items()}
    for request_id, tokens in said.items():
        engine.serve(f"{request_id} continued", tokens[:76], 4, max_steps=500)
    assert engine.num_preemptions
    assert {len(output) for output in engine.outputs.values()} == {NUM_OUTPUT_TOKENS, 4}
    engine.check_released()
    assert not engine.connector.scheduler_side.journal.is_disabled
    assert not engine.scheduler.requests
    assert len(reported.received) == len(set(reported.received)) or engine.logged(e.LoadIssued)
    quarantined = {event.request_id for event in engine.logged(e.RequestQuarantined)}
    assert all(request_id.startswith("bad") for request_id in quarantined), "nobody else pays"
    assert {event.rule for event in engine.logged(e.InvariantViolated)} >= ({rule} if rule else set())
    engine.check_replay(composed_core(["broken_handlers:Broken"]))
    engine.connector.scheduler_side.log.store.close()
    exit_code = main(["verify", str(engine.connector.scheduler_side.log.directory)])
    out = capsys.readouterr().out
    assert "corrupt" not in out
    if rule:
        assert exit_code == 1
        assert f"{rule}: " in out


def test_jobs_that_were_recorded_before_the_ledger_failed_are_handed_out(make_engine: Any) -> None:
    """A fold that fails behind a decision: the decision stands in the log, so it is carried out."""
    engine = make_engine(replays=False, num_blocks=40, chunk_size=16, save_mode="async")
    delay(engine)
    delay(engine)
    fail_in_a_fold(engine, e.BlocksHeld)
    engine.serve("only", range(56), 9)
    assert engine.connector.scheduler_side.journal.is_disabled
    issued = {event.job_id for event in engine.logged(e.SaveIssued)}
    worker = engine.worker._worker_side
    assert issued
    assert issued <= set(worker._copies._reported)
    assert not engine.scheduler.requests


class Uncountable(dict[bytes, bytes]):
    """Chunks that must not be counted again; whether the last one of a hit is still there may be asked."""

    def __contains__(self, key: object) -> bool:
        assert key == keys_of("d", 4)[3], "counted again"
        return super().__contains__(key)


def test_a_promise_is_compared_with_what_is_saved_without_counting_that_again() -> None:
    """The whole prefix was counted at every poll; the lookup has just done so. A promise of more is still refused."""
    driver = Driver(chunk_size=16)
    driver.save_prefix("earlier", keys_of("d", 4))
    driver.arrive("a", 70, keys_of("d", 4))
    for _ in range(2):
        answer = driver.lookup("a", 0, 70)
        asked = driver.all_of(e.LookupRequested)[-1]
        driver.projections.pool.state.committed = Uncountable(driver.projections.pool.state.committed)
        assert answer.num_external_tokens == 64
        assert not breach_of_answer(answer, asked, driver.projections)
    more = msgspec.structs.replace(answer, num_external_tokens=65, num_hit_tokens=65)
    assert "only 64 are saved" in breach_of_answer(more, asked, driver.projections)
