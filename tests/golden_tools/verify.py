"""What `kvledger verify` says of the story `verify.txt`, in which five things are wrong.

The ledger noticed three of them and recorded each, so the rule RECORDED names these three again. Three of the five
concern the first life of `a`, so they are one finding; the fourth begins with its second life. When the fifth happens
`a` has no life.
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
    ("SETTLED_EXACT", 13, 0, "the step begins at 73 tokens, but the steps before it ended at 72", ()),
    # After one preemption.
    ("LEGAL_TRANSITION", 24, 1, _LOOKED_UP, ()),
    ("RECORDED", 25, 1, f"LEGAL_TRANSITION: {_LOOKED_UP}", (24,)),
    # The next turn is another generation. Of 40 tokens one chunk of 32 is whole.
    ("KEY_IDENTITY", 31, 2, "the event has keys of chunks from 2 on, but chunk 1 has no key", ()),
    # The life that begins.
    ("LEGAL_TRANSITION", 34, 0, _ARRIVED, ()),
    ("RECORDED", 35, 0, f"LEGAL_TRANSITION: {_ARRIVED}", (34,)),
    # It has been released, so no generation is known.
    ("LEGAL_TRANSITION", 43, None, _PREEMPTED, ()),
    ("RECORDED", 44, None, f"LEGAL_TRANSITION: {_PREEMPTED}", (43,)),
]

_FIRST_OF_FINDING = (13, 34, 43)
_BROKEN = {rule for rule, *_ in VIOLATIONS}


def _lines() -> list[str]:
    lines = []
    whose_first = ""
    for rule, event, generation, detail, _ in VIOLATIONS:
        whose = ", request a" + ("" if generation is None else f", generation {generation}")
        if event in _FIRST_OF_FINDING:
            whose_first = whose
            lines += [f"{rule} at event {event}{whose}", detail]
        else:
            # The request is named again where its generation is another one.
            lines.append(f"then {rule} at event {event}{'' if whose == whose_first else whose}: {detail}")
    return lines


TEXT = [
    "end closed; no request was open",
    f"rules {len(RULES)} checked over 44 events, broken: {', '.join(rule for rule in RULES if rule in _BROKEN)}",
    "decisions repeated, all equal",
    "findings 3",
    *_lines(),
    "verdict rule broken",
]
_FINDINGS = [max(first for first in _FIRST_OF_FINDING if first <= event) for _, event, *_ in VIOLATIONS]


def _violations(log: Path) -> list[tuple[object, ...]]:
    names = ("rule", "sequence", "generation", "detail", "evidence")
    return [picked(record, names) for record in records("violation", "verify", log, "--jobs", 1)]


def _findings(log: Path) -> list[object]:
    output = records("violation", "verify", log, "--jobs", 1)
    (verdict,) = records("verdict", "verify", log, "--jobs", 1)
    return [verdict["num_findings"], *(record["finding"] for record in output)]


def _text(log: Path) -> list[str]:
    """Without the fields of events, and what is about bytes."""
    left_out = ("log ", "written by ", "events ", "chain ", "not checked ")
    lines = printed("verify", log, "--jobs", 1)
    return [line for line in lines if not line.startswith(left_out) and not line[:1].isdigit()]


GOLDEN = {
    "verify": Golden("verify", STORY, _text, TEXT),
    "verify, violations for programs": Golden("verify", STORY, _violations, VIOLATIONS),
    "verify, findings for programs": Golden("verify", STORY, _findings, [3, *_FINDINGS]),
}
