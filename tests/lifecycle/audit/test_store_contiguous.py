"""STORE_CONTIGUOUS is silent where the log says why a chunk is missing, also if it goes within the same step."""

from __future__ import annotations

from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.copies import Copy


def rules_broken_by(driver: Driver) -> set[str]:
    """What the audit finds in what the driver did."""
    audit = driver.audited()
    assert not audit.divergences
    return set(audit.num_violations)


def pass_over_as_it_is_given_up(driver: Driver, silent: Copy, keys: tuple[bytes, ...]) -> None:
    """The first chunk of "b" settles, and is not saved because it is there, in the step that gives the job up."""
    driver.arrive("b", 49, keys)
    driver.lookup("b", 16, 49)
    driver.allocate("b", (1, 3, 4, 5))
    while driver.projections.tracker.num_steps < silent.asked_step + 2:
        driver.step()
    driver.step(("b", 16, 33, 49), settled=[("b", 0, 16)])


def test_a_chunk_counts_as_saved_where_another_requests_save_is_given_up_in_the_same_step() -> None:
    """Worlds 1313 and 5315: a request is passed over because a save is under way, which the same step gives up."""
    driver = Driver(chunk_size=16, num_slots=8, max_silent_steps=2)
    keys = keys_of("a", 3)
    driver.start("a", keys[:1], 17, (1, 2))
    driver.step(("a", 17, 1, 18), settled=[("a", 0, 17)])
    for _ in range(3):
        driver.step()
    (silent,) = driver.projections.jobs
    assert silent.work == "overdue"
    pass_over_as_it_is_given_up(driver, silent, keys)
    assert len(driver.all_of(e.SaveFailed)) == 1
    driver.step(("b", 49, 1, 50), settled=[("b", 1, 49)])
    assert [save.chunks for save in driver.all_of(e.SaveIssued)] == [(0,), (1, 2)]
    assert rules_broken_by(driver) == {"RECORDED"}  # nobody answered for the copy


def test_a_chunk_counts_as_saved_where_it_is_tainted_in_the_same_step() -> None:
    """World 5370: what a request was passed over for had been read from by a load that is given up in the same step."""
    driver = Driver(chunk_size=16, num_slots=8, max_silent_steps=2)
    keys = keys_of("a", 3)
    driver.save_prefix("a", keys[:1])
    driver.arrive("c", 17, keys[:1])
    driver.lookup("c", 0, 17)
    driver.allocate("c", (8, 9), 16)
    driver.step()
    (load,) = driver.projections.jobs
    while load.work != "overdue":
        driver.step()
    pass_over_as_it_is_given_up(driver, load, keys)
    assert len(driver.all_of(e.ChunksTainted)) == 1
    driver.step(("b", 49, 1, 50), settled=[("b", 1, 49)])
    assert driver.all_of(e.SaveIssued)[-1].chunks == (1, 2)
    assert rules_broken_by(driver) == {"RECORDED"}  # nobody answered for the copy
