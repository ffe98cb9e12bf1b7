"""Which chunk leaves first, as the audit computes it; what has to stay; and where it says nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Core, Extension
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.replay import SequencedEvent

USED, OTHER = keys_of("used", 2), keys_of("other", 1)
Story = Callable[[Driver], None]


def save_other(driver: Driver) -> None:
    """Another chunk is saved, and is younger than what was used before."""
    driver.start("other", OTHER, 17, (70, 71))
    driver.finish("other", 17, 18)
    driver.report(driver.all_of(e.SaveIssued)[-1].job_id)


def start_reader(driver: Driver, num_tokens: int = 33) -> None:
    """A request has the first chunk of `USED` from vLLM's own cache, and computes the rest."""
    driver.start("reader", USED, num_tokens, (1, 2, 3), num_computed=16)


def admit_load(driver: Driver, *, num_computed: int = 0) -> int:
    """A request loads the stored chunks of `USED` after those that vLLM has; returns the load's number."""
    driver.admit("reader", USED, 33, (1, 2, 3), num_computed=num_computed, num_external=32 - num_computed)
    return driver.all_of(e.LoadIssued)[-1].job_id


# --- uses ------------------------------------------------------------------------------------------------------------


def an_answer_is_taken_back(driver: Driver) -> None:
    """What it promised was used."""
    driver.arrive("reader", 33, USED)
    assert driver.lookup("reader", 0, 33).num_external_tokens
    save_other(driver)
    assert not driver.lookup("reader", 32, 33).num_external_tokens


def an_answer_is_withheld(driver: Driver) -> None:
    """The connector did not give it to vLLM."""
    driver.arrive("reader", 33, USED)
    driver.lookup("reader", 0, 33)
    save_other(driver)
    driver.observe(e.DecisionWithheld("reader", "LAST_TOKEN", "nothing would be left to compute", 10**9))


def an_answer_is_claimed(driver: Driver) -> None:
    """The load takes over from it; here it was within the step."""
    driver.arrive("reader", 33, USED)
    driver.lookup("reader", 0, 33)
    save_other(driver)
    driver.allocate("reader", (1, 2, 3), 32)
    driver.settle_all()


def a_request_ends_while_it_waits(driver: Driver) -> None:
    """It had been promised a load, and was never scheduled."""
    driver.arrive("reader", 33, USED)
    driver.lookup("reader", 0, 33)
    save_other(driver)
    driver.finish("reader", 0, 33)


def a_load_completes(driver: Driver) -> None:
    """Issued before the other chunk was saved, and ended after it."""
    load = admit_load(driver)
    save_other(driver)
    driver.report(load)


def a_request_is_preempted(driver: Driver) -> None:
    """Where nothing is kept for it, too."""
    start_reader(driver)
    save_other(driver)
    driver.preempt("reader", 32)


def a_preempted_request_gets_blocks(driver: Driver) -> None:
    """It waited for them."""
    start_reader(driver)
    driver.preempt("reader", 32)
    save_other(driver)
    driver.lookup("reader", 32, 34)
    driver.allocate("reader", (1, 2, 3))


def a_request_ends(driver: Driver) -> None:
    """It uses what it has."""
    start_reader(driver)
    save_other(driver)
    driver.finish("reader", 33, 34)


USES: dict[Story, bool] = {
    an_answer_is_taken_back: True,
    an_answer_is_withheld: True,
    an_answer_is_claimed: True,
    a_request_ends_while_it_waits: True,
    a_load_completes: True,
    a_request_is_preempted: False,
    a_preempted_request_gets_blocks: True,
    a_request_ends: True,
}
"""Story in which `USED` is used after `OTHER` was saved → whether the pool keeps for the preempted."""


def pressed(story: Story, num_slots: int = 3, num_evicted: int = 1, **configuration: Any) -> Driver:
    """`USED` is saved, the story follows, and another request presses on a full pool."""
    configuration = {"async_load_tokens": 0, "save_tails": False, **configuration}
    driver = Driver(chunk_size=16, num_slots=num_slots, **configuration)
    driver.save_prefix("first", USED)
    story(driver)
    press(driver, num_evicted)
    return driver


