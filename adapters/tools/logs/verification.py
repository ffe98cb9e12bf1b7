"""The audit of a stored log: everything wrong in the selected part, and what could not be judged.

Callers read the log and pass in its batches. This module must not depend on how callers show the result.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs

from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.tools.logs.coverage import Coverage, ExtensionEvents, RequestPresence, checked
from kvledger.adapters.tools.logs.ending import sound_text
from kvledger.adapters.tools.logs.findings import Breach, Finding, FindingList
from kvledger.adapters.tools.logs.log import Batch, StoredLog, open_log
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.sources import start_of
from kvledger.adapters.tools.logs.workers import WorkerCalls, troubles_of_workers
from kvledger.adapters.units import plural
from kvledger.lifecycle import Extension, LedgerConfiguration, Projections, RequestState
from kvledger.lifecycle.audit import Audit, Judgement
from kvledger.lifecycle.events import Event, ExtensionStopped
from kvledger.storage.events import Damage, HowEnded, Retirement

_NO_CONFIGURATION = LedgerConfiguration(block_size=1, chunk_size=1, num_slots=1)
"""For the audit of a log whose configuration is lost. That audit gets no event."""
_HEADER_LOST = (
    "no copy of the log's header, which has the configuration, is intact: events were decoded as this version "
    "writes them, and neither rules nor decisions can be checked"
)


class Verification:
    """Checks rules and decisions on a log, and reports what is wrong in the selected part.

    Checking begins at the log's first event or, if the oldest segments were retired, at the first usable snapshot. It
    ends at the first gap. Create a verification before the log is read. Pass every batch of the selection, and every
    batch before it, to `take`.
    """

    def __init__(self, log: StoredLog, selection: Selection) -> None:
        self._log = log
        self._selection = selection
        start = log.start()
        configuration = log.configuration if log.header else _NO_CONFIGURATION
        self.audit = Audit(log.core, configuration, keeps=selection.concerns_violation, start=start)
        self.audit.divergences.keeps = self.audit.reference_differences.keeps = selection.concerns
        self._calls = None if log.worker_rank is None else WorkerCalls()
        self._presence = RequestPresence(selection, self.audit.projections)
        self._of_extensions = ExtensionEvents()

    def take(self, batch: Batch) -> None:
        """Take the batch that was just read. A batch is not judged if events before it are missing."""
        if not self._log.header or not self._log.is_trusted:
            return
        events = list(batch.numbered())
        self._presence.take(events)
        self._of_extensions.take(events)
        self.audit.take_frame(events)
        if self._calls is not None:
            self._calls.take(events)

    def outcome(self) -> Outcome:
        """Return what was found in the events. Call this after the log was read."""
        if not self._selection.is_over(self._log.last_sequence):
            # If the log continues after the selection, its last observation may have decisions that were not read.
            self.audit.finish()
        return Outcome(
            start_sequence=self._log.start_sequence,
            last_sequence=self._log.last_sequence,
            judgement=self.audit.judgement(),
            end_state=EndState.of(self.audit.projections),
            of_extensions=self._of_extensions,
            calls=self._calls,
            is_present=self._presence.is_found,
        )

    def findings(self) -> Findings:
        """Return all findings. Call this after the log was read."""
        return Findings.of(self._log, self._selection, self.outcome())


@attrs.frozen
class EndState:
    """What a verification reports about the state at the end of the log."""

    num_open_requests: int | None
    """Requests that had arrived and not finished; None: unknown, because events before the end are missing."""
    stopped_at: Mapping[str, int]
    """Extension → sequence number of the event that stopped it."""

    @classmethod
    def of(cls, projections: Projections) -> EndState:
        """Return the end state of these projections."""
        stopped_at = dict(projections.extensions.state.stopped)
        num_open = sum(record.state is not RequestState.FINISHED for record in projections.tracker)
        return cls(num_open, stopped_at)


@attrs.frozen
class Outcome:
    """What a verification found in the events of a log, as plain data that another process can send."""

    start_sequence: int
    """Sequence number after which checking began; 0: at the log's first event."""
    last_sequence: int
    """Sequence number of the last event that was read."""
    judgement: Judgement
    end_state: EndState
    of_extensions: ExtensionEvents
    calls: WorkerCalls | None
    """What the worker was doing at the end of its log; None: a scheduler wrote the log."""
    is_present: bool
    """Whether the selected request was alive in the selected part. True if no request is selected."""


