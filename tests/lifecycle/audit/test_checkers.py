"""Each checker names the log in which its rule was broken, and no other checker does."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from lifecycle_driver import Driver, keys_of, play_seed

from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.replay import SequencedEvent

Change = Callable[[e.Event], e.Event]


HERE = -1
"""The cause of a decision that is put into a log: the last observation before it."""


def altered(driver: Driver, event_class: type[e.Event], index: int, change: Change) -> list[SequencedEvent]:
    """The driver's log with the `index`-th event of a class changed; a change that changes nothing is refused."""
    events = driver.events()
    places = [place for place, (_, event) in enumerate(events) if type(event) is event_class]
    sequence, event = events[places[index]]
    changed = change(event)
    assert changed != event
    if getattr(changed, "cause", 0) == HERE:
        changed = evolve(cause=max(its for its, each in events if its < sequence and not each.is_decision))(changed)
    events[places[index]] = (sequence, changed)
    return events


def evolve(**fields: object) -> Change:
    """Replace fields."""
    return lambda event: msgspec.structs.replace(event, **fields)


def in_first_entry(name: str, place: int, value: int) -> Change:
    """Replace one number in the first tuple of a field of a step."""

    def change(event: e.Event) -> e.Event:
        first, *rest = getattr(event, name)
        entry = (*first[:place], value, *first[place + 1 :])
        return msgspec.structs.replace(event, **{name: (entry, *rest)})

    return change


def first_of(name: str, value: int) -> Change:
    """Replace the first number of a tuple."""
    return lambda event: msgspec.structs.replace(event, **{name: (value, *getattr(event, name)[1:])})


def swap_first_two(name: str) -> Change:
    """Exchange the first two numbers of a tuple."""

    def change(event: e.Event) -> e.Event:
        first, second, *rest = getattr(event, name)
        return msgspec.structs.replace(event, **{name: (second, first, *rest)})

    return change


def one_more(name: str) -> Change:
    """Count a field up."""
    return lambda event: msgspec.structs.replace(event, **{name: getattr(event, name) + 1})


def reading_behind_the_window(event: e.Event) -> e.Event:
    """Copy one page more: that of block 0 in the group with the window."""
    assert isinstance(event, e.SaveIssued)
    slots, block_ids = list(event.slots), list(event.block_ids)
    slots[1], block_ids[1] = 40, 2
    return msgspec.structs.replace(event, slots=tuple(slots), block_ids=tuple(block_ids))


RESUMING_STEP = 21
"""The step in which the preempted request of the story computes again."""

