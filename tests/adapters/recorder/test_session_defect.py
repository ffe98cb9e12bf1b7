"""A defect of vLLM 0.32's OffloadingConnector, unmodified, on vLLM's scheduler: the recorder's log names it.

In a streaming session it appends the block table of the next turn to the one before, and stores chunks of the second
turn from blocks of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.recorded import audited
from sim.versions import mended_in_0_33

pytestmark = pytest.mark.scheduler


def hold_session(engine: Any, *, is_continued: bool) -> None:
    """One turn, then somebody else, then another turn of the session or of nobody."""
    engine.add("session", range(45), 13, resumable=True)
    for _ in range(14):
        engine.step()
    engine.add("other", range(1000, 1100), 20)
    engine.step()
    engine.add("session" if is_continued else "nobody", range(300, 340), 10, resumable=is_continued)
    for _ in range(16):
        engine.step()


@mended_in_0_33
def test_a_session_of_offloading_connector_breaks_table_eq(record: Callable[..., tuple[Any, Any]]) -> None:
    """Named with the copy, the block it takes, and the place; nothing else is named."""
    engine, recording = record()
    hold_session(engine, is_continued=True)
    audit = audited(recording)
    assert {violation.rule for violation in audit.violations} == {"TABLE_EQ"}
    assert {violation.request_id for violation in audit.violations} == {"session"}
    first = audit.violations[0]
    assert "takes block" in first.detail
    assert "of the request's block table, but the table does not have this id after that position" in first.detail
    assert list(audit.divergences) == []


def test_without_a_second_turn_nothing_is_named(record: Callable[..., tuple[Any, Any]]) -> None:
    """The same tokens from somebody else."""
    engine, recording = record()
    hold_session(engine, is_continued=False)
    assert audited(recording).is_sound
