"""A configuration that cannot work is refused, with the figures and what to do."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvledger.lifecycle import ConfigurationError, LedgerConfiguration


def configuration(**changes: Any) -> LedgerConfiguration:
    """A working one, changed."""
    return LedgerConfiguration(**{"block_size": 16, "chunk_size": 256, "num_slots": 64, **changes})


@pytest.mark.parametrize(("chunk_size", "pages"), [(8, 1), (16, 1), (32, 2), (256, 16)])
def test_a_chunk_needs_as_many_pages_as_it_covers_blocks_and_at_least_one(chunk_size: int, pages: int) -> None:
    """A chunk that ends inside a block has a page all the same."""
    assert configuration(chunk_size=chunk_size).pages_per_chunk == pages


@pytest.mark.parametrize(("chunk_size", "block_size"), [(24, 16), (16, 24), (100, 16), (3, 2)])
def test_sizes_that_do_not_divide_one_another_are_refused(chunk_size: int, block_size: int) -> None:
    """Both figures are named, and the remedy: a multiple or a divisor."""
    with pytest.raises(ConfigurationError, match=rf"{chunk_size}.*{block_size}.*multiple or a divisor of {block_size}"):
        configuration(chunk_size=chunk_size, block_size=block_size)


@pytest.mark.parametrize("changes", [{"block_size": 0}, {"chunk_size": 0}, {"block_size": -16}, {"chunk_size": -1}])
def test_sizes_below_one_are_refused(changes: dict[str, int]) -> None:
    """The figure is named."""
    with pytest.raises(ConfigurationError, match=str(*changes.values())):
        configuration(**changes)


@pytest.mark.parametrize("num_slots", [-1, 0, 15])
def test_a_pool_that_cannot_hold_one_chunk_is_refused(num_slots: int) -> None:
    """Slots, chunk size and need are named, and the two remedies."""
    message = rf"{num_slots} slots.*256 tokens needs 16 slots; raise host_bytes or lower chunk_size"
    with pytest.raises(ConfigurationError, match=message):
        configuration(num_slots=num_slots)


def test_a_pool_of_exactly_one_chunk_will_do() -> None:
    """Small, and not wrong."""
    assert configuration(num_slots=16).num_slots == 16


@pytest.mark.parametrize("name", ["num_ranks", "max_silent_steps"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_below_one_are_refused(name: str, value: int) -> None:
    """No rank would make every report complete; no step of patience would fail every job."""
    with pytest.raises(ConfigurationError, match=rf"{name}.*{value}"):
        configuration(**{name: value})


def test_a_configuration_cannot_be_changed() -> None:
    """It stands in the log's header; a change would make the log mean something else."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        configuration().chunk_size = 8  # type: ignore[misc]