ALTERATIONS: dict[str, tuple[type[e.Event], int, Change]] = {
    "LEGAL_TRANSITION": (e.LogNote, 0, lambda _: e.WindowLeft("stranger", 0, 1)),
    "ALLOC_MATCHES_LOOKUP": (e.BlocksAllocated, 1, evolve(num_external_tokens=80)),
    "LOOKUP_PURE": (e.LookupAnswered, 2, evolve(num_external_tokens=56)),
    "EXTERNAL_ZERO_NO_LOAD": (e.BlocksAllocated, 1, evolve(num_external_tokens=0)),
    "LAST_TOKEN": (e.StepScheduled, RESUMING_STEP, in_first_entry("advanced", 3, 64)),
    "CHUNK_COMPLETE": (e.StepScheduled, 1, in_first_entry("settled", 2, 39)),
    "SRC_BLOCK_OWNED": (e.SaveIssued, 0, first_of("block_ids", 99)),
    "LOADABLE_AFTER_COMMIT": (e.LoadIssued, 0, first_of("slots", 6)),
    "COMPLETION_ONCE": (e.TransferReported, 0, evolve(ranks_done=(0, 0))),
    "GEN_ISOLATION": (e.SaveCompleted, 0, one_more("generation")),
    "HIT_PINNED": (e.ChunksEvicted, 0, lambda event: event),  # the promised key is put in by the test
    "EVICT_IDLE_ONLY": (e.ChunksEvicted, 0, evolve(keys=(keys_of("a", 1)[0],))),
    "LOAD_DST_EXCLUSIVE": (e.LoadIssued, 0, swap_first_two("block_ids")),
    "RELEASE_ALL": (e.RequestReleased, -1, one_more("generation")),
    "TOKEN_CONSERVATION": (e.StepScheduled, RESUMING_STEP, in_first_entry("advanced", 1, 48)),
    "FINISH_IS_LAST": (
        e.SaveCompleted,
        -1,
        lambda _: e.SaveIssued("f", 4, 0, 9, (0,), (0,), (30,), True, False, HERE),
    ),
    "RESET_EPOCH": (e.LookupAnswered, -1, evolve(num_hit_tokens=16, num_external_tokens=16)),
    "SRC_BLOCK_STABLE": (e.TransferAwaited, 0, evolve(before_forward=False)),
    "DELAY_FREE_CONTRACT": (e.LogNote, -1, lambda _: e.BlocksHeld("b", 1, 0, HERE)),
    "DELIVERED_ONCE": (e.LogNote, 0, lambda _: e.EffectsDelivered((99,), (), (), (), (), (), ())),
    "DEFER_BOUNDED": (e.LookupDeferred, 1, evolve(num_deferred=7)),
    "FAILED_LOAD_TAINT": (
        e.ChunksTainted,
        0,
        lambda event: msgspec.structs.replace(event, keys=(bytes(16), *event.keys[1:])),
    ),
    "GROUP_AGREEMENT": (e.SaveIssued, 0, lambda event: event),  # the altered page is put in by the test
    "TABLE_EQ": (e.StepScheduled, RESUMING_STEP, evolve(extended=((0, (7,)),))),
    "CURSOR_LE_FRONTIER": (e.StepScheduled, 1, in_first_entry("settled", 1, 2)),
    "STORE_CONTIGUOUS": (e.SaveIssued, 2, lambda event: msgspec.structs.replace(event, chunks=event.chunks[1:])),  # type: ignore[attr-defined]
    "SAVE_INTERVAL": (e.StepScheduled, -11, evolve(settled=())),
    "SETTLED_SAVED": (e.SaveIssued, -1, evolve(chunks=(0,))),  # which has no block of its own
    "PIN_BALANCE": (e.LogNote, 2, lambda _: e.SaveDeclined("b", 2, 0, 6, 1, "pool_full", HERE)),
    "RANK_AGREEMENT": (e.TransferReported, 0, evolve(ranks_done=())),
    "BLOCK_REUSE_FENCED": (e.StepScheduled, -2, evolve(extended=((0, (7,)),))),
    "RESUME_COVERS_OUTPUT": (e.LookupRequested, 1, evolve(num_tokens=17)),
    "ROLLBACK_OBSERVED": (e.StepScheduled, 4, evolve(advanced=((2, 32, 1, 33),))),
    "LIVENESS": (e.TransferAwaited, 0, lambda _: e.LogNote("nobody asks", 1)),
    "LOAD_XOR_STORES": (e.LoadIssued, 0, evolve(is_async=True)),
    "KEY_IDENTITY": (e.ChunkKeysObserved, 3, swap_first_two("keys")),
    "SLOT_EXCLUSIVE": (e.SaveIssued, 2, lambda event: msgspec.structs.replace(event, slots=(0, *event.slots[1:]))),  # type: ignore[attr-defined]
    "EVICTION_ORDER": (e.ChunksEvicted, 0, evolve(keys=(keys_of("young", 1)[0],))),
    "WAITING_KEPT": (e.LogNote, 1, lambda _: e.ChunksEvicted((keys_of("a", 1)[0],), "a", 0, 0, HERE)),
    "LONGEST_HIT": (e.LookupAnswered, 0, evolve(miss_reason="saving")),
    "NEW_BLOCK_EXCLUSIVE": (e.StepScheduled, RESUMING_STEP + 2, evolve(extended=((2, (11,)),))),
    "STEP_SUM": (e.StepScheduled, 1, one_more("num_scheduled_tokens")),
    "SETTLED_EXACT": (
        e.RequestFinished,
        -1,
        evolve(num_settled_tokens=17, num_in_flight_tokens=0, num_computed_tokens=18),
    ),
    "BYTES_UNCHANGED": (e.LogNote, 0, lambda _: e.PagesDigested("a", 0, 0, 0, True, 0, 0, (1,), (2,), 1)),
    "COPY_IN_TIME": (e.TransferReported, 0, first_of("moments", 1)),
    "SETTLED_AT_CLOSE": (e.LogNote, 0, evolve(text="connector shut down")),
    "TOLD_AS_DECIDED": (e.LogNote, 0, lambda _: e.HooksExchanged(differences=(("job", 1, "handed out twice"),))),
    "RECORDED": (e.LogNote, 0, lambda _: e.HookFailed("build_connector_meta", "", "ValueError: no", 1)),
}


