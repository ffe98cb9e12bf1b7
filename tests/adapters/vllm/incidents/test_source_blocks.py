"""Incidents of saves: which blocks are copied from, when, and what stands in them by then.

Elsewhere:
- vllm#45704, #47282 (streams that are not ordered with the computation): the copy engine's own tests.

Not met here: vllm#47728, ascend#13501, tpu-inference#3449 (sliding windows), vllm#50696 (blocks of hybrid models that
are zeroed): such models are refused at start.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def ask_again(engine: Any) -> None:
    """Ask for everything that was said: wrong KV in the host pool would be loaded and raise `CorruptKV`."""
    said = {request_id: engine.prompts[request_id] + output for request_id, output in engine.outputs.items()}
    for request_id, tokens in said.items():
        engine.serve(f"{request_id} again", tokens, 3)
    engine.check_outputs()


def test_vllm_29870_blocks_that_change_hands_in_one_step_are_copied_first(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], is_async: bool
) -> None:
    """Symptom: stores of a preempted request were corrupt, its blocks already written by the next owner."""
    engine = make_engine(
        num_blocks=14, chunk_size=8, enable_prefix_caching=False, num_questions=40, **runner, **transfers
    )
    engine.add_crowd()
    taken_over = 0
    while engine.scheduler.has_requests():
        output = engine.step()
        metadata = output.kv_connector_metadata
        rescued = {block for job in metadata.saves_before_forward for block in job.block_ids}
        given = {
            block
            for entry in output.scheduled_cached_reqs.new_block_ids
            if entry
            for block in entry[0]
            if output.preempted_req_ids
        }
        taken_over += len(rescued & given)
        assert not rescued & {block for job in metadata.saves for block in job.block_ids}
    fenced = {awaited.job_id for awaited in engine.logged(e.TransferAwaited) if awaited.before_forward}
    assert bool(fenced) is is_async, "blocks were taken while an asynchronous copy read them, and the step waited"
    if not runner["async_scheduling"]:
        assert taken_over > 0, "a block was saved in the very step that overwrites it"
    ask_again(engine)


@pytest.mark.parametrize("chunk_size", [8, 16, 64])
def test_vllm_52360_a_key_holds_its_own_request_s_kv(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], is_async: bool, chunk_size: int
) -> None:
    """Symptom: KV of another request under a key: queued store, preemption, overwritten, only then read (#52470)."""
    engine = make_engine(
        num_blocks=14, chunk_size=chunk_size, enable_prefix_caching=False, num_questions=40, **runner, **transfers
    )
    engine.add_crowd(5)
    engine.run()
    assert engine.num_preemptions > 1
    fenced = [awaited for awaited in engine.logged(e.TransferAwaited) if awaited.before_forward]
    # Who is preempted has one chunk of 64 at most, and has settled it just now: it is saved before the step anyway.
    assert bool(fenced) is (is_async and chunk_size < 64), "copies were under way when their blocks were taken"
    ask_again(engine)
    assert engine.figures.num_tokens_loaded > 0


@pytest.mark.parametrize("chunk_size", [8, 16, 32])
@pytest.mark.parametrize("num_output_tokens", [1, 8, 16])
def test_vllm_54193_the_last_sampled_token_is_never_saved(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], num_output_tokens: int, chunk_size: int
) -> None:
    """Symptom: a request that ended on a block boundary stored its last token's slot, which was never written."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size, enable_prefix_caching=False, **runner, **transfers)
    engine.serve("writer", range(64 - num_output_tokens), num_output_tokens)
    saved = {chunk for save in engine.logged(e.SaveIssued) for chunk in save.chunks}
    assert saved == set(range(63 // chunk_size)), "63 of the 64 tokens have KV"
    assert engine.logged(e.RequestFinished)[0].num_tokens == 64
    ask_again(engine)
    assert engine.check_answers("writer again")[0].num_hit_tokens == 63 // chunk_size * chunk_size


def test_vllm_49285_a_request_that_was_never_scheduled_saves_nothing(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: AssertionError, keys of the whole prompt against no blocks, on the abort of a queued request."""
    engine = make_engine(num_blocks=30, chunk_size=8, max_num_seqs=1, **runner, **transfers)
    engine.add("holder", range(40), 20)
    engine.step()
    engine.add("queued", range(200, 260), 20)
    engine.step()
    engine.abort("queued")
    engine.run()
    (finished,) = engine.logged(e.RequestFinished, request_id="queued")
    assert (finished.status, finished.num_settled_tokens) == ("FINISHED_ABORTED", 0)
    assert engine.logged(e.SaveIssued, e.SaveDeclined, request_id="queued") == []


