"""The part of the HTML page that is about one log.

The log is read twice: first for the verdict and all requests, then for the events of the requests that are shown. This
module must not depend on the look of the page or on the page's other logs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from kvledger.adapters.figures import Figures
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.tools.export import reasons
from kvledger.adapters.tools.export.axis import Interval
from kvledger.adapters.tools.export.reading import read_trace
from kvledger.adapters.tools.export.shown import Request, Shown
from kvledger.adapters.tools.export.spans import Instant
from kvledger.adapters.tools.export.timelines import RequestTimeline, read_timelines
from kvledger.adapters.tools.logs.clock import Clock
from kvledger.adapters.tools.logs.describe import sentence
from kvledger.adapters.tools.logs.ending import ending_text, sound_text
from kvledger.adapters.tools.logs.explanation import Cause
from kvledger.adapters.tools.logs.facts import UNKNOWN_TOTALS, facts_of, figures_in_words
from kvledger.adapters.tools.logs.findings import Finding
from kvledger.adapters.tools.logs.histories import Histories, NamedEvents, named_by
from kvledger.adapters.tools.logs.log import Place, StoredLog
from kvledger.adapters.tools.logs.processes import SeparateProcesses
from kvledger.adapters.tools.logs.progress import Progress
from kvledger.adapters.tools.logs.reading import begin_model
from kvledger.adapters.tools.logs.remote_verification import OpenLog, RemoteVerification, begin_verification
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.verification import Findings, Verification, evidence_of
from kvledger.adapters.tools.pool_sizes import Estimate, of_log
from kvledger.adapters.units import plural
from kvledger.lifecycle import Core
from kvledger.lifecycle.events import Event
from kvledger.storage.events import HowEnded

_MAX_FINDINGS = 50
_MAX_FOLLOWING = 20
"""Maximum number of later breaches that are listed below a finding."""
_VERDICTS = {
    ExitCode.SOUND: (": every rule that a log can decide is kept", "good"),
    ExitCode.RULE_BROKEN: ("a rule is broken", "bad"),
    ExitCode.DAMAGED: ("the log is damaged", "bad"),
    ExitCode.DIVERGED: ("today's code decides differently", "warn"),
    ExitCode.END_MISSING: ("", "warn"),
    ExitCode.EXTENSION_STOPPED: ("", "warn"),
    ExitCode.NOTHING_CHECKED: ("nothing could be checked", "warn"),
    ExitCode.NOT_VERIFIED: ("not verified", "warn"),
}
_ENDINGS = {
    HowEnded.CLOSED: ("closed", "plain"),
    HowEnded.CUT_OFF: ("cut off", "warn"),
    HowEnded.OPEN: ("open", "plain"),
    HowEnded.UNKNOWN: ("end not known", "warn"),
}


@attrs.frozen
class Reading:
    """Results of the first reading of a log, from which the requests to show are chosen."""

    log: StoredLog
    selection: Selection
    shown: Shown
    accounts: reasons.Reasons
    end: Place
    """Where both readings end."""
    verification: Verification | RemoteVerification
    """The verification of the log. Call its `findings` only after this reading."""
    pool: Estimate
    """Tokens that pools of other sizes would have loaded."""
    figures: Figures | None
    """Totals of the log; None: unknown, because reading began at a snapshot without totals."""
    now_ns: int

    @classmethod
    def of(
        cls, log: StoredLog, selection: Selection, others: SeparateProcesses, open_log: OpenLog, output: Progress
    ) -> Reading:
        """Read the selected part of a log. A process of `others` opens a large log with `open_log`, to verify it."""
        end = log.end_so_far()
        shown = Shown()
        model = begin_model(log)
        accounts = reasons.Reasons(model, selection, shown.explained)
        pool_sizes, why_not = of_log(model, log.core, selection)
        visitors = [accounts] if pool_sizes is None else [accounts, pool_sizes]
        verification = begin_verification(log, selection, end, others, open_log)
        with output.progress(log, "reading"):
            trace = read_trace(
                log, model, selection, shown, output.remark, verification.take, visitors=visitors, end=end
            )
        figures = trace.totals.complete_figures
        pool = Estimate(why_not=why_not) if pool_sizes is None else pool_sizes.estimate()
        return cls(log, selection, shown, accounts, end, verification, pool, figures, trace.now_ns)

    @property
    def clock(self) -> Clock:
        """Clock of the log's times of day."""
        return Clock(self.log.header)

    @property
    def busy(self) -> list[Interval]:
        """Intervals that the time axis of the page shows in full, in nanoseconds since the log was opened.

        If a request is selected, these are the intervals of the request's states, with a margin.
        """
        if self.selection.request_id is None:
            return self.shown.busy or [(0, self.now_ns)]
        states = [state for request in self.shown.requests for state in request.states]
        if not states:
            return [(0, self.now_ns)]
        margin = (max(state.last_ns for state in states) - min(state.since_ns for state in states)) // 50
        return [(max(0, state.since_ns - margin), min(self.now_ns, state.last_ns + margin)) for state in states]


@attrs.frozen
class ListedFinding:
    """A finding as the HTML page lists it."""

    title: str
    detail: str
    request_id: str
    evidence: Sequence[tuple[int, str]]
    """(sequence number, event in words) of the events that show the finding."""
    follows: Sequence[str]
    num_left_out: int
    """Number of later breaches that are not listed."""