STORIES = {
    "GROUP_AGREEMENT": "groups",
    "SAVE_INTERVAL": "decoding",
    **dict.fromkeys(
        ("SRC_BLOCK_STABLE", "BLOCK_REUSE_FENCED", "DELAY_FREE_CONTRACT", "DEFER_BOUNDED", "FAILED_LOAD_TAINT"),
        "asynchronous",
    ),
    "EVICTION_ORDER": "crowded",
    **dict.fromkeys(("COPY_IN_TIME", "SETTLED_AT_CLOSE"), "ordered"),
    **dict.fromkeys(("EVICT_IDLE_ONLY", "ROLLBACK_OBSERVED", "LIVENESS", "LOAD_XOR_STORES"), "reading"),
}
"""Rules that are broken in another story than the first."""


@pytest.fixture
def broken_story(rule: str, request: pytest.FixtureRequest) -> Driver:
    """The healthy story in which something of the rule's happens."""
    driver: Driver = request.getfixturevalue(STORIES.get(rule, "story"))
    return driver


def altered_for(rule: str, driver: Driver) -> list[SequencedEvent]:
    """The story with the one event altered that breaks `rule`."""
    event_class, index, change = ALTERATIONS[rule]
    if rule == "HIT_PINNED":
        (promised,) = [event for event in driver.all_of(e.ChunkKeysObserved) if event.request_id == "c"]
        change = evolve(keys=(promised.keys[0],))
    if rule == "GROUP_AGREEMENT":
        change = reading_behind_the_window
    events = altered(driver, event_class, index, change)
    if rule == "LOAD_XOR_STORES":  # it is as the lookup was answered
        places = [place for place, (_, event) in enumerate(events) if type(event) is e.LookupAnswered]
        sequence, answer = events[places[_index_of_first_answer(driver)]]
        events[places[_index_of_first_answer(driver)]] = (sequence, evolve(is_async=True)(answer))
    return events


def _index_of_first_answer(driver: Driver) -> int:
    """Of the answer that the first load takes up, among all answers."""
    load = driver.all_of(e.LoadIssued)[0]
    return max(
        index
        for index, answer in enumerate(driver.all_of(e.LookupAnswered))
        if answer.cause < load.cause and answer.request_id == load.request_id
    )


@pytest.mark.parametrize("event_class", [e.LookupAnswered, e.LoadIssued])
@pytest.mark.parametrize(("name", "is_async"), [("story", False), ("asynchronous", True)])
def test_a_load_is_asynchronous_if_it_was_answered_so(
    name: str, event_class: type[e.Event], is_async: bool, request: pytest.FixtureRequest
) -> None:
    """Or vLLM schedules a request whose blocks are not filled, or waits for a report that it does not look for."""
    driver: Driver = request.getfixturevalue(name)
    index = 0 if event_class is e.LoadIssued else _index_of_first_answer(driver)
    audit = driver.audited(altered(driver, event_class, index, evolve(is_async=not is_async)))
    named = [violation.rule for violation in audit.violations]
    # The settings say already how it has to be answered.
    assert named[0] == ("LOOKUP_PURE" if event_class is e.LookupAnswered else "ALLOC_MATCHES_LOOKUP")
    assert "ALLOC_MATCHES_LOOKUP" in named


def without_row(event: e.Event) -> e.Event:
    """A step that is about a request which there is not."""
    assert isinstance(event, e.StepScheduled)
    return msgspec.structs.replace(event, advanced=((99, *event.advanced[0][1:]), *event.advanced[1:]))


