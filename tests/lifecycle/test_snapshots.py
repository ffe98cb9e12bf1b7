"""Snapshot + tail equals full replay: the same state, and the same decisions of everything that comes."""

from __future__ import annotations

from typing import Any

import pytest
from lifecycle_driver import Driver, MemorySink, play_seed

from kvledger.lifecycle import Core, Ledger, LedgerConfiguration
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.snapshots import SnapshotError, capture, restore, state_fingerprint

GEOMETRIES = [(8, 16), (16, 16), (32, 16)]


def _walk(seed: int, chunk_size: int, block_size: int, num_steps: int = 60) -> Driver:
    return play_seed(seed, num_steps, chunk_size=chunk_size, block_size=block_size)


def _restored(projections: Projections) -> Projections:
    return restore(Core.standard(), capture(projections), projections.configuration)


def test_what_follows_from_the_state_is_made_anew() -> None:
    """Every attribute of a restored projection is as in the one that lived, but for its state and the last report."""
    lived = _walk(3, 8, 16, 120).projections
    restored = _restored(lived)
    for name, projection in lived.named().items():
        for key, value in vars(projection).items():
            if isinstance(value, dict | int | str) and (name, key) != ("owed", "reported"):
                assert getattr(restored.named()[name], key) == value, f"{name}.{key}"


@pytest.mark.parametrize(("chunk_size", "block_size"), GEOMETRIES)
@pytest.mark.parametrize("seed", range(4))
def test_snapshot_and_tail_fold_to_the_same_state_as_the_whole_log(seed: int, chunk_size: int, block_size: int) -> None:
    """Cut at every 40th event: what is restored is equal there, and still after every event that follows."""
    print(f"seed {seed}, chunk_size {chunk_size}, block_size {block_size}")
    driver = _walk(seed, chunk_size, block_size)
    whole = Core.standard().new_projections(driver.configuration)
    continued: list[Projections] = []
    for sequence, event in enumerate(driver.observed, start=1):
        whole.fold(event, sequence)
        for projections in continued:
            projections.fold(event, sequence)
        if sequence % 40 == 0:
            expected = whole.snapshot()
            assert [projections.snapshot() == expected for projections in continued] == [True] * len(continued)
            continued = [*continued[-6:], _restored(whole)]
            assert continued[-1].snapshot() == expected
    assert all(capture(projections) == capture(whole) for projections in continued)


@pytest.mark.parametrize(("chunk_size", "block_size"), GEOMETRIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_restored_ledger_decides_as_the_one_that_lived(seed: int, chunk_size: int, block_size: int) -> None:
    """From cuts all over the log: the observations that follow lead to exactly the recorded decisions."""
    print(f"seed {seed}, chunk_size {chunk_size}, block_size {block_size}")
    driver = _walk(seed, chunk_size, block_size)
    live = Ledger(Core.standard(), driver.configuration, MemorySink())
    others: list[Any] = []
    for number, event in enumerate(event for event in driver.observed if not event.is_decision):
        decided = live.observe(event)
        for other in others:
            assert other.observe(event) == decided
        if number % 30 == 0:
            other = Ledger(
                Core.standard(),
                driver.configuration,
                MemorySink(),
                projections=_restored(live.projections),
                next_sequence=live.next_sequence,
            )
            others = [*others[-5:], other]
    assert others


def test_bytes_that_are_no_state_are_refused() -> None:
    """Cut anywhere, with a wrong type anywhere: an error that says so, never a state that is half of one."""
    projections = _walk(1, 8, 16, 30).projections
    state, configuration = capture(projections), projections.configuration
    for num_bytes in range(0, len(state), 7):
        with pytest.raises(SnapshotError, match="cannot be used"):
            restore(Core.standard(), state[:num_bytes], configuration)
    with pytest.raises(SnapshotError):
        restore(Core.standard(), state.replace(b"next_job_id", b"next_job_xx"), configuration)


def test_the_fingerprint_tells_what_a_state_means() -> None:
    """Another configuration, other handlers: another fingerprint; the same again: the same."""
    configuration = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=4)
    again = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=4)
    other = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=5)
    assert state_fingerprint(Core.standard(), configuration) == state_fingerprint(Core.standard(), again)
    assert state_fingerprint(Core.standard(), configuration) != state_fingerprint(Core.standard(), other)
