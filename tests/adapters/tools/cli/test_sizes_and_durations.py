"""Sizes and durations mean on every command line what they mean in the connector's settings."""

from __future__ import annotations

import pydantic
import pytest

from kvledger.adapters.tools.cli.options import num_bytes, seconds


@pytest.mark.parametrize("text", ["1048576", "512B", "2G", "2.5GiB", "500 MiB", "64kb", "1.5T", "3TiB"])
def test_a_size_is_what_the_connectors_settings_take_it_for(text: str) -> None:
    """Only KiB, MiB, GiB and TiB are powers of 1024."""
    assert num_bytes(text) == int(pydantic.TypeAdapter(pydantic.ByteSize).validate_python(text))


def test_durations_may_have_parts() -> None:
    """As in `--since`."""
    assert [seconds(text) for text in ("90s", "1h30m", "30d", "4w")] == [90, 5400, 2_592_000, 2_419_200]


@pytest.mark.parametrize("text", ["", "much", "2 GigaBytes", "-1", "GiB"])
def test_what_is_no_size_is_named(text: str) -> None:
    """With how to write one."""
    with pytest.raises(ValueError, match="is not a size; give"):
        num_bytes(text)


@pytest.mark.parametrize("text", ["", "soon", "30", "1h 30m"])
def test_what_is_no_duration_is_named(text: str) -> None:
    """With how to write one."""
    with pytest.raises(ValueError, match="is not a duration; give"):
        seconds(text)