WRONG_VALUES: list[tuple[str, type[e.Event], int, Change, str]] = [
    ("a step that is about nobody", e.StepScheduled, 0, without_row, "LEGAL_TRANSITION"),
    ("a step that pauses who does not decode", e.StepScheduled, 0, evolve(paused=(0,)), "LEGAL_TRANSITION"),
    ("progress of other tokens", e.PrefillCompleted, 0, evolve(num_tokens=44), "TOKEN_CONSERVATION"),
    ("nothing to load asynchronously", e.LookupAnswered, 0, evolve(is_async=True), "LOOKUP_PURE"),
    ("keys behind a gap", e.ChunkKeysObserved, 1, evolve(first_chunk=7), "KEY_IDENTITY"),
    ("a cause that is no observation", e.PrefillCompleted, 1, one_more("cause"), "LEGAL_TRANSITION"),
    ("an eviction for another reason", e.ChunksEvicted, 0, evolve(cause=1), "LEGAL_TRANSITION"),
    ("an eviction for another life", e.ChunksEvicted, 0, one_more("generation"), "GEN_ISOLATION"),
    ("an eviction for nobody", e.ChunksEvicted, 0, evolve(request_id="nobody"), "GEN_ISOLATION"),
    ("a save before a forward that spares its blocks", e.SaveIssued, 0, evolve(before_forward=True), "SRC_BLOCK_OWNED"),
    ("a copy of another kind than is configured", e.SaveIssued, 0, evolve(is_async=True), "SRC_BLOCK_OWNED"),
    ("a step out of the row", e.StepScheduled, 2, one_more("step"), "STEP_SUM"),
    ("chunks in another order", e.SaveIssued, 0, swap_first_two("chunks"), "SRC_BLOCK_OWNED"),
]


@pytest.mark.parametrize(
    ("event_class", "index", "change", "rule"), [w[1:] for w in WRONG_VALUES], ids=[w[0] for w in WRONG_VALUES]
)
def test_a_wrong_value_is_named(
    event_class: type[e.Event], index: int, change: Change, rule: str, story: Driver
) -> None:
    """Found by altering each field of each event, see `test_facts.py`."""
    assert story.audited(altered(story, event_class, index, change)).violations[0].rule == rule


def test_slots_of_a_failed_save_that_are_kept_although_every_rank_has_reported_are_named() -> None:
    """Nobody would ever write there again: the pool is smaller from then on, and nothing says so."""
    driver = Driver()
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    driver.preempt("a", 16)
    (save,) = driver.all_of(e.SaveIssued)
    driver.report(save.job_id, ok=False)
    driver.ledger.commit()
    assert driver.audited().is_sound
    assert {v.rule for v in driver.audited(altered(driver, e.SaveFailed, 0, evolve(quiet=False))).violations} == {
        "RANK_AGREEMENT"
    }


def test_a_load_that_leaves_out_what_a_group_sees_is_named(groups: Driver) -> None:
    """The boundary is one for all groups; whoever forgets one of them reads what was there before."""

    def without_last_page(event: e.Event) -> e.Event:
        assert isinstance(event, e.LoadIssued)
        return msgspec.structs.replace(event, slots=(*event.slots[:-1], -1))

    audit = groups.audited(altered(groups, e.LoadIssued, 0, without_last_page))
    assert "GROUP_AGREEMENT" in {violation.rule for violation in audit.violations}
    assert groups.audited().is_sound


@pytest.mark.parametrize("event_class", [e.LookupAnswered, e.LoadIssued, e.SaveIssued, e.SaveCompleted])
def test_a_decision_that_names_another_life_of_its_request_is_named(event_class: type[e.Event], story: Driver) -> None:
    """The id is the same, the generation too."""
    audit = story.audited(altered(story, event_class, 0, evolve(ordinal=99)))
    assert "GEN_ISOLATION" in {violation.rule for violation in audit.violations}


@pytest.mark.parametrize(
    ("name", "event_classes"),
    [
        ("story", (e.LoadIssued, e.ChunksEvicted, e.CacheReset)),
        ("asynchronous", (e.LookupDeferred, e.TransferAwaited, e.BlocksHeld, e.LoadFailed)),
        ("reading", (e.ChunksEvicted, e.LoadFailed, e.TransferAwaited)),
        ("decoding", (e.RequestFinished,)),
    ],
)
def test_a_healthy_log_breaks_no_rule(
    name: str, event_classes: tuple[type[e.Event], ...], request: pytest.FixtureRequest
) -> None:
    """Preemptions, loads that fail, evictions, resets, jobs that are asked after: and nothing is wrong with it."""
    driver: Driver = request.getfixturevalue(name)
    for event_class in event_classes:
        assert driver.all_of(event_class), event_class
    audit = driver.audited()
    assert audit.violations == []
    assert audit.is_sound
    assert audit.num_events == len(driver.sink.events())