def press(driver: Driver, num_evicted: int) -> None:
    """A request saves one chunk more than there are free slots for, or several."""
    num_chunks = driver.projections.slots.num_free + num_evicted
    num_tokens = 16 * num_chunks + 1
    driver.start("new", keys_of("new", num_chunks), num_tokens, range(100, 101 + num_chunks))
    driver.step(settled=[("new", 0, num_tokens - 1)])
    driver.ledger.commit()


def evicted(driver: Driver) -> list[bytes]:
    """In order."""
    return [key for event in driver.all_of(e.ChunksEvicted) for key in event.keys]


def evicting(driver: Driver, *keys: bytes) -> list[SequencedEvent]:
    """The log, with these chunks evicted by its last eviction in the place of the right ones."""
    events = driver.events()
    place = max(place for place, (_, event) in enumerate(events) if isinstance(event, e.ChunksEvicted))
    sequence, event = events[place]
    events[place] = sequence, msgspec.structs.replace(event, keys=keys)
    return events


def named(driver: Driver, *keys: bytes) -> list[str]:
    """What EVICTION_ORDER says where these chunks are evicted instead."""
    violations = driver.audited(evicting(driver, *keys)).violations
    return [violation.detail for violation in violations if violation.rule == "EVICTION_ORDER"]


def before(key: bytes, older: bytes) -> str:
    """What it says of a chunk that was evicted before its turn."""
    return f"chunk {key.hex()} was evicted, though chunk {older.hex()} was used before it and could have been evicted"


@pytest.mark.parametrize("story", USES, ids=lambda story: story.__name__)
def test_what_was_used_leaves_after_what_was_not(story: Story) -> None:
    """By the order of their saves alone, the used chunks would be the older ones."""
    driver = pressed(story, keep_for_preempted=USES[story])
    assert evicted(driver) == [*OTHER]
    assert driver.audited().num_violations.keys() <= {"RECORDED"}  # a withheld answer is one
    assert named(driver, USED[1]) == [before(USED[1], OTHER[0])]


def test_a_pool_that_forgets_a_use_is_named_although_the_projection_that_verifies_forgets_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log was called sound: one mistake evicted the chunk and found nothing wrong with that."""
    monkeypatch.setattr("kvledger.lifecycle.projections.forest.Forest.use", lambda *_: None)
    driver = pressed(a_request_ends)
    assert evicted(driver) == [USED[1]]
    audit = driver.audited()
    assert not audit.divergences
    assert [violation.detail for violation in audit.violations] == [before(USED[1], OTHER[0])]


@pytest.mark.parametrize("ok", [True, False])
def test_the_end_of_a_save_uses_all_chunks_before_it(*, ok: bool) -> None:
    """A failed one too: its request was computing on top of them."""

    def story(driver: Driver) -> None:
        driver.arrive("reader", 49, (*USED, *keys_of("more", 1)))
        driver.lookup("reader", 32, 49)
        driver.allocate("reader", (1, 2, 3, 4))
        driver.step(("reader", 32, 17, 49))
        driver.step(settled=[("reader", 0, 48)])
        (save,) = driver.projections.jobs
        save_other(driver)
        driver.report(save.job_id, ok=ok)

    driver = pressed(story, num_slots=4, async_saves=True)
    assert len(driver.all_of(e.SaveFailed)) == (not ok)
    assert evicted(driver) == [*OTHER]
    assert driver.audited().violations == []
    newest_first = USED[1] if not ok else keys_of("more", 1)[0]
    assert named(driver, newest_first) == [before(newest_first, OTHER[0])]


def test_the_end_of_a_failed_load_uses_what_is_before_the_chunks_that_it_taints() -> None:
    """These are gone."""

    def story(driver: Driver) -> None:
        load = admit_load(driver, num_computed=16)
        save_other(driver)
        driver.report(load, ok=False)

    driver = pressed(story)
    assert [key for event in driver.all_of(e.ChunksTainted) for key in event.keys] == [USED[1]]
    assert evicted(driver) == [*OTHER]
    assert driver.audited().violations == []
    assert named(driver, USED[0]) == [before(USED[0], OTHER[0])]


def test_the_end_of_a_tails_save_uses_the_chunks_before_it() -> None:
    """The preemption itself was before the other chunk was saved."""

    def story(driver: Driver) -> None:
        driver.start("reader", USED, 41, (1, 2, 3), num_computed=32)
        driver.preempt("reader", 41)
        (tail,) = driver.projections.jobs
        save_other(driver)
        driver.report(tail.job_id)

    driver = pressed(story, num_slots=4, save_tails=True, keep_for_preempted=False)
    assert driver.all_of(e.TailSaveIssued)
    assert evicted(driver) == [*OTHER]
    assert driver.audited().violations == []
    assert named(driver, USED[1]) == [before(USED[1], OTHER[0])]


def test_a_lookup_that_promises_nothing_uses_nothing() -> None:
    """It may be about chunks that vLLM has by itself."""

    def story(driver: Driver) -> None:
        save_other(driver)
        driver.arrive("reader", 33, USED)
        driver.lookup("reader", 32, 33)

    driver = pressed(story)
    assert evicted(driver) == [USED[1]]
    assert driver.audited().violations == []
    assert named(driver, *OTHER) == [before(OTHER[0], USED[1])]


# --- what has to stay ------------------------------------------------------------------------------------------------


def a_load_reads_what_is_after_it(driver: Driver) -> None:
    """The first chunk comes from vLLM's own cache."""
    admit_load(driver, num_computed=16)


