"""Each reason in a story of its own: which tokens have it, and which event proves it."""

from __future__ import annotations

import attrs
import pytest
from lifecycle_driver import Driver, keys_of
from lifecycle_driver.concerned import CORE, check_proofs, check_reasons, stories_of

from kvledger.adapters.tools.reasons import Accounts, ChunkStatus, Reason, RequestHistory, Span, Sums
from kvledger.adapters.tools.reasons.chunk_history import MAX_GONE
from kvledger.adapters.tools.reasons.spans import joined
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Model, Reader


def story_of(driver: Driver, request_id: str = "a") -> RequestHistory:
    """The story of the last life of a request, from what was committed; the whole log adds up."""
    driver.ledger.commit()
    events = driver.sink.events()
    check_reasons(events, driver.configuration)
    return [story for story in stories_of(events, driver.configuration) if story.request_id == request_id][-1]


def missed(story: RequestHistory, admission: int = -1) -> list[tuple[int, int, Reason]]:
    """What an admission left to compute, without the last token: first token, end, reason."""
    spans = [span for span in story.admissions[admission].missed if span.reason is not Reason.LAST_TOKEN]
    bare = (attrs.evolve(span, evidence=(), fact=None) for span in spans)
    return [(span.first_token, span.end_token, span.reason) for span in joined(bare)]


def span_with(story: RequestHistory, reason: Reason) -> Span:
    """The first span of the last admission with this reason."""
    return next(span for span in story.admissions[-1].spans if span.reason is reason)


def event_at(driver: Driver, sequence: int) -> e.Event:
    """The event with that number."""
    return dict(driver.sink.events())[sequence]


def behind_a_gap(driver: Driver, last_sequence: int) -> tuple[Reader, Accounts]:
    """Accounts, and the reader that calls them, of a log whose events up to this one are missing."""
    model = Model(CORE.tables, driver.configuration)
    reader = Reader(model, [accounts := Accounts(model, keeps_histories=True)])
    reader.lost(1, last_sequence)
    return reader, accounts