FOLLOWING = {
    # A chunk that was not the one to be evicted still lies where the next save writes.
    **{rule: {"SLOT_EXCLUSIVE", "LONGEST_HIT"} for rule in ("EVICTION_ORDER", "FAILED_LOAD_TAINT")},
    # It is also older than the chunks that are evicted after it.
    **{rule: {"SLOT_EXCLUSIVE", "LONGEST_HIT", "EVICTION_ORDER"} for rule in ("HIT_PINNED", "EVICT_IDLE_ONLY")},
    # Whoever waited for it does not find it, and saves nothing in its place.
    "WAITING_KEPT": {"LOADABLE_AFTER_COMMIT", "LONGEST_HIT", "SETTLED_SAVED"},
    "CHUNK_COMPLETE": {"SAVE_INTERVAL"},  # a chunk that has not settled is one that nobody deals with
    "LAST_TOKEN": {"TOKEN_CONSERVATION"},  # progress is of other tokens than the step told of
    "FINISH_IS_LAST": {"RELEASE_ALL"},  # nobody settles what is saved
    "STORE_CONTIGUOUS": {"SETTLED_SAVED"},  # nor is it saved at the end
    "RESUME_COVERS_OUTPUT": {"LOOKUP_PURE"},  # what was answered is the answer to another question
    # Its request computes at once, as it did after the load within the step; and the settings want it there.
    "LOAD_XOR_STORES": {"LOAD_DST_EXCLUSIVE", "LOOKUP_PURE"},
    # Who is told of with other counts decodes no longer as before.
    "ROLLBACK_OBSERVED": {"STEP_SUM"},
    "TOKEN_CONSERVATION": {"STEP_SUM", "SETTLED_EXACT"},  # and it has fewer computed tokens when it ends
}
"""Rule -> what a breach of it breaks later on."""


@pytest.mark.parametrize("rule", Core.standard().rules)
def test_one_altered_event_is_named_by_exactly_its_checker(rule: str, broken_story: Driver) -> None:
    """Whoever reads the audit is led to the rule that was broken, not to five others."""
    audit = broken_story.audited(altered_for(rule, broken_story))
    assert audit.unfoldable is None
    assert audit.violations[0].rule in ({rule} if rule != "LOAD_XOR_STORES" else {rule, *FOLLOWING[rule]})
    assert rule in {violation.rule for violation in audit.violations}
    assert {violation.rule for violation in audit.violations} <= {rule, *FOLLOWING.get(rule, ())}


@pytest.mark.parametrize("rule", Core.standard().rules)
def test_a_violation_points_at_events_that_exist(rule: str, broken_story: Driver) -> None:
    """Sequence and evidence are places in the log, evidence never later than the breach."""
    events = altered_for(rule, broken_story)
    for violation in broken_story.audited(events).violations:
        assert 1 <= violation.sequence <= events[-1][0]
        assert all(1 <= sequence <= violation.sequence for sequence in violation.evidence)
        assert violation.detail


def test_every_checker_says_what_it_verifies_and_what_not() -> None:
    """Silence must not be taken for soundness."""
    for checker in Core.standard().rules.values():
        text = checker.__doc__ or ""
        assert "Verifies: " in text, checker
        assert "Does not verify: " in text, checker


@pytest.mark.parametrize(("chunk_size", "block_size"), [(4, 16), (8, 16), (16, 16), (32, 16)])
@pytest.mark.parametrize("seed", range(4))
def test_random_walks_break_only_rules_that_were_broken_live(seed: int, chunk_size: int, block_size: int) -> None:
    """The walk's workers report twice and fall silent; what the live guards saw is all that an audit finds."""
    driver = play_seed(seed, 60, chunk_size=chunk_size, block_size=block_size)
    audit = driver.audited()
    unexpected = [v for v in audit.violations if v.rule not in {"RECORDED", "COMPLETION_ONCE"}]
    assert not unexpected, f"seed {seed}: {unexpected[0]}"
    recorded = [v for v in audit.violations if v.rule == "RECORDED"]
    assert audit.num_violations["COMPLETION_ONCE"] == sum(v.detail.startswith("COMPLETION_ONCE") for v in recorded)
    assert len(recorded) == len(driver.all_of(e.InvariantViolated))
    assert not audit.divergences
    assert not audit.reference_differences


