"""docs/reasons.md names what the accounts know, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from kvledger.adapters.tools.reasons import OfferFate, Reason

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reasons.md"


def test_every_reason_has_a_row_of_its_own() -> None:
    """In the order of the source, so that both are read together."""
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [reason.value for reason in Reason]


def test_every_fate_of_an_offer_is_explained() -> None:
    """`stats --json` prints these words."""
    text = PAGE.read_text()
    assert [fate.value for fate in OfferFate if f"`{fate.value}`" not in text] == []