def a_save_brings_what_is_after_it(driver: Driver) -> None:
    """What is computed on top of both is being saved."""
    driver.start("reader", (*USED, *keys_of("more", 1)), 49, (1, 2, 3, 4), num_computed=32)
    driver.step(settled=[("reader", 0, 48)])


def a_tail_is_being_saved(driver: Driver) -> None:
    """It begins where the chunks end."""
    driver.start("reader", USED, 41, (1, 2, 3), num_computed=32)
    driver.preempt("reader", 41)


@pytest.mark.parametrize(
    "story", [a_load_reads_what_is_after_it, a_save_brings_what_is_after_it, a_tail_is_being_saved]
)
def test_what_is_before_the_chunks_of_a_copy_in_flight_stays(story: Story) -> None:
    """It is older than what is evicted, and no rule but this one knows that it has to stay."""

    def and_other(driver: Driver) -> None:
        story(driver)
        save_other(driver)

    driver = pressed(
        and_other,
        num_slots=3 + (story is not a_load_reads_what_is_after_it),
        async_saves=story is a_save_brings_what_is_after_it,
        save_tails=story is a_tail_is_being_saved,
        keep_for_preempted=False,
    )
    assert evicted(driver) == [*OTHER]
    assert driver.audited().violations == []
    (job, *_) = driver.projections.jobs
    kind = "load" if story is a_load_reads_what_is_after_it else "save"
    (detail,) = named(driver, USED[0])
    assert detail == f"chunk {USED[0].hex()} was evicted, though {kind} {job.job_id} in flight copies chunks after it"


def test_what_is_promised_or_waited_for_is_left_to_the_rules_about_it() -> None:
    """It is older and stays, without a word of this rule; nor does it say anything if such a chunk is evicted."""

    def promise(driver: Driver) -> None:
        driver.arrive("reader", 33, USED)
        driver.lookup("reader", 0, 33)
        save_other(driver)

    def wait(driver: Driver) -> None:
        start_reader(driver)
        driver.preempt("reader", 32)
        save_other(driver)

    for story, rule in ((promise, "HIT_PINNED"), (wait, "WAITING_KEPT")):
        driver = pressed(story)
        assert evicted(driver) == [*OTHER]
        assert driver.audited().violations == []
        assert named(driver, USED[0]) == []
        assert driver.audited(evicting(driver, USED[0])).num_violations[rule] == 1


def save_after_the_oldest(num_settled_chunks: int) -> Driver:
    """A request whose first chunks are the oldest in the pool saves the next one."""
    driver = Driver(chunk_size=16, num_slots=3, save_tails=False)
    driver.save_prefix("first", USED)
    keys = (*USED[:num_settled_chunks], *keys_of("more", 1))
    num_computed = 16 * num_settled_chunks
    driver.start("reader", keys, num_computed + 17, (1, 2, 3, 4), num_computed=num_computed)
    save_other(driver)
    driver.step(settled=[("reader", 0, num_computed + 16)])
    driver.ledger.commit()
    return driver


def test_a_request_that_saves_evicts_nothing_of_its_own_beginning() -> None:
    """What is saved behind it would be of no use."""
    driver = save_after_the_oldest(2)
    assert evicted(driver) == [*OTHER]
    assert driver.audited().violations == []
    for key in USED:
        assert named(driver, key) == [f"chunk {key.hex()} was evicted, though the request that saves begins with it"]