OF_A_FIXED_NUMBER = {"_ended", "_known", "_num", "_unknown"}
"""What is remembered of a fixed number: ended requests, for a connector may save them later; keys; counts."""


def test_checkers_forget_released_requests() -> None:
    """An audit of a long log needs memory for what is alive, not for what was."""
    driver = play_seed(5, 80, chunk_size=8, block_size=16)
    assert not len(driver.projections.tracker)
    for checker in driver.audited().checkers:
        remembered = {
            name
            for name, value in vars(checker).items()
            if isinstance(value, dict | set | list) and value and name not in OF_A_FIXED_NUMBER
        }
        assert not remembered, checker.rule


# --- breaches that touch more than one rule, and those that need a whole story -------------------


def broken_rules(driver: Driver) -> set[str]:
    """What the audit names besides what the live guards recorded."""
    return {violation.rule for violation in driver.audited().violations} - {"RECORDED"}


def test_tokens_of_an_answer_before_a_preemption_are_not_taken_up_after_it() -> None:
    """A remembered lookup that outlives a preemption killed an engine once (LMCache#2158)."""
    driver = Driver()
    keys = keys_of("document", 4)
    driver.save_prefix("first", keys)
    driver.arrive("second", 33, keys)
    driver.lookup("second", 0, 33)
    driver.allocate("second", (1, 2, 3), 32)
    driver.step(("second", 32, 1, 33))
    driver.settle_all()
    driver.preempt("second", 32)
    driver.allocate("second", (4, 5, 6), 32)
    assert broken_rules(driver) == {"ALLOC_MATCHES_LOOKUP"}


def test_a_report_of_a_settled_job_is_named() -> None:
    """A worker that reports twice frees blocks twice."""
    driver = Driver()
    driver.save_prefix("a", keys_of("document", 4))
    driver.report(1)
    assert broken_rules(driver) == {"COMPLETION_ONCE"}


def test_a_load_from_chunks_that_a_reset_made_stale_is_named(story: Driver) -> None:
    """Old weights' KV under new weights is silent corruption."""
    events = story.events()
    allocation = next(s for s, event in events if isinstance(event, e.BlocksAllocated) and event.num_external_tokens)
    # The reset takes the place of a lookup's repetition, so no sequence number changes.
    polls = [
        place for place, (s, event) in enumerate(events) if isinstance(event, e.LookupRequested) and s < allocation
    ]
    events[polls[-2]] = (events[polls[-2]][0], e.CacheReset(1))
    broken = {violation.rule for violation in story.audited(events).violations}
    assert {"LOADABLE_AFTER_COMMIT", "RESET_EPOCH"} <= broken


def test_a_finished_request_that_is_never_released_is_named(story: Driver) -> None:
    """A leak: nothing is owed, and still it is remembered."""
    events = story.events()
    place = max(place for place, (_, event) in enumerate(events) if isinstance(event, e.RequestReleased))
    events[place] = (events[place][0], e.LogNote("nothing", 1))
    assert {v.rule for v in story.audited(events).violations} == {"RELEASE_ALL"}


def test_two_loads_into_one_block_are_named() -> None:
    """Whichever comes last wins, and one of two requests reads the other's tokens."""
    driver = Driver()
    driver.save_prefix("first", keys_of("document", 4))
    for request_id in ("second", "third"):
        driver.arrive(request_id, 33, keys_of("document", 4))
        driver.lookup(request_id, 0, 33)
        driver.allocate(request_id, (1, 2, 3), 32)
    assert broken_rules(driver) == {"LOAD_DST_EXCLUSIVE"}


