"""The README's picture is drawn from a log."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

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
