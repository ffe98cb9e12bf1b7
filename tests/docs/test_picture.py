"""The README's pictures and sample pages are drawn from logs."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from processes import finished
from stored_logs import tell_story, write_log

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def test_a_picture_tells_what_the_log_holds(tmp_path: Path) -> None:
    """The request that was preempted, what came back, and that it finished with nothing computed again."""
    story = tell_story(clock_rate=1700)
    log = write_log(tmp_path / "log", story.observed, story.configuration)
    drawn = finished([sys.executable, PICTURES / "timeline.py", log])
    words = " ".join(ET.fromstring(drawn.stdout).itertext())  # noqa: S314 -- made right here
    assert "Request chat is preempted and goes on: nothing is computed a second time" in words
    assert "the KV of 64 tokens comes back" in words


def test_the_moving_picture_shows_what_the_commands_print() -> None:
    """They run in a terminal of their own."""
    drawn = finished([sys.executable, PICTURES / "terminal.py"])
    words = "".join(ET.fromstring(drawn.stdout).itertext())  # noqa: S314 -- made right here
    for command in ("python docs/examples/cached_answer.py incident", "kvledger verify", "kvledger why incident cmpl"):
        assert f"$ {command}" in words
    assert "LOOKUP_PURE at event 17" in words
    assert "admitted with 700 tokens" in words
    assert "not_delivered" in words


@pytest.mark.parametrize("name", ["cached-answer", "preemptions"])
def test_a_sample_page_is_one_that_export_writes_today(name: str) -> None:
    """If it fails, run `docs/pictures/samples.py`."""
    page = (PICTURES.parent / "samples" / f"{name}.html").read_text()
    for resource in ("page.js", "page.css"):
        assert resources.files("kvledger.adapters.tools.export").joinpath(resource).read_text("utf-8") in page
    assert "/tmp/" not in page  # noqa: S108 -- no path is opened