def come_back(driver: Driver, num_tokens: int, request_id: str = "a", num_external_tokens: int | None = None) -> None:
    """Look up without any local prefix, take up what is offered, compute the rest."""
    offered = driver.lookup(request_id, 0, num_tokens).num_external_tokens
    taken = offered if num_external_tokens is None else num_external_tokens
    driver.allocate(request_id, range(40, 40 - (-num_tokens // 16)), taken)
    driver.step((request_id, taken, num_tokens - taken, num_tokens))


def preempted(driver: Driver, num_settled_tokens: int = 32) -> None:
    """`a` computes 33 tokens, which are four chunks and one token, and is preempted."""
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    driver.preempt("a", num_settled_tokens)


def withhold(driver: Driver, request_id: str = "a") -> None:
    """What was decided does not leave, as where the log cannot be written."""
    driver.observe(e.DecisionWithheld(request_id, "", "the event log could not be written", 9))


def test_a_prompt_that_nobody_brought_before_is_new_but_for_its_last_token() -> None:
    """No miss: nothing could have been cached."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 37, (1, 2, 3))
    story = story_of(driver)
    assert missed(story) == [(0, 32, Reason.NEW), (32, 36, Reason.PARTIAL_CHUNK)]
    assert story.sums.misses()[Reason.LAST_TOKEN] == 1
    assert story.sums.num_missed() == 0


def test_what_comes_back_whole_leaves_only_the_last_token() -> None:
    """The case that the connector is made for."""
    driver = Driver()
    preempted(driver)
    driver.settle_all()
    come_back(driver, 33)
    story = story_of(driver)
    assert missed(story) == []
    assert story.sums.num_recomputed == 0
    assert story.admissions[-1].num_claimed == 32


def test_a_save_under_way_at_the_lookup_is_saving() -> None:
    """The scheduler asked too early; the save is named."""
    driver = Driver()
    preempted(driver)
    come_back(driver, 33)
    story = story_of(driver)
    assert missed(story) == [(0, 32, Reason.SAVING)]
    assert story.sums.recomputed == {Reason.SAVING: 32}
    assert isinstance(event_at(driver, span_with(story, Reason.SAVING).evidence[0]), e.SaveIssued)


def test_after_the_last_deferral_it_is_the_deferrals_that_did_not_suffice() -> None:
    """Told apart from a save nobody waited for."""
    driver = Driver(max_deferred_lookups=2)
    preempted(driver)
    for _ in range(2):
        assert isinstance(driver.poll("a", 0, 33), e.LookupDeferred)
    come_back(driver, 33)
    story = story_of(driver)
    assert missed(story) == [(0, 32, Reason.DEFERRAL_EXHAUSTED)]
    kinds = [type(event_at(driver, number)) for number in span_with(story, Reason.DEFERRAL_EXHAUSTED).evidence]
    assert kinds == [e.SaveIssued, e.LookupDeferred, e.LookupDeferred]
    assert [bool(lookup.spans) for lookup in story.lookups] == [True, False, True], "a deferral leaves nothing yet"


def test_a_save_that_failed_is_named_with_its_error() -> None:
    """The chunk was never there."""
    driver = Driver()
    preempted(driver)
    driver.report(1, ok=False, error="the disk is full")
    come_back(driver, 33)
    story = story_of(driver)
    assert story.sums.recomputed == {Reason.SAVE_FAILED: 32}
    fact = span_with(story, Reason.SAVE_FAILED).fact
    assert fact is not None
    assert (fact.status, fact.job_id, fact.detail) == (ChunkStatus.SAVE_FAILED, 1, "the disk is full")


def test_a_save_that_fails_between_lookup_and_allocation_is_named_with_its_error() -> None:
    """World 5988: the log could not be written in the step of the preemption, so the save was withheld and failed."""
    driver = Driver()
    preempted(driver)
    driver.lookup("a", 0, 33)
    driver.report(1, ok=False, error="not handed out")
    driver.allocate("a", range(40, 43), 0)
    driver.step(("a", 0, 33, 33))
    story = story_of(driver)
    check_proofs(driver.sink.events(), [story])
    assert story.lookups[-1].spans[0].reason is Reason.SAVING
    assert story.sums.recomputed == {Reason.SAVE_FAILED: 32}


def test_chunks_without_room_in_the_pool_are_declined_and_those_that_fit_are_not() -> None:
    """Two slots hold the first four chunks of 8; the others are refused at the preemption."""
    driver = Driver(num_slots=2)
    driver.start("a", keys_of("a", 8), 65, (1, 2, 3, 4, 5))
    driver.preempt("a", 64)
    driver.settle_all()
    come_back(driver, 65)
    story = story_of(driver)
    assert story.sums.recomputed == {Reason.DECLINED: 32}
    assert isinstance(event_at(driver, span_with(story, Reason.DECLINED).evidence[0]), e.SaveDeclined)


def test_an_evicted_chunk_names_the_eviction_and_the_request_it_was_for() -> None:
    """And that it had been saved before, by whom."""
    driver = Driver(num_slots=2, keep_for_preempted=False)
    preempted(driver)
    driver.settle_all()
    driver.step()
    driver.save_prefix("b", keys_of("b", 4))
    come_back(driver, 33)
    story = story_of(driver)
    assert story.sums.recomputed == {Reason.EVICTED: 32}
    fact = span_with(story, Reason.EVICTED).fact
    assert fact is not None
    assert (fact.status, fact.request_id) == (ChunkStatus.EVICTED, "b")
    assert isinstance(event_at(driver, fact.sequence), e.ChunksEvicted)
    assert fact.earlier is not None
    assert (fact.earlier.status, fact.earlier.request_id) == (ChunkStatus.SAVED, "a")


def test_a_chunk_behind_an_evicted_one_is_behind_a_gap() -> None:
    """It is there, and of no use: a prefix ends at the first chunk that is missing."""
    driver = Driver()
    preempted(driver)
    driver.settle_all()
    (first, *_), cause = keys_of("a", 4), driver.ledger.next_sequence
    driver.observe(e.ChunksEvicted((first,), "b", 1, 0, cause))
    come_back(driver, 33)
    assert missed(story_of(driver)) == [(0, 8, Reason.EVICTED), (8, 32, Reason.BEHIND_GAP)]


def test_saved_chunks_are_reset_and_computed_ones_that_were_not_saved_are_stale() -> None:
    """Both are the reset's doing; only the first had been saved."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    driver.step(("a", 33, 0, 33), settled=[("a", 0, 16)])
    driver.settle_all()
    driver.reset()
    driver.preempt("a", 32)
    come_back(driver, 33)
    story = story_of(driver)
    assert missed(story) == [(0, 16, Reason.RESET), (16, 32, Reason.STALE)]
    assert isinstance(event_at(driver, span_with(story, Reason.STALE).evidence[0]), e.CacheReset)


def test_what_is_computed_on_a_load_that_a_reset_overtook_is_stale_too() -> None:
    """The blocks were given before the reset, so nothing in them may be saved."""
    driver = Driver(async_load_tokens=0)
    preempted(driver)
    driver.settle_all()
    assert driver.lookup("a", 0, 49).is_async
    driver.allocate("a", (4, 5, 6, 7), 32)
    driver.reset()
    driver.settle_all()
    driver.allocate("a", (4, 5, 6, 7))
    driver.keys("a", 4, keys_of("a", 6)[4:])
    driver.step(("a", 32, 17, 49))
    driver.preempt("a", 48)
    come_back(driver, 49)
    story = story_of(driver)
    assert missed(story) == [(0, 32, Reason.RESET), (32, 48, Reason.STALE)]
    assert len(story.admissions) == 3


def test_after_a_way_back_an_old_reset_is_no_excuse_any_more() -> None:
    """What was computed since can be saved."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    driver.reset()
    driver.preempt("a", 32)
    come_back(driver, 33)
    driver.preempt("a", 32)
    come_back(driver, 33)
    assert missed(story_of(driver)) == [(0, 32, Reason.SAVING)]


def test_a_failed_load_is_the_reason_of_all_that_is_computed_instead() -> None:
    """Also of the tokens that were computed on top of it."""
    driver = Driver()
    preempted(driver)
    driver.settle_all()
    come_back(driver, 40)
    (load,) = driver.all_of(e.LoadIssued)
    driver.roll_back("a", 0)
    driver.report(load.job_id, ok=False, error="gone")
    driver.step(("a", 0, 40, 40))
    story = story_of(driver)
    assert story.sums.recomputed == {Reason.LOAD_FAILED: 32}
    assert story.sums.computed_twice == {Reason.LOAD_FAILED: 8}
    assert story.sums.misses()[Reason.LOAD_FAILED] == 32
    failed = [number for again in story.recomputations for span in again.spans for number in span.evidence]
    assert e.LoadFailed in {type(event_at(driver, number)) for number in failed}


def loading() -> tuple[Driver, e.LoadIssued]:
    """`a` computes 9 tokens while the 32 before them are to be loaded."""
    driver = Driver()
    driver.save_prefix("s", keys_of("a", 4))
    driver.arrive("a", 41, keys_of("a", 5))
    driver.lookup("a", 0, 41)
    driver.allocate("a", (11, 12, 13), 32)
    driver.step(("a", 32, 9, 41))
    (load,) = driver.all_of(e.LoadIssued)
    return driver, load


def test_what_was_computed_again_once_is_computed_again_a_second_time() -> None:
    """Tokens that were claimed and not loaded are computed for the first time after a rollback, and never again so."""
    driver, load = loading()
    driver.roll_back("a", 0)
    driver.step(("a", 0, 41, 41))
    assert story_of(driver).sums.computed_twice.total() == 41 - 32
    driver.report(load.job_id, ok=False, error="gone")
    driver.roll_back("a", 0)
    driver.step(("a", 0, 41, 41))
    assert story_of(driver).sums.computed_twice.total() == 41 - 32 + 41


def test_a_rollback_into_the_middle_of_a_failed_load_leaves_its_beginning_alone() -> None:
    """What is computed behind it is computed again at the next rollback."""
    driver, load = loading()
    driver.report(load.job_id, ok=False, error="gone")
    for num_again in (9, 9 + 25):
        driver.roll_back("a", 16)
        driver.step(("a", 16, 25, 41))
        assert story_of(driver).sums.computed_twice.total() == num_again


def test_the_chunks_of_a_failed_load_are_tainted_for_the_next_lookup_of_others() -> None:
    """Whoever has the same prompt misses them for that reason."""
    driver = Driver()
    driver.save_prefix("s", keys_of("a", 4))
    driver.arrive("a", 33, keys_of("a", 4))
    come_back(driver, 33)
    (load,) = driver.all_of(e.LoadIssued)
    driver.report(load.job_id, ok=False)
    driver.arrive("b", 33, keys_of("a", 4))
    come_back(driver, 33, "b")
    assert missed(story_of(driver, "b")) == [(0, 32, Reason.TAINTED)]


def test_what_the_scheduler_does_not_take_up_is_not_claimed() -> None:
    """It was offered, so it is no miss of the cache's making."""
    driver = Driver()
    preempted(driver)
    driver.settle_all()
    come_back(driver, 33, num_external_tokens=16)
    story = story_of(driver)
    assert missed(story) == [(16, 32, Reason.NOT_CLAIMED)]
    assert story.sums.recomputed == {Reason.NOT_CLAIMED: 16}


def test_what_would_have_taken_longer_to_load_is_slower() -> None:
    """What was measured says so when the preempted request asks."""
    driver = Driver(offers_slow_loads=False)
    preempted(driver)
    driver.settle_all()
    driver.projections.costs.state.declined_until_ns = 1 << 62
    come_back(driver, 33)
    assert missed(story_of(driver)) == [(0, 32, Reason.SLOWER)]


def test_a_quarantined_request_computes_whatever_is_there() -> None:
    """The quarantine and what led to it are the proof."""
    driver = Driver()
    preempted(driver)
    driver.settle_all()
    driver.observe(e.HookFailed("some_hook", "a", "KeyError", 9))
    come_back(driver, 33)
    story = story_of(driver)
    assert missed(story) == [(0, 32, Reason.QUARANTINED)]
    kinds = [type(event_at(driver, number)) for number in span_with(story, Reason.QUARANTINED).evidence]
    assert kinds[:2] == [e.RequestQuarantined, e.HookFailed]


def test_without_a_lookup_the_failed_hook_is_the_reason() -> None:
    """The engine was told 0 instead of being answered."""
    driver = Driver()
    driver.arrive("a", 33, keys_of("a", 4))
    driver.save_prefix("s", keys_of("a", 4))
    driver.observe(e.HookFailed("get_num_new_matched_tokens", "a", "KeyError", 9))
    driver.allocate("a", (1, 2, 3))
    driver.step(("a", 0, 33, 33))
    assert missed(story_of(driver)) == [(0, 32, Reason.HOOK_FAILED)]


def test_without_a_lookup_and_without_a_cause_that_is_what_is_told() -> None:
    """No reason is made up, and what nobody had is still new."""
    driver = Driver()
    driver.save_prefix("s", keys_of("a", 4))
    driver.arrive("a", 41, keys_of("a", 5))
    driver.allocate("a", (1, 2, 3))
    driver.step(("a", 0, 41, 41))
    assert missed(story_of(driver)) == [(0, 32, Reason.NO_LOOKUP), (32, 40, Reason.NEW)]


def test_an_offer_that_a_full_disk_withheld_is_told_as_withheld() -> None:
    """The scheduler was answered 0, so there was nothing that it could have claimed."""
    driver = Driver()
    driver.save_prefix("s", keys_of("a", 4))
    driver.arrive("a", 41, keys_of("a", 5))
    driver.lookup("a", 0, 41)
    withhold(driver)
    driver.allocate("a", (1, 2, 3))
    driver.step(("a", 0, 41, 41))
    story = story_of(driver)
    assert missed(story) == [(0, 32, Reason.WITHHELD), (32, 40, Reason.NEW)]
    assert isinstance(event_at(driver, span_with(story, Reason.WITHHELD).evidence[0]), e.DecisionWithheld)


def test_a_deferral_that_a_full_disk_withheld_is_told_as_withheld() -> None:
    """It was admitted without an answer, some steps before it is computed; what proves it is older than both."""
    driver = Driver(max_deferred_lookups=8)
    preempted(driver)
    assert isinstance(driver.poll("a", 0, 33), e.LookupDeferred)
    withhold(driver)
    driver.allocate("a", (4, 5, 6))
    driver.settle_all()
    driver.step(("a", 0, 33, 33))
    story = story_of(driver)
    assert missed(story) == [(0, 32, Reason.WITHHELD)]
    check_proofs(driver.sink.events(), [story])


def test_a_lookup_after_the_withheld_one_has_reasons_of_its_own() -> None:
    """The disk is there again, and what is offered is claimed or not."""
    driver = Driver()
    driver.save_prefix("s", keys_of("a", 4))
    driver.arrive("a", 33, keys_of("a", 4))
    driver.lookup("a", 0, 33)
    withhold(driver)
    come_back(driver, 33, num_external_tokens=0)
    assert missed(story_of(driver)) == [(0, 32, Reason.NOT_CLAIMED)]


def test_an_admission_that_no_lookup_preceded_is_proven_by_what_came_before_it() -> None:
    """Blocks are given in one step, and another one computes: reasons are as they were when blocks were given."""
    driver = Driver()
    driver.save_prefix("s", keys_of("a", 4))
    driver.arrive("a", 41, keys_of("a", 5))
    driver.allocate("a", (1, 2, 3))
    driver.step(("s", 32, 1, 33))
    driver.step(("a", 0, 41, 41))
    story = story_of(driver)
    assert missed(story) == [(0, 32, Reason.NO_LOOKUP), (32, 40, Reason.NEW)]
    check_proofs(driver.sink.events(), [story])


def test_claimed_without_an_offer_is_not_delivered() -> None:
    """The broken rule is the proof."""
    driver = Driver()
    driver.arrive("a", 33, keys_of("a", 4))
    driver.lookup("a", 0, 33)
    driver.allocate("a", (1, 2, 3), 16)
    driver.step(("a", 16, 17, 33))
    driver.roll_back("a", 0)
    driver.step(("a", 0, 33, 33))
    story = story_of(driver)
    assert story.sums.misses()[Reason.NOT_DELIVERED] == 16
    assert story.sums.to_load.total() == story.sums.num_to_load == 16


def test_what_another_connector_brought_was_not_left_to_compute() -> None:
    """The first step begins behind it; what it would have been missed for does not matter any more."""
    driver = Driver()
    driver.save_prefix("s", keys_of("a", 2))
    driver.arrive("a", 41, keys_of("a", 5))
    driver.lookup("a", 0, 41)
    driver.allocate("a", (1, 2, 3))
    driver.step(("a", 32, 9, 41))
    story = story_of(driver)
    assert missed(story) == [(32, 40, Reason.NEW)]
    assert story.sums.num_elsewhere == story.admissions[-1].num_elsewhere == 32
    assert +story.sums.missed == {Reason.NEW: 8, Reason.LAST_TOKEN: 1}


def test_a_hook_that_failed_for_all_explains_only_those_who_were_there() -> None:
    """Who came later was not concerned."""
    driver = Driver()
    driver.save_prefix("s", keys_of("a", 4))
    driver.arrive("a", 33, keys_of("a", 4))
    driver.observe(e.HookFailed("build_connector_meta", "", "KeyError", 9))
    driver.arrive("b", 33, keys_of("a", 4))
    for name in "ab":
        driver.allocate(name, (1, 2, 3))
        driver.step((name, 0, 33, 33))
    assert missed(story_of(driver, "a")) == [(0, 32, Reason.HOOK_FAILED)]
    assert missed(story_of(driver, "b")) == [(0, 32, Reason.NO_LOOKUP)]


def test_a_prefix_that_another_request_has_not_saved_yet_is_unsaved() -> None:
    """Both have the same prompt; the first is still computing it."""
    driver = Driver()
    driver.start("b", keys_of("a", 4), 33, (1, 2, 3))
    driver.start("a", keys_of("a", 4), 33, (4, 5, 6))
    story = story_of(driver)
    assert missed(story) == [(0, 32, Reason.UNSAVED)]
    fact = span_with(story, Reason.UNSAVED).fact
    assert fact is not None
    assert fact.request_id == "b"


def test_a_prefix_of_a_request_that_ended_before_it_computed_is_new() -> None:
    """Nobody has ever computed it."""
    driver = Driver()
    driver.arrive("b", 33, keys_of("a", 4))
    driver.finish("b", 0, 33)
    driver.start("a", keys_of("a", 4), 33, (4, 5, 6))
    assert missed(story_of(driver)) == [(0, 32, Reason.NEW)]


def test_a_local_prefix_that_ends_inside_a_block_cannot_be_continued() -> None:
    """Loads are whole pages."""
    driver = Driver()
    driver.save_prefix("s", keys_of("a", 4))
    driver.arrive("a", 33, keys_of("a", 4))
    driver.lookup("a", 8, 33)
    driver.allocate("a", (1, 2, 3))
    driver.step(("a", 8, 25, 33))
    assert missed(story_of(driver)) == [(8, 32, Reason.UNALIGNED)]


def test_a_tail_that_could_not_be_saved_says_why() -> None:
    """29 tokens are three chunks and five more, for which there is no slot."""
    driver = Driver(num_slots=2)
    driver.start("a", keys_of("a", 3), 29, (1, 2))
    driver.step(("a", 29, 0, 29), settled=[("a", 0, 24)])
    driver.settle_all()
    driver.preempt("a", 28)
    come_back(driver, 29)
    assert missed(story_of(driver)) == [(24, 28, Reason.DECLINED)]


def test_without_tails_the_part_filled_chunk_is_computed_again() -> None:
    """That is what the option costs."""
    driver = Driver(save_tails=False)
    driver.start("a", keys_of("a", 3), 29, (1, 2))
    driver.preempt("a", 28)
    driver.settle_all()
    come_back(driver, 29)
    story = story_of(driver)
    assert story.sums.recomputed == {Reason.PARTIAL_CHUNK: 4}


def test_a_whole_chunk_without_a_key_says_so() -> None:
    """Its key source may have nothing for it."""
    driver = Driver()
    driver.arrive("a", 33)
    come_back(driver, 33)
    assert missed(story_of(driver)) == [(0, 32, Reason.NO_KEY)]


def test_behind_lost_events_what_is_not_known_is_unknown() -> None:
    """The chunks may have been saved and evicted, or never saved: nobody can tell any more."""
    driver = Driver(num_slots=2, keep_for_preempted=False)
    preempted(driver)
    driver.settle_all()
    driver.step()
    driver.save_prefix("b", keys_of("b", 4))
    driver.arrive("c", 33, keys_of("a", 4))
    come_back(driver, 33, "c")
    driver.ledger.commit()
    events = driver.sink.events()
    arrival = next(sequence for sequence, event in events if getattr(event, "request_id", "") == "c")
    reader, accounts = behind_a_gap(driver, arrival - 1)
    reader.take((sequence, event) for sequence, event in events if sequence >= arrival)
    story = next(story for story in accounts.histories if story.request_id == "c")
    assert missed(story) == [(0, 32, Reason.UNKNOWN)]


@pytest.mark.parametrize(("num_gone", "reason"), [(MAX_GONE, Reason.UNKNOWN), (MAX_GONE * 9 // 8 + 1, Reason.NEW)])
def test_lost_events_matter_as_long_as_their_chunks_would_be_remembered(num_gone: int, reason: Reason) -> None:
    """A whole log calls a chunk new as well whose eviction is that long ago."""
    driver = Driver()
    driver.arrive("a", 33, keys_of("a", 4))
    come_back(driver, 33)
    driver.ledger.commit()
    reader, accounts = behind_a_gap(driver, 1)
    keys = tuple(number.to_bytes(16) for number in range(num_gone - 4))
    reader.take([(1, e.ChunkKeysObserved("other", 0, keys)), *driver.sink.events()])
    (story,) = [story for story in accounts.histories if story.request_id == "a"]
    assert missed(story) == [(0, 32, reason)]


def test_polls_are_one_lookup_as_long_as_nothing_changes_for_the_request() -> None:
    """What happens to others does not matter; what happens to its chunks does."""
    driver = Driver()
    preempted(driver)
    for other in ("b", "c", "d"):
        driver.lookup("a", 0, 33)
        driver.start(other, keys_of(other, 4), 33, range(10, 13))
        driver.finish(other, 33, 34)
    driver.settle_all()
    driver.lookup("a", 0, 33)
    story = story_of(driver)
    assert [lookup.num_times for lookup in story.lookups] == [1, 3, 1]


@pytest.mark.parametrize("num_polls", [1, 4])
def test_offers_are_counted_with_their_fates(num_polls: int) -> None:
    """Every poll that offers something is counted, and only the last is claimed."""
    driver = Driver()
    preempted(driver)
    driver.settle_all()
    for _ in range(num_polls - 1):
        driver.lookup("a", 0, 33)
    come_back(driver, 33)
    sums: Sums = story_of(driver).sums
    assert sums.num_offered == 32 * num_polls
    assert {fate.value: count for fate, count in (+sums.offered).items()} == {
        "claimed": 32,
        **({"asked_again": 32 * (num_polls - 1)} if num_polls > 1 else {}),
    }


def test_a_failed_load_is_the_reason_until_the_request_computes() -> None:
    """Seed 304710: another connector of a `MultiConnector` got blocks in between, and its load failed as well."""
    driver = Driver(async_load_tokens=0)
    driver.save_prefix("writer", keys_of("a", 4))
    driver.arrive("a", 33, keys_of("a", 4))
    driver.lookup("a", 0, 33)
    driver.allocate("a", (1, 2), 32)
    driver.report(driver.all_of(e.LoadIssued)[-1].job_id, ok=False)
    for _ in range(2):
        driver.lookup("a", 0, 33)
        driver.allocate("a", (1, 2, 3))
    driver.step(("a", 0, 33, 33))
    span = span_with(story_of(driver), Reason.LOAD_FAILED)
    assert isinstance(event_at(driver, span.evidence[0]), e.LoadFailed)