@attrs.frozen
class StoppedExtension:
    """An extension whose code raised while the log was written. kvledger stopped it from that event on."""

    extension: str
    version: int | None
    """Version of the extension; None: unknown, because the event that stopped it was not read."""
    sequence: int
    """Sequence number of the event that stopped it."""
    where: str
    """Part of the extension that raised; empty: unknown."""
    error: str
    """Class of the exception, and where it was raised; empty: unknown."""
    rules: Sequence[str]
    """Rules of the extension. They were not checked after it was stopped."""

    @property
    def text(self) -> str:
        """The stopped extension in words."""
        name = f"extension {self.extension}{'' if self.version is None else f' {self.version}'}"
        why = f", because {self.where} raised {self.error}" if self.where else ""
        rules = f", and {_rules(self.rules)} not checked" if self.rules else ""
        return (
            f"{name} was stopped at event {self.sequence}{why}. From then on it decided and recorded nothing{rules}. "
            "Fix it, and restart the engine"
        )


def _rules(rules: Sequence[str]) -> str:
    return f"its rule{'' if len(rules) == 1 else 's'} {', '.join(rules)} {'was' if len(rules) == 1 else 'were'}"


@attrs.frozen
class Findings:
    """What is wrong in the selected part of a log."""

    judgement: Judgement
    end_state: EndState
    damage: tuple[Damage, ...]
    remarks: tuple[str, ...]
    of_workers: tuple[str, ...]
    """Hooks in which workers raised or did not return. These are not faults of the log."""
    exit_code: ExitCode
    checked: Coverage
    """Events that the verdict covers."""
    verdict: str
    """The verdict in words, with the covered part if that is not the whole log."""
    stopped: Sequence[StoppedExtension] = ()
    listed: FindingList = attrs.field(factory=FindingList)
    """What is wrong, one finding for each cause."""

    @classmethod
    def of(cls, log: StoredLog, selection: Selection, outcome: Outcome) -> Findings:
        """Return the findings of a log that was read. `outcome`: of its verification, up to the same event."""
        judgement, end_state, of_extensions = outcome.judgement, outcome.end_state, outcome.of_extensions
        unfoldable = judgement.unfoldable
        last_foldable = None if unfoldable is None else unfoldable.sequence - 1
        covered = checked(log, selection, last_foldable, is_present=outcome.is_present)
        damage = tuple(d for d in log.damage if d.sequence is None or selection.holds(d.sequence))
        if damage:
            exit_code = ExitCode.DAMAGED
        elif judgement.num_violations:
            exit_code = ExitCode.RULE_BROKEN
        elif not judgement.is_sound:
            exit_code = ExitCode.DIVERGED
        elif log.skipped:
            exit_code = ExitCode.NOT_VERIFIED
        elif covered.why_nothing or _lacks_scheduler(log):
            exit_code = ExitCode.NOTHING_CHECKED
        elif log.ending.missing is not None:
            exit_code = ExitCode.END_MISSING
        elif end_state.stopped_at:
            exit_code = ExitCode.EXTENSION_STOPPED
        else:
            exit_code = ExitCode.SOUND
        stopped = tuple(_stopped(log, end_state, of_extensions.stops))
        remarks = tuple(_remarks(log, selection, judgement, of_extensions, covered, stopped))
        if log.trusted_sequence < log.last_sequence:
            end_state = attrs.evolve(end_state, num_open_requests=None)
        verdict = _verdict(log, selection, judgement, exit_code, covered)
        of_workers = _of_workers(log, outcome.calls)
        # In a worker's log, a failed call is already reported as a broken rule.
        troubles = () if log.worker_rank is not None and judgement.num_violations else of_workers
        others = [
            *(Breach(each, "") for each in troubles),
            *(Breach(f"extension {each.extension} was stopped", each.text, each.sequence) for each in stopped),
            *(Breach(each.place, each.detail) for each in damage),
        ]
        listed = FindingList.of(judgement, log.core, others)
        return cls(judgement, end_state, damage, remarks, of_workers, exit_code, covered, verdict, stopped, listed)


