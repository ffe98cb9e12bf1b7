"""Results of `Log.verify`: the verdict on each log, what is wrong, and what was not judged."""

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
    """The verdict on a log; on several logs the most severe one."""

    SOUND = "sound"
    """Nothing is wrong in the log, as far as the log goes."""
    RULE_BROKEN = "rule_broken"
    DAMAGED = "damaged"
    """Damaged or unreadable."""
    DIVERGED = "diverged"
    """Today's code decides differently from the log, or cannot fold it."""
    END_MISSING = "end_missing"
    """Sound, but events are known to be missing at the end."""
    NOTHING_CHECKED = "nothing_checked"
    """The log has no event, its beginning is missing, or it has only a worker's hook calls."""
    EXTENSION_STOPPED = "extension_stopped"
    """Sound, but the rules of a stopped extension were not checked to the end."""
    NOT_VERIFIED = "not_verified"
    """Checked only in part, because `lenient` skipped events."""


@attrs.frozen(kw_only=True)
class Violation:
    """A breach: one case in which the log breaks a rule."""

    start: str
    rank: int | None
    """Rank of the worker whose log breaks the rule; None: the scheduler's log."""
    sequence: int
    rule: str
    """A name in `docs/invariants.md`."""
    request_id: str
    """Id of the request; empty if the violation concerns no single request."""
    generation: int | None
    detail: str
    evidence: tuple[int, ...]
    """Sequence numbers of earlier events that show the violation together with the event at `sequence`."""
    time_ns: int
    ordinal: int | None
    """Ordinal of the life that the violation concerns; None: unknown, or the violation concerns no single request."""
    cause: int
    """Sequence number of the observation at which the rule is broken."""
    finding: int
    """Sequence number of the first event of the `Finding` to which the violation belongs."""

    def __str__(self) -> str:
        of = f", request {self.request_id}" if self.request_id else ""
        return visible(f"{self.rule} at event {self.sequence}{of}: {self.detail}")


@attrs.frozen(kw_only=True)
class Divergence:
    """A decision that differs between the log and today's code, or an event that today's code cannot fold."""

    start: str
    rank: int | None
    sequence: int
    recorded: Event | None
    """The event in the log, if there is one."""
    decided: Event | None
    """The event that today's code decides, if there is one."""
    finding: int
    """Sequence number of the first event of the `Finding` to which the divergence belongs."""
    error: str = ""
    """Why `recorded` cannot be folded; empty if it can be folded."""


@attrs.frozen(kw_only=True)
class Damage:
    """One damaged place of a log."""

    start: str
    rank: int | None
    sequence: int | None
    """Sequence number of the first affected event; None: unknown."""
    kind: str
    """A kind in `docs/log-format.md`."""
    segment: str
    offset: int
    """Bytes from the beginning of the segment."""
    num_bytes: int
    """Bytes from `offset` on that cannot be used."""
    detail: str


@attrs.frozen(kw_only=True)
class Finding:
    """Faults that have one cause, as far as the log shows. `kvledger verify` counts the same findings."""

    start: str
    rank: int | None
    sequence: int | None
    """Sequence number of the finding's first event; None: unknown."""
    request_id: str
    """Id of the request; empty if the finding concerns no single request."""
    text: str
    """The first fault of the finding in words: what, where, how often."""
    follows: tuple[str, ...]
    """The later faults of the finding, in words."""

    def __str__(self) -> str:
        return "\n  then ".join(map(visible, (self.text, *self.follows)))


@attrs.frozen(kw_only=True)
class LogReport:
    """Result of verifying one log."""

    start: str
    rank: int | None
    path: Path
    verdict: Verdict
    text: str
    """The verdict in words. If only a part of the log was checked, the text names this part."""
    num_events: int
    first_event_checked: int | None
    last_event_checked: int | None
    """Sequence number of the last event that was checked. If no event could be checked, this and
    `first_event_checked` are None."""
    findings: tuple[Finding, ...]
    violations: tuple[Violation, ...]
    """The first 1,000 at most."""
    num_violations: Mapping[str, int]
    """Rule → number of violations."""
    divergences: tuple[Divergence, ...]
    """The first 1,000 at most."""
    num_divergences: int
    damage: tuple[Damage, ...]
    not_judged: Mapping[str, str]
    """Rule → why the rule was not checked, or not up to the end of the log."""
    remarks: tuple[str, ...]
    """Remarks on the log and on what the verdict covers."""
    ended: str
    """How the log ended: `closed`, `cut_off`, `open` (a process is writing the log) or `unknown`."""
    head_hash: str
    """Chain hash of the last frame. Store the hash elsewhere to check later whether the log was rewritten."""

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.text}"]
        for finding in self.findings:
            lines += [finding.text, *(f"  then {text}" for text in finding.follows)]
        lines += self.remarks
        return visible(lines[0]) + "".join(f"\n  {visible(line)}" for line in lines[1:])


@attrs.frozen
class Report:
    """Results of verifying all logs that were opened."""

    logs: tuple[LogReport, ...]
    """One `LogReport` per log, the oldest engine start first. In a start, the scheduler's log is first."""
    unreadable: tuple[LogUnreadable, ...] = ()
    """An error for each log that could not be opened."""

    @property
    def verdict(self) -> Verdict:
        """The most severe verdict. A log that could not be opened counts as damaged."""
        codes = [ExitCode[each.verdict.name] for each in self.logs]
        codes += [ExitCode.DAMAGED for _ in self.unreadable]
        return Verdict[gravest(codes).name]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all logs."""
        return tuple(itertools.chain.from_iterable(each.findings for each in self.logs))

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The violations of all logs."""
        return tuple(itertools.chain.from_iterable(each.violations for each in self.logs))

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """The divergences of all logs."""
        return tuple(itertools.chain.from_iterable(each.divergences for each in self.logs))

    @property
    def damage(self) -> tuple[Damage, ...]:
        """The damage of all logs."""
        return tuple(itertools.chain.from_iterable(each.damage for each in self.logs))

    @property
    def not_judged(self) -> Mapping[str, str]:
        """Rule → why the rule was not checked in one of the logs, or not up to the log's end."""
        return {rule: why for each in self.logs for rule, why in each.not_judged.items()}

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.logs, *self.unreadable)))


def verified(source: Source) -> LogReport:
    """Verify one log."""
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
