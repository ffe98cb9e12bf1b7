"""The survey says of each seed what became of its world, and whose a failure is."""

from __future__ import annotations

import pytest

from sim.survey import survey
from sim.versions import mended_in_0_33

pytestmark = pytest.mark.scheduler


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param("offloading", "TABLE_EQ", marks=mended_in_0_33), ("simple-late", "well")]
)
def test_sessions_show_who_takes_blocks_of_another_turn(name: str, kind: str) -> None:
    """A defect of vLLM 0.32's OffloadingConnector, see `test_session_defect.py`; the other one has none."""
    found = survey(name, range(11, 13), frozenset(), is_hybrid=False, in_sessions=True)
    assert [(seed, lived.kind, plain) for seed, lived, plain in found] == [(11, kind, ""), (12, kind, "")]


def test_what_is_raised_is_raised_without_a_recorder_too() -> None:
    """Told with its place: a prompt of which a part is computed is kept as if it were whole."""
    ((_, lived, plain),) = survey("example", range(12, 13), frozenset(), is_hybrid=False, in_sessions=True)
    assert lived.raised.startswith("CorruptKV at hashed_model.py")
    assert plain == lived.raised