def evidence_of(log: StoredLog, findings: Collection[Finding]) -> dict[int, Event]:
    """Return sequence number → event, for the events that are evidence of the first breaches of these findings.

    Reads the log again, so that the first reading need not keep all events in memory.
    """
    wanted = {sequence for finding in findings for sequence in finding.first.evidence}
    if not wanted:
        return {}
    copy = open_log(log.path, log.core, lenient=True)  # the first reading has checked the schema
    return {sequence: event for sequence, event in copy.events(max(wanted)) if sequence in wanted}


def _stopped(log: StoredLog, end_state: EndState, stops: Mapping[int, ExtensionStopped]) -> Iterator[StoppedExtension]:
    rules_of = {extension.name: extension.declaration().rules for extension in log.core.extensions}
    for name, sequence in end_state.stopped_at.items():
        rules, event = tuple(rules_of.get(name, ())), stops.get(sequence)
        if event is None:
            yield StoppedExtension(name, None, sequence, "", "", rules)
        else:
            yield StoppedExtension(name, event.version, sequence, event.where, event.error, rules)


def _lacks_scheduler(log: StoredLog) -> bool:
    """Whether this is a worker's log, and the log of the worker's scheduler is not in the same directory."""
    return log.worker_rank is not None and log.path.is_dir() and start_of(log.path).scheduler is None


def _verdict(log: StoredLog, selection: Selection, judgement: Judgement, exit_code: ExitCode, covered: Coverage) -> str:
    words = {
        ExitCode.NOT_VERIFIED: "not verified: events that this version does not know were skipped",
        ExitCode.NOTHING_CHECKED: "nothing could be checked",
        ExitCode.EXTENSION_STOPPED: f"{sound_text(log.ending)}, but an extension was stopped",
        ExitCode.END_MISSING: sound_text(log.ending),
        ExitCode.SOUND: sound_text(log.ending),
    }
    verdict = words.get(exit_code, exit_code.name.lower().replace("_", " "))
    is_rule_broken = exit_code is ExitCode.RULE_BROKEN
    if log.worker_rank is not None and is_rule_broken and list(judgement.num_violations) == ["RECORDED"]:
        verdict += f": a hook of worker {log.worker_rank} raised"
    if exit_code is ExitCode.NOTHING_CHECKED and not covered.why_nothing:
        verdict += f" except the calls of worker {log.worker_rank}"
    if exit_code is ExitCode.NOTHING_CHECKED:
        return verdict if log.ending.missing is None else f"{verdict}, and the log's end is missing"
    if covered.why_nothing:
        return f"{verdict}, and nothing could be checked"
    part = "" if covered.is_whole else covered.text
    if log.worker_rank is not None:
        part = f"the calls of worker {log.worker_rank}{f' in {part}' if part else ''}"
    elif selection.request_id is not None:
        part = f"{part or covered.text} of {selection.request_id}"
    verdict += f"; only {part} {'was' if part.startswith('event ') else 'were'} checked" if part else ""
    unjudged = [f"rules of extension {extension.name}" for extension in log.core.absent]
    unjudged += [f"rule {rule}" for rule in judgement.not_judged]
    return f"{verdict}; not checked: {', '.join(unjudged)}" if unjudged else verdict


def _of_workers(log: StoredLog, calls: WorkerCalls | None) -> tuple[str, ...]:
    """Return what went wrong in the worker that wrote this log, or in the workers of this scheduler's log."""
    if calls is None:
        return tuple(f"worker {rank} {trouble}" for rank, trouble in troubles_of_workers(log).items())
    trouble = calls.trouble(is_over=log.ending.how is not HowEnded.OPEN)
    return (f"worker {log.worker_rank} {trouble}",) if trouble else ()