@pytest.mark.parametrize("shared", [0, 2, 7])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_load_into_a_block_that_another_request_holds_is_named(shared: int, *, is_async: bool) -> None:
    """An embedder gave a block that a running request had, block 0 among them, and the log was sound."""
    driver = Driver(async_load_tokens=0 if is_async else None)
    driver.save_prefix("first", keys_of("document", 4))
    driver.start("running", keys_of("other", 2), 17, (0, 2))
    driver.step(extended=[("running", (7,))])
    driver.arrive("second", 33, keys_of("document", 4))
    driver.lookup("second", 0, 33)
    driver.allocate("second", (shared, 5, 6), 32)
    (violation,) = [v for v in driver.audited().violations if v.rule == "LOAD_DST_EXCLUSIVE"]
    assert f"fills block {shared}, which 'running' holds" in violation.detail


def loading(*, is_async: bool = True) -> Driver:
    """A load fills blocks 0 to 3 of request `loads`, and nobody has reported it."""
    driver = Driver(chunk_size=16, async_load_tokens=0 if is_async else None)
    driver.save_prefix("first", keys_of("document", 4))
    driver.admit("loads", keys_of("document", 4), 65, range(5), num_external=64)
    return driver


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("how", ["allocated", "extended"])
def test_a_block_that_a_load_fills_for_another_request_is_not_given(how: str, *, is_async: bool) -> None:
    """The same as a load into a block that another one holds, in the other order: the log was sound."""
    driver = loading(is_async=is_async)
    driver.start("running", keys_of("other", 2), 40, (2 if how == "allocated" else 7, 8, 9))
    driver.step(("running", 40, 1, 41), extended=[("running", (2,))] if how == "extended" else [])
    (violation,) = driver.audited().violations
    assert violation.rule == "LOAD_DST_EXCLUSIVE"
    assert violation.request_id == "running"
    assert violation.detail == "the request gets block 2, which load 2 of 'loads' is still filling"


def test_a_block_that_an_asynchronous_load_fills_is_not_shared() -> None:
    """VLLM caches what such a load brings once it has ended; what is loaded within the step it caches at once."""
    for is_async in (False, True):
        driver = loading(is_async=is_async)
        driver.start("shares", keys_of("document", 4), 65, (0, 1, 2, 3, 9), num_computed=64)
        assert broken_rules(driver) == ({"LOAD_DST_EXCLUSIVE"} if is_async else set())


@pytest.mark.parametrize("how", ["preempted", "ended", "reported", "failed"])
def test_blocks_may_be_given_when_their_load_or_its_request_is_over(how: str) -> None:
    """Then nobody waits for what it brings."""
    driver = loading()
    load = driver.all_of(e.LoadIssued)[-1].job_id
    if how == "preempted":
        driver.preempt("loads", 0)
    elif how == "ended":
        driver.finish("loads", 0, 65)
    else:
        driver.report(load, ok=how == "reported")
    if how == "reported":
        driver.step(("loads", 64, 1, 65))
        driver.finish("loads", 64, 66)
    if how == "failed":
        driver.observe(e.LoadErrorsObserved(tuple(range(4)), 10**9))
        driver.roll_back("loads", 0)
    driver.step()
    driver.start("running", keys_of("other", 2), 40, (2, 8, 9))
    assert "LOAD_DST_EXCLUSIVE" not in broken_rules(driver)


def test_a_load_behind_shared_blocks_is_sound() -> None:
    """Blocks of vLLM's prefix cache have several holders; the load fills others, also those that somebody let go."""
    driver = Driver()
    driver.save_prefix("first", keys_of("document", 6))
    driver.start("gone", keys_of("other", 2), 17, (5, 6))
    driver.start("running", keys_of("document", 2), 17, (1, 2))
    driver.finish("gone", 17, 18)
    driver.arrive("second", 49, keys_of("document", 6))
    driver.lookup("second", 16, 49)
    driver.allocate("second", (1, 5, 6, 7), 32)
    assert broken_rules(driver) == set()


def test_tokens_that_are_computed_while_their_blocks_are_loaded_are_named() -> None:
    """Under MultiConnector another child reported an end, and vLLM computed on blocks that were not filled yet."""
    driver = Driver(async_load_tokens=0)
    driver.save_prefix("first", keys_of("document", 4))
    driver.arrive("second", 33, keys_of("document", 4))
    driver.lookup("second", 0, 33)
    driver.allocate("second", (1, 2, 3), 32)
    driver.step(("second", 32, 1, 33))
    driver.step()
    (violation,) = driver.audited().violations
    assert violation.rule == "LOAD_DST_EXCLUSIVE"
    assert "1 tokens are computed while load" in violation.detail


