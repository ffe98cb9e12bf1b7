"""What `kvledger verify` says of the story `verify.txt`, in which five things are wrong.

The ledger noticed three of them and recorded each, so the rule RECORDED names these three again.
"""

from __future__ import annotations

from pathlib import Path

from golden_tools.golden import Golden, picked, printed, records
from golden_tools.story import story
from kvledger.lifecycle.audit.rules import RULES

STORY = story("verify")

_LOOKED_UP = "lookup.requested happened to a request in state recovering, blocks loading"
_ARRIVED = "request.arrived happened to a request in state running"
_PREEMPTED = "request.preempted happened to an unknown request"

VIOLATIONS = [
    # Rule, event, generation, what is wrong, earlier events that show it.
    ("SETTLED_EXACT", 13, 0, "the step begins at 73 tokens, those before it ended at 72", ()),
    # After one preemption.
    ("LEGAL_TRANSITION", 24, 1, _LOOKED_UP, ()),
    ("RECORDED", 25, 1, f"LEGAL_TRANSITION: {_LOOKED_UP}", (24,)),
    # The next turn is another generation. Of 40 tokens one chunk of 32 is whole.
    ("KEY_IDENTITY", 31, 2, "keys of chunks from 2 on, but 1 are known: what do they follow?", ()),
    # The life that begins.
    ("LEGAL_TRANSITION", 34, 0, _ARRIVED, ()),
    ("RECORDED", 35, 0, f"LEGAL_TRANSITION: {_ARRIVED}", (34,)),
    # It has been released, so no generation is known.
    ("LEGAL_TRANSITION", 43, None, _PREEMPTED, ()),
    ("RECORDED", 44, None, f"LEGAL_TRANSITION: {_PREEMPTED}", (43,)),
]

TEXT = [
    "end closed; no request was open",
    f"rules {len(RULES)} checked over 44 events, 4 broken",
    *(
        line
        for rule, event, generation, detail, _ in VIOLATIONS
        for line in (
            f"{rule} at event {event}, request a" + ("" if generation is None else f", generation {generation}"),
            detail,
        )
    ),
    "decisions made again, all equal",
    "verdict rule broken",
]


def _violations(log: Path) -> list[tuple[object, ...]]:
    names = ("rule", "sequence", "generation", "detail", "evidence")
    return [picked(record, names) for record in records("violation", "verify", log, "--jobs", 1)]


def _text(log: Path) -> list[str]:
    """Without the fields of events, and what is about bytes."""
    left_out = ("log ", "written by ", "events ", "chain ", "not checked ")
    lines = printed("verify", log, "--jobs", 1)
    return [line for line in lines if not line.startswith(left_out) and not line[:1].isdigit()]


GOLDEN = {
    "verify": Golden("verify", STORY, _text, TEXT),
    "verify, violations for programs": Golden("verify", STORY, _violations, VIOLATIONS),
}