def test_another_continuation_of_its_own_beginning_may_leave() -> None:
    """The second chunk of `USED` is none of this request's."""
    driver = save_after_the_oldest(1)
    assert evicted(driver) == [USED[1]]
    assert driver.audited().violations == []
    assert named(driver, *OTHER) == [before(OTHER[0], USED[1])]


# --- one prefix ------------------------------------------------------------------------------------------------------


def test_of_a_prefix_the_last_chunk_leaves_first() -> None:
    """Without its beginning it is worth nothing."""
    driver = pressed(save_other, num_evicted=2)
    assert evicted(driver) == [USED[1], USED[0]]
    assert driver.audited().violations == []
    assert named(driver, USED[0], USED[1]) == [before(USED[0], USED[1])]
    assert named(driver, USED[0]) == [before(USED[0], USED[1])]
    assert named(driver, USED[1], OTHER[0]) == [before(OTHER[0], USED[0])]


def test_the_use_of_a_shared_beginning_leaves_what_is_after_it_as_old_as_it_was() -> None:
    """Only the prefix that is used gets younger."""

    def story(driver: Driver) -> None:
        save_other(driver)
        driver.start("reader", (USED[0], *keys_of("unsaved", 1)), 17, (1, 2), num_computed=16)
        driver.finish("reader", 17, 18)

    driver = pressed(story, num_evicted=2)
    assert evicted(driver) == [USED[1], *OTHER]
    assert driver.audited().violations == []
    assert named(driver, USED[1], USED[0]) == [before(USED[0], OTHER[0])]
    assert named(driver, OTHER[0], USED[1]) == [before(OTHER[0], USED[1])]


def test_a_save_uses_the_prefix_that_it_was_issued_for_although_a_next_turn_has_replaced_its_tokens() -> None:
    """The life has other keys when the save completes."""
    driver = Driver(chunk_size=16, num_slots=3, save_tails=False, async_saves=True)
    driver.start("session", USED, 33, (1, 2, 3))
    driver.step(settled=[("session", 0, 32)])
    (save,) = driver.projections.jobs
    driver.continue_session("session", 16, 40)
    driver.keys("session", 1, keys_of("next turn", 1, 1))
    save_other(driver)
    driver.report(save.job_id)
    press(driver, 1)
    assert evicted(driver) == [*OTHER]
    assert driver.audited().violations == []
    assert named(driver, USED[1]) == [before(USED[1], OTHER[0])]


# --- an audit from the middle ----------------------------------------------------------------------------------------


def begun(driver: Driver, cut: int, events: Sequence[SequencedEvent]) -> Audit:
    """The audit of what comes after event number `cut`."""
    return driver.audited(events[cut:], start=driver.folded(cut).start())


@pytest.mark.parametrize("story", USES, ids=lambda story: story.__name__)
def test_the_order_is_taken_over_where_an_audit_begins(story: Story) -> None:
    """After the use, of which its part of the log does not tell, and in the middle of what leads to it."""
    driver = Driver(chunk_size=16, num_slots=3, save_tails=False, async_load_tokens=0, keep_for_preempted=USES[story])
    driver.save_prefix("first", USED)
    before = len(driver.observed)
    story(driver)
    after = len(driver.observed)
    press(driver, 2)
    for cut in (before, after):
        for keys in ([OTHER[0], USED[1]], [USED[1], OTHER[0]]):
            events = evicting(driver, *keys)
            details = [each.detail for each in begun(driver, cut, events).violations]
            found = [detail for detail in details if " was used before it " in detail]
            assert found == [detail for detail in named(driver, *keys) if " was used before it " in detail]
            assert bool(found) is (keys[0] in USED)


# --- where it says nothing -------------------------------------------------------------------------------------------


def test_an_extension_that_says_what_is_evicted_last_takes_the_rule_away() -> None:
    """What it kept is not in the log."""

    class Keeping(Extension):
        name = "keeping"

        def keeps(self, _projections: Any, key: bytes) -> bool:
            return key in USED

    core = Core.standard().extended(Keeping())
    driver = pressed(save_other, core=core)
    assert evicted(driver) == [*OTHER]
    assert driver.audited(core=core).violations == []
    assert core.not_checked["EVICTION_ORDER"] == "extension keeping decides what is evicted last"
    assert driver.audited().num_violations == {"EVICTION_ORDER": 1}