def _remarks(
    log: StoredLog,
    selection: Selection,
    judgement: Judgement,
    of_extensions: ExtensionEvents,
    covered: Coverage,
    stopped: Sequence[StoppedExtension],
) -> list[str]:
    remarks = [each.text for each in stopped]
    if not selection.is_everything:
        end = "the end" if selection.last_sequence is None else f"event {selection.last_sequence}"
        about = "" if selection.request_id is None else f" about {selection.request_id}"
        remarks.append(f"only findings from event {selection.first_sequence} to {end}{about} are reported")
    remarks += _retired(log.retired)
    if _lacks_scheduler(log):
        remarks.append(
            "the log of this engine's scheduler, which has the requests, is not in the same directory: the start "
            "failed before vLLM created the scheduler, or that log is elsewhere"
        )
    if log.skipped:
        skipped = ", ".join(f"{count} {event_id}" for event_id, count in sorted(log.skipped.items()))
        remarks.append(
            f"events that this version does not know were skipped: {skipped}; their effects are missing, so a rule "
            "may be reported as broken although it is not"
        )
    remarks += log.start_remarks
    if log.start_sequence:
        remarks.append(
            f"rules and decisions were checked from event {log.start_sequence + 1} on, beginning from a "
            "snapshot whose state was not checked"
        )
    if not log.header:
        remarks.append(_HEADER_LOST)
    is_state_known = log.header and (log.start_sequence > 0 or not log.begins_late)
    if is_state_known and log.trusted_sequence < log.last_sequence and not selection.is_over(log.last_sequence):
        remarks.append(
            f"rules and decisions were checked up to event {log.trusted_sequence}; the next events are missing"
        )
    if covered.why_nothing and log.header:
        remarks.append(f"neither rules nor decisions could be checked: {covered.why_nothing}")
    named = {rule for each in stopped for rule in each.rules}
    remarks += _not_judged(log, judgement, of_extensions.num_events, named)
    table = log.core.table_fingerprint()
    if log.header.get("table_fingerprint", table) != table:
        remarks.append("the log was written with another transition table, which can cause divergences")
    used = log.core.handler_fingerprint()
    written_with = log.header.get("handler_fingerprint", used)
    if written_with != used and not log.core.absent:
        remarks.append(
            "the log was written with other handlers than this command used, which can cause divergences; give its "
            f"handlers with --handlers: it was written with {written_with}"
        )
    return remarks + log.other_code_remarks


def _retired(retired: Sequence[Retirement]) -> list[str]:
    """Return remarks on retired events, with time and reason. Consecutive segments with one reason share a remark."""
    remarks = []
    for reason, run in itertools.groupby(retired, key=lambda each: each.reason):
        segments = list(run)
        first, last = segments[0], segments[-1]
        at = dt.datetime.fromtimestamp(last.retired_at_unix_ns / 1e9, tz=dt.UTC)
        how_many = f"{plural(len(segments), 'segment')}, the last at {at:%Y-%m-%dT%H:%M:%SZ}"
        events = f"events {first.first_sequence}–{last.last_sequence}"
        remarks.append(
            f"{events} were retired by {reason} ({how_many}); the remaining events continue the chain at the "
            "recorded hash of the retired ones"
        )
    if retired and not retired[-1].is_rest_verifiable:
        remarks.append(
            f"{retired[-1].segment} was deleted to free space although there was no snapshot of the state after it, so "
            "the events from there to the next snapshot cannot be verified"
        )
    return remarks


def _not_judged(log: StoredLog, judgement: Judgement, num_events: int, named: Collection[str]) -> Iterator[str]:
    """Yield remarks on what could not be judged because of extensions. A rule in `named` already has a remark."""
    for extension in log.core.absent:
        yield _absence(extension, judgement, num_events)
    for rule, reason in judgement.not_judged.items():
        if rule in named and reason.startswith("its extension was stopped"):
            continue
        yield f"rule {rule} of an extension could not be checked, or only in part: {reason}"


def _absence(extension: Extension, judgement: Judgement, num_events: int) -> str:
    declared = extension.declaration()
    rules = f"; its rules {', '.join(declared.rules)} were not checked" if declared.rules else ""
    return (
        f"the log was written with extension {extension.name} {extension.version} ({declared.made_by}), which is not "
        f"installed here. Its sub-states were taken from the table in the header, and {plural(num_events, 'event')} of "
        f"extensions {'was' if num_events == 1 else 'were'} accepted{rules}. The "
        f"decisions on {plural(judgement.num_unjudged, 'observation')} were not repeated, because the extension may "
        "have influenced them. Install it, or name it with --extensions"
    )
