"""What `Log.verify` says: the verdict on each log, what is wrong, and what was not judged."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvledger.adapters.tools.api.errors import LogUnreadable, public_errors
from kvledger.adapters.tools.api.reading import Source
from kvledger.adapters.tools.exit_codes import ExitCode, gravest
from kvledger.adapters.tools.logs.findings import Finding as Cause
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.verification import Findings, Verification
from kvledger.adapters.tools.logs.visible import visible
from kvledger.lifecycle.events import Event


class Verdict(enum.StrEnum):
    """The verdict on a log. On several logs it is the gravest one."""

    SOUND = "sound"
    """As far as the log goes."""
    RULE_BROKEN = "rule_broken"
    DAMAGED = "damaged"
    """Damaged, or unreadable."""
    DIVERGED = "diverged"
    """Today's code decides otherwise than the log says, or cannot fold it."""
    END_MISSING = "end_missing"
    """What is there is sound, and events are known to be missing at the end."""
    NOTHING_CHECKED = "nothing_checked"
    """The log holds no event, or lacks those before, or has only a worker's calls."""
    EXTENSION_STOPPED = "extension_stopped"
    """Sound, but the rules of an extension that was stopped were not checked to the end."""
    NOT_VERIFIED = "not_verified"
    """With `lenient`: events were skipped."""


@attrs.frozen(kw_only=True)
class Violation:
    """A rule that the log breaks."""

    start: str
    rank: int | None
    """The worker whose log it is; None: the scheduler's."""
    sequence: int
    rule: str
    """`docs/invariants.md` has all rules."""
    request_id: str
    """Empty if it concerns no single request."""
    generation: int | None
    detail: str
    evidence: tuple[int, ...]
    """Sequence numbers of earlier events that show the breach together with this one."""
    time_ns: int
    ordinal: int | None
    """Of the life that it concerns; None: not known, or it concerns no single request."""
    cause: int
    """Sequence number of the observation at which the rule is broken."""
    finding: int
    """Sequence number of the first event of its `Finding`."""

    def __str__(self) -> str:
        of = f", request {self.request_id}" if self.request_id else ""
        return visible(f"{self.rule} at event {self.sequence}{of}: {self.detail}")


@attrs.frozen(kw_only=True)
class Divergence:
    """Where today's code decides otherwise than the log."""

    start: str
    rank: int | None
    sequence: int
    recorded: Event | None
    """What the log has; None: nothing."""
    decided: Event | None
    """What is decided today; None: nothing."""
    finding: int
    """Sequence number of the first event of its `Finding`."""
    error: str = ""
    """Why `recorded` cannot be folded at all; empty: it can."""


@attrs.frozen(kw_only=True)
class Damage:
    """One place where a log is not what was written."""

    start: str
    rank: int | None
    sequence: int | None
    """The first event concerned; None: not known."""
    kind: str
    """`docs/log-format.md` has the kinds."""
    segment: str
    offset: int
    """Bytes from the beginning of the segment."""
    num_bytes: int
    """Bytes from there on that cannot be used."""
    detail: str


@attrs.frozen(kw_only=True)
class Finding:
    """One cause of trouble, as far as a log can tell. `Report.findings` counts what `kvledger verify` counts."""

    start: str
    rank: int | None
    sequence: int | None
    """The first event; None: not known."""
    request_id: str
    """Empty if it concerns no single request."""
    text: str
    """The first breach in words: what, where, how often."""
    follows: tuple[str, ...]
    """The breaches that follow from it, in words."""

    def __str__(self) -> str:
        return "\n  then ".join(map(visible, (self.text, *self.follows)))


@attrs.frozen(kw_only=True)
class LogReport:
    """What is wrong with one log."""

    start: str
    rank: int | None
    path: Path
    verdict: Verdict
    text: str
    """The verdict in words, with the part that it covers if that is not the whole log."""
    num_events: int
    first_event_checked: int | None
    last_event_checked: int | None
    """None if nothing could be checked, like `first_event_checked`."""
    findings: tuple[Finding, ...]
    """What is wrong, one for each cause."""
    violations: tuple[Violation, ...]
    """At most 1,000, the first ones."""
    num_violations: Mapping[str, int]
    """Rule → how often it is broken."""
    divergences: tuple[Divergence, ...]
    """At most 1,000, the first ones."""
    num_divergences: int
    damage: tuple[Damage, ...]
    not_judged: Mapping[str, str]
    """Rule → why it was not checked, or not to the end."""
    remarks: tuple[str, ...]
    """What else the reader should know."""
    ended: str
    """How the log ended: `closed`, `cut_off`, `open` (a process is writing it) or `unknown`."""
    head_hash: str
    """Chain hash of the last frame. Noted elsewhere, it shows later whether the log was rewritten."""

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.text}"]
        for finding in self.findings:
            lines += [finding.text, *(f"  then {text}" for text in finding.follows)]
        lines += self.remarks
        return visible(lines[0]) + "".join(f"\n  {visible(line)}" for line in lines[1:])