def test_vllm_46595_a_resumed_request_s_table_replaces_the_old_one(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: `list index out of range` in the store thread, the new table appended to the one before (#57816)."""
    engine = make_engine(num_blocks=14, chunk_size=16, enable_prefix_caching=False, **runner, **transfers)
    engine.add_crowd()
    engine.run()
    resumed = [event.request_id for event in engine.logged(e.RequestPreempted)]
    assert resumed
    for request_id in resumed:
        tables = [event.block_ids for event in engine.logged(e.BlocksAllocated, request_id=request_id)]
        assert len(tables) > 1
        assert all(len(table) == len(set(table)) <= 6 for table in tables)
    (owner, *_) = resumed
    second_life = [save for save in engine.logged(e.SaveIssued, request_id=owner) if save.generation]
    assert second_life, "it goes on saving after it has come back"
    assert engine.logged(e.BlockTableObserved) == []
    ask_again(engine)


def test_vllm_52211_the_cursor_goes_back_with_the_table(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: AssertionError while building stores: a resume had cleared the blocks but not the cursor (#52170)."""
    engine = make_engine(num_blocks=14, chunk_size=16, enable_prefix_caching=False, **runner, **transfers)
    engine.add_crowd()
    engine.run()
    ordinals = {arrival.ordinal: arrival.request_id for arrival in engine.logged(e.RequestArrived)}
    preempted = {event.request_id for event in engine.logged(e.RequestPreempted)}
    cursors: dict[str, int] = {}
    saved: list[tuple[str, int, int]] = []
    num_restarted = 0
    for _, event in engine.events():
        if isinstance(event, e.RequestPreempted):
            cursors[event.request_id] = 0
        elif isinstance(event, e.StepScheduled):
            for ordinal, first_chunk, num_settled_tokens, _ in event.settled:
                request_id = ordinals[ordinal]
                num_restarted += request_id in preempted and first_chunk == 0
                assert first_chunk <= cursors.get(request_id, 0), "nothing was jumped over"
                cursors[request_id] = num_settled_tokens // 16
        elif isinstance(event, e.SaveIssued):
            saved += [(event.request_id, event.generation, chunk) for chunk in event.chunks]
    assert num_restarted > len(preempted)
    assert len(saved) == len(set(saved)), "and nothing was saved twice in one life"


def test_vllm_54853_a_block_that_fills_without_an_allocation_is_saved(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: "Missing current block table": the step that fills a block does not allocate one (#55839)."""
    engine = make_engine(num_blocks=30, chunk_size=8, enable_prefix_caching=False, **runner, **transfers)
    engine.serve("writer", range(20), 40)
    silent = [
        save
        for step, save in pairs_of_step_and_save(engine)
        if not step.extended and not step.advanced and not save.before_forward
    ]
    assert len(silent) >= 2, "chunks were saved in steps that say nothing about the table"
    saved = [chunk for save in engine.logged(e.SaveIssued) for chunk in save.chunks]
    assert saved == list(range(59 // 8))
    ask_again(engine)


def pairs_of_step_and_save(engine: Any) -> list[tuple[e.StepScheduled, e.SaveIssued]]:
    """Every save that a step led to, with that step."""
    by_sequence = dict(engine.events())
    pairs = [(by_sequence[save.cause], save) for save in engine.logged(e.SaveIssued)]
    return [(step, save) for step, save in pairs if isinstance(step, e.StepScheduled)]


def test_lmcache_2243_tokens_and_blocks_agree_after_a_resume(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: `len(slot_mapping) != len(token_ids)` when a resumed request saved (#2294, #2327, #2336, #2815)."""
    engine = make_engine(num_blocks=14, chunk_size=8, enable_prefix_caching=True, **runner, **transfers)
    engine.add_crowd(4)
    while engine.scheduler.has_requests():
        engine.step()
        for request in engine.scheduler.running:
            (table,) = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            assert list(engine.projections.tracker.get(request.request_id).block_ids or ()) == table
    assert engine.num_preemptions
    for save in engine.logged(e.SaveIssued):
        assert len(save.slots) == len(save.block_ids) == len({chunk * 8 // 16 for chunk in save.chunks})
    ask_again(engine)


def test_lmcache_3640_each_save_of_a_chunked_prefill_has_a_completion_of_its_own(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], is_async: bool
) -> None:
    """Symptom: warm misses: futures were keyed by request, so the second store of a prefill overwrote the first."""
    engine = make_engine(
        num_blocks=30,
        chunk_size=16,
        max_num_batched_tokens=40,
        enable_prefix_caching=False,
        num_questions=10,
        **runner,
        **transfers,
    )
    engine.add("writer", range(160), 2)
    max_under_way = 0
    while engine.scheduler.has_requests():
        engine.step()
        max_under_way = max(max_under_way, len(engine.projections.jobs))
    engine.drain()
    assert max_under_way >= 3 or not is_async, "several saves of the one request are under way at once"
    saves = engine.logged(e.SaveIssued)
    assert len(saves) >= 4
    assert len({save.job_id for save in saves}) == len(saves)
    assert sorted(done.job_id for done in engine.logged(e.SaveCompleted)) == [save.job_id for save in saves]
    engine.serve("reader", range(160), 2)
    assert engine.check_answers("reader")[0].num_hit_tokens == 160


@pytest.mark.parametrize("num_steps_late", [2, 4])
def test_pegaflow_418_the_first_completion_does_not_end_the_other_saves(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], report_late: Any, num_steps_late: int
) -> None:
    """Symptom: "request saved" was a set: blocks were used again while a later save of the request was pending."""
    engine = make_engine(
        num_blocks=14, chunk_size=16, max_num_batched_tokens=32, enable_prefix_caching=False, **runner, **transfers
    )
    report_late(engine, num_steps_late)
    engine.add("gone", range(150), 50)
    for _ in range(4):
        engine.step()
    assert len(engine.projections.jobs) >= 1
    engine.abort("gone")
    engine.add("next", range(300, 450), 3)
    released = engine.logged(e.RequestReleased, request_id="gone")
    assert released == [], "it owes the reports of its saves"
    engine.run()
    saves = {save.job_id for save in engine.logged(e.SaveIssued, request_id="gone")}
    assert len(saves) >= 2
    assert {done.job_id for done in engine.logged(e.SaveCompleted, request_id="gone")} == saves
    assert len(engine.logged(e.RequestReleased, request_id="gone")) == 1
    engine.serve("reader", range(150), 3)
    assert engine.check_answers("reader")[0].num_hit_tokens >= 32
    del engine.outputs["gone"]


def test_vllm_45357_blocks_that_a_step_in_flight_still_writes_are_loaded_behind_it(
    make_engine: Any, transfers: dict[str, str]
) -> None:
    """Symptom: freed at step N while N+1 was writing, a block was used as a load's destination (ascend#14055)."""
    engine = make_engine(num_blocks=14, chunk_size=16, enable_prefix_caching=False, async_scheduling=True, **transfers)
    engine.serve("writer", range(96), 2)
    engine.add("gone", range(300, 450), 50)
    engine.step()
    held = set(engine.projections.tracker.get("gone").block_ids or ())
    engine.add("reader", range(100), 5)
    assert engine._in_flight
    engine.abort("gone")
    engine.run()
    (load,) = engine.logged(e.LoadIssued, request_id="reader")
    assert held & set(load.block_ids), "the pool is so small that the load needs blocks of the request that went"
    del engine.outputs["gone"]
    assert len(engine.outputs["reader"]) == 5