@attrs.frozen
class Part:
    """The part of the HTML page that is about one log."""

    reading: Reading
    found: Findings
    requests: Sequence[Request]
    timelines: Mapping[str, RequestTimeline]
    findings: Sequence[ListedFinding]
    num_findings: int
    num_uncollected: int
    """Breaches that were counted but not kept. It is unknown to which findings they belong."""
    explanations: Sequence[Sequence[Cause]]
    verdict: str
    verdict_style: str
    ending: str
    """How the log ended, in a few words; `facts` has the details."""
    ending_style: str
    facts: Mapping[str, str]
    figures: Mapping[str, str]
    figures_of: str
    checked: str
    instants: Sequence[Instant]

    @property
    def name(self) -> str:
        """Name of the log's folder."""
        return self.reading.log.path.name

    @property
    def shown(self) -> Shown:
        """Requests and samples of the log."""
        return self.reading.shown

    @classmethod
    def of(cls, reading: Reading, requests: Sequence[Request], request_ids: Collection[str], output: Progress) -> Part:
        """Read the log again for these requests. Requests whose ids are in `request_ids` are shown event by event."""
        log, selection, shown = reading.log, reading.selection, reading.shown
        named = NamedEvents(named_by(reading.accounts.histories))
        with output.progress(log, "reading again"):
            timelines = read_timelines(log, selection, reading.end, request_ids, named)
        with output.waiting("verifying"):
            found = reading.verification.findings()
            listed = found.listed.findings[:_MAX_FINDINGS]
            evidence = evidence_of(log, listed)
        histories = Histories(reading.accounts.histories, named.events, named.names)
        verdict, verdict_style = _VERDICTS[found.exit_code]
        has_details = found.exit_code in {ExitCode.EXTENSION_STOPPED, ExitCode.NOTHING_CHECKED}
        if found.checked.why_nothing or not found.checked.is_whole or has_details:
            verdict = found.verdict
        elif found.exit_code in {ExitCode.SOUND, ExitCode.END_MISSING}:
            verdict = sound_text(log.ending) + verdict
        ending, ending_style = _ENDINGS[log.ending.how] if log.ending.missing is None else ("end missing", "bad")
        return cls(
            reading=reading,
            found=found,
            requests=requests,
            timelines=timelines,
            findings=[_listed(finding, evidence, log.core) for finding in listed],
            num_findings=len(found.listed.findings),
            num_uncollected=found.listed.num_uncollected,
            explanations=reasons.causes(log, selection, histories),
            verdict=verdict,
            verdict_style=verdict_style,
            ending=ending,
            ending_style=ending_style,
            facts=_facts(reading, found),
            figures=_figures(reading, found),
            figures_of=_figures_of(selection),
            checked=_checked(reading, found),
            instants=sorted([*shown.troubles, *shown.others], key=lambda instant: instant.sequence),
        )


def _listed(finding: Finding, evidence: Mapping[int, Event], core: Core) -> ListedFinding:
    first, follows = finding.first, finding.follows
    known = [(each, sentence(evidence[each], core)) for each in first.evidence if each in evidence]
    num_left_out = max(0, len(follows) - _MAX_FOLLOWING)
    return ListedFinding(first.title, first.detail, first.request_id, known, follows[:_MAX_FOLLOWING], num_left_out)


def _facts(reading: Reading, found: Findings) -> dict[str, str]:
    log, selection = reading.log, reading.selection
    last = min(selection.last_sequence or log.last_sequence, log.last_sequence)
    part = "the whole log" if selection.is_everything else f"events {selection.first_sequence} to {last}"
    if selection.request_id is not None:
        part += f", request {selection.request_id} only"
    facts = {**facts_of(log, reading.now_ns), "shown": part}
    if log.head_hash:
        facts["chain head"] = log.head_hash
    return facts | {"end": ending_text(log.ending, found.end_state.num_open_requests)}


def _figures_of(selection: Selection) -> str:
    if selection.last_sequence is not None:
        return f"All requests in figures, from the beginning to event {selection.last_sequence}"
    return "The log in figures" if selection.is_everything else "The whole log in figures, all requests"


def _figures(reading: Reading, found: Findings) -> dict[str, str]:
    shown = reading.shown
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in shown.outcomes.most_common())
    requests = f"{shown.num_requests:,}: {outcomes}" if outcomes else "none"
    why_nothing = found.checked.why_nothing
    if why_nothing:
        return {"requests in this part": f"not known: {why_nothing}" if not outcomes else requests}
    if reading.figures is None:
        return {"requests in this part": requests, "all others": UNKNOWN_TOTALS}
    has_own_copies = not reading.log.decides_elsewhere
    return {"requests in this part": requests, **figures_in_words(reading.figures, has_own_copies=has_own_copies)}


def _checked(reading: Reading, found: Findings) -> str:
    judgement, why_nothing = found.judgement, found.checked.why_nothing
    if why_nothing:
        return f"Neither rules nor decisions could be checked: {why_nothing}."
    return (
        f"{len(judgement.judged)} rules were checked over {plural(judgement.num_events, 'event')}, and every "
        f"decision was repeated; {len(reading.log.core.not_checked)} rules cannot be decided from a log: kvledger "
        "verify --verbose lists them."
    )