@attrs.frozen
class Report:
    """What is wrong with all logs that were opened."""

    logs: tuple[LogReport, ...]
    """Start by start, the oldest first; of each start the scheduler's log, then those of its workers."""
    unreadable: tuple[LogUnreadable, ...] = ()
    """Why logs in the same directory could not be opened."""

    @property
    def verdict(self) -> Verdict:
        """The gravest one."""
        codes = [ExitCode[each.verdict.name] for each in self.logs]
        codes += [ExitCode.DAMAGED for _ in self.unreadable]
        return Verdict[gravest(codes).name]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of all logs."""
        return tuple(itertools.chain.from_iterable(each.findings for each in self.logs))

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Those of all logs."""
        return tuple(itertools.chain.from_iterable(each.violations for each in self.logs))

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """Those of all logs."""
        return tuple(itertools.chain.from_iterable(each.divergences for each in self.logs))

    @property
    def damage(self) -> tuple[Damage, ...]:
        """That of all logs."""
        return tuple(itertools.chain.from_iterable(each.damage for each in self.logs))

    @property
    def not_judged(self) -> Mapping[str, str]:
        """Rule → why it was not checked in some log, or not to the end."""
        return {rule: why for each in self.logs for rule, why in each.not_judged.items()}

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.logs, *self.unreadable)))


def verified(source: Source) -> LogReport:
    """Check one log, and make its decisions again."""
    log = source.opened()
    with public_errors(source.path):
        verification = Verification(log, Selection())
        for batch in log.batches():
            verification.take(batch)
        findings = verification.findings()
    judgement = findings.judgement
    place: Mapping[str, Any] = {"start": source.start, "rank": source.rank}
    return LogReport(
        **place,
        path=source.path,
        verdict=Verdict[findings.exit_code.name],
        text=findings.verdict,
        num_events=log.num_events,
        first_event_checked=findings.checked.first_sequence or None,
        last_event_checked=findings.checked.last_sequence or None,
        findings=tuple(_finding(place, each) for each in findings.listed.findings),
        violations=tuple(
            Violation(**place, **attrs.asdict(each, recurse=False), finding=findings.listed.first_sequence(each))
            for each in judgement.violations
        ),
        num_violations=dict(judgement.num_violations),
        divergences=_divergences(source, findings),
        num_divergences=judgement.divergences.num_found + judgement.reference_differences.num_found,
        damage=tuple(Damage(**place, **attrs.asdict(each)) for each in findings.damage),
        not_judged={**judgement.not_judged, **log.core.not_checked},
        remarks=(*findings.remarks, *findings.of_workers),
        ended=log.ending.how.value,
        head_hash=log.head_hash,
    )


def _finding(place: Mapping[str, Any], finding: Cause) -> Finding:
    first = finding.first
    return Finding(
        **place,
        sequence=first.sequence,
        request_id=first.request_id,
        text=finding.text,
        follows=tuple(finding.follows),
    )


def _divergences(source: Source, findings: Findings) -> tuple[Divergence, ...]:
    judgement, unfoldable = findings.judgement, findings.judgement.unfoldable
    first_of = findings.listed.first_sequence
    found: Sequence[tuple[int, Event | None, Event | None, int, str]] = [
        *((each.sequence, each.recorded, each.decided, first_of(each), "") for each in judgement.divergences),
        *((each.sequence, each.recorded, each.decided, first_of(each), "") for each in judgement.reference_differences),
        *(
            []
            if unfoldable is None
            else [(unfoldable.sequence, unfoldable.event, None, first_of(unfoldable), unfoldable.error)]
        ),
    ]
    return tuple(
        Divergence(
            start=source.start,
            rank=source.rank,
            sequence=sequence,
            recorded=recorded,
            decided=made,
            finding=finding,
            error=error,
        )
        for sequence, recorded, made, finding, error in sorted(found, key=lambda each: each[0])
    )