def test_an_event_that_cannot_be_folded_ends_the_audit_without_an_exception(story: Driver) -> None:
    """A log that was tampered with must not end its own audit."""
    events = altered(story, e.SaveIssued, 0, evolve(slots=(-2,)))
    audit = story.audited(events)
    assert audit.unfoldable is not None
    assert not audit.is_sound
    assert "cannot be folded" in str(audit.unfoldable)
    assert audit.num_events == audit.unfoldable.sequence


def test_a_decision_made_otherwise_is_a_divergence_and_no_violation(story: Driver) -> None:
    """Any free slot will do; today's code would still have taken another."""
    events = altered(story, e.SaveIssued, -1, evolve(slots=(0,)))
    audit = story.audited(events)
    assert not audit.violations
    assert len(audit.divergences) == 1
    assert not audit.is_sound


def test_violations_are_all_counted_though_not_all_are_kept(story: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that breaks a rule in every step must not fill the memory."""
    monkeypatch.setattr("kvledger.lifecycle.audit.violations.MAX_VIOLATIONS", 1)
    audit = story.audited(altered_for("ALLOC_MATCHES_LOOKUP", story))
    assert len(audit.violations) == 1
    assert audit.num_violations.total() == 2


def test_a_violation_of_no_known_life_names_no_generation() -> None:
    """The recorded event has -1 there, which stands for none."""
    driver = Driver()
    driver.observe(e.RequestPreempted("nobody", 0, 1, 9))
    observed, recorded = driver.audited().violations
    assert (observed.rule, observed.generation) == ("LEGAL_TRANSITION", None)
    assert (recorded.rule, recorded.generation) == ("RECORDED", None)


def computed(num_tokens: int) -> Driver:
    """A request of 100 tokens, of which a step has computed so many."""
    driver = Driver(chunk_size=16, block_size=16)
    driver.arrive("a", 100)
    driver.keys("a", 0, keys_of("a", 6))
    driver.lookup("a", 0, 100)
    driver.allocate("a", tuple(range(1, 8)))
    driver.step(("a", 0, num_tokens, 100))
    return driver


def test_more_settled_tokens_than_were_computed_are_named_if_the_log_lacks_those_in_flight() -> None:
    """A trial: an embedder preempted with 96 of 40 tokens; they were saved before they were written."""
    for take, trigger in ((Driver.preempt, "request.preempted"), (Driver.finish, "request.finished")):
        for num_settled_tokens in (0, 39, 40, 41, 96):
            driver = computed(40)
            take(driver, "a", num_settled_tokens, 100)
            violations = driver.audited().violations
            said = f"{trigger} has {num_settled_tokens} settled tokens, but steps computed 40"
            expected = [("SETTLED_EXACT", said)] if num_settled_tokens > 40 else []
            assert [(each.rule, each.detail) for each in violations] == expected


def test_what_an_allocation_brought_may_be_settled_before_any_step() -> None:
    """Cached tokens, and those that a load of this allocation fills; the next allocation brings nothing."""
    driver = computed(40)
    driver.preempt("a", 40, 100)
    driver.settle_all()
    num_loaded = driver.lookup("a", 16, 100).num_external_tokens
    assert num_loaded
    driver.allocate("a", tuple(range(11, 18)), num_loaded)
    driver.settle_all()
    driver.preempt("a", 16 + num_loaded, 100)
    assert not driver.audited().violations
    driver.lookup("a", 0, 100)
    driver.allocate("a", tuple(range(21, 28)))
    driver.preempt("a", 16, 100)
    assert [each.rule for each in driver.audited().violations] == ["SETTLED_EXACT"]


def test_an_end_that_takes_no_blocks_may_count_what_the_preemption_took() -> None:
    """Nothing is saved then."""
    driver = computed(40)
    driver.preempt("a", 40, 100)
    driver.settle_all()
    driver.finish("a", 40, 100)
    assert not driver.audited().violations
