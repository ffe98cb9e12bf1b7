"""One page about one log, for a ticket: complete in itself, without scripts, safe whatever the log holds.

`page.html` says how it looks, and escapes what stands in the log; here stands what is on it, and what is left out of a
log that is too large for a page. The page allows nothing but its own style, named by its hash, so that text which got
past the escaping could not run and nothing can be fetched.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources

import attrs
import jinja2

from kvledger.adapters.exit_codes import ExitCode
from kvledger.adapters.export import reasons
from kvledger.adapters.export.picture import NUM_COLUMNS, Axis, curves
from kvledger.adapters.export.reading import read_trace
from kvledger.adapters.export.shown import SLOTS, Request, Shown
from kvledger.adapters.export.timelines import RequestTimeline, read_timelines
from kvledger.adapters.logs.amounts import duration, event_range, milliseconds, plural, ranges, size
from kvledger.adapters.logs.describe import describe_core_event, event_text, state_change, violation_place
from kvledger.adapters.logs.ending import ending_text, sound_text
from kvledger.adapters.logs.facts import facts_of, figures_in_words
from kvledger.adapters.logs.histories import Histories, NamedEvent, NamedEvents, named_by
from kvledger.adapters.logs.log import StoredLog
from kvledger.adapters.logs.progress import Progress
from kvledger.adapters.logs.requests import RequestSummary
from kvledger.adapters.logs.selection import Selection
from kvledger.adapters.logs.verification import Findings, Verification
from kvledger.adapters.logs.visible import visible
from kvledger.lifecycle import Figures
from kvledger.lifecycle.audit import Judgement, Violation

_MAX_FINDINGS = 50
_MAX_TIMELINES = 60
"""Requests that are shown event by event."""
_WORK_OF_TIMELINES = 20_000_000
"""Events times timelines: beyond that a page would take minutes, so fewer are shown."""
_MAX_CAUSES = 400
_NUMBERS = frozenset(
    (
        *("ms", "event", "events", "took", "computed tokens", "left to compute", "computed again"),
        *("calls", "together", "each", "longest", "its end, ms"),
    )
)
"""Columns that are aligned to the right."""

_VERDICTS = {
    ExitCode.SOUND: (": every rule that a log can decide is kept", "good"),
    ExitCode.RULE_BROKEN: ("a rule is broken", "bad"),
    ExitCode.DAMAGED: ("the log is damaged", "bad"),
    ExitCode.DIVERGED: ("today's code decides otherwise", "warn"),
    ExitCode.END_MISSING: ("", "warn"),
}


@attrs.frozen
class Finding:
    """Something wrong, with what proves it: (event number, text)."""

    title: str
    detail: str
    evidence: Sequence[tuple[int, str]] = ()
    request_id: str = ""
    """Of the request that it is about, where it is about one."""


def write_page(log: StoredLog, selection: Selection, output: Progress) -> Iterator[str]:
    """The page about the selected part of a log, piece by piece."""
    shown = Shown()
    accounts = reasons.Reasons(log, selection)
    verification = Verification(log, selection)
    with output.progress(log, "reading"):
        trace = read_trace(log, selection, shown, output.remark, verification=verification, also=accounts.take)
    found = verification.findings()
    judgement = found.judgement
    violations = judgement.held.violations[:_MAX_FINDINGS]
    evidence = {sequence for item in violations for sequence in (*item.evidence, item.sequence)}
    named = NamedEvents(evidence | named_by(accounts.histories))
    with output.progress(log, "reading once more"):
        timelines = read_timelines(log, selection, _most_interesting(shown, log), named)
    of_workers = [Finding(trouble, "") for trouble in found.of_workers]
    findings = [*of_workers, *_damage(found), *_breaches(violations, named.events), *_divergences(judgement)]
    requests = shown.requests
    axis = _axis(shown, requests, selection, trace.now_ns)
    verdict, verdict_style = _VERDICTS[found.exit_code]
    if found.exit_code in {ExitCode.SOUND, ExitCode.END_MISSING}:
        verdict = sound_text(log.ending) + verdict
    histories = Histories(accounts.histories, named.events, named.names)
    style = resources.files(__package__).joinpath("page.css").read_text("utf-8")
    yield from _template().generate(
        style=style,
        style_hash="sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        title=f"kvledger · {selection.request_id or log.path.name}",
        path=log.path,
        verdict=verdict,
        verdict_style=verdict_style,
        facts=_facts(log, selection, found, trace.now_ns),
        remarks=found.remarks,
        findings=findings[:_MAX_FINDINGS],
        num_findings_left_out=_num_found(found) - len(findings[:_MAX_FINDINGS]),
        checked=(
            f"{len(judgement.judged)} rules were held against {plural(judgement.held.num_events, 'event')}, and every "
            f"decision was made again; {len(log.core.not_checked)} rules cannot be decided from a log: kvledger verify "
            "--verbose lists them."
        ),
        figures_of=_figures_of(selection),
        figures=_figures(log, verification.audit.projections.totals.figures, shown),
        **reasons.totals(accounts.sums()),
        explanations=reasons.causes(log, selection, histories),
        max_causes=_MAX_CAUSES,
        requests=requests,
        shown_ids={request.incarnation.request_id for request in requests},
        num_requests=shown.num_requests,
        num_unmarked=sum(request.num_left_out for request in requests),
        percent=axis.percent,
        ticks=axis.ticks(),
        curves=[curve for curve in curves(axis, shown.samples) if not (log.decides_elsewhere and curve[0] == SLOTS)],
        num_columns=NUM_COLUMNS,
        decides_elsewhere=log.decides_elsewhere,
        opened_request=selection.request_id,
        entries=list(_entries(requests, timelines, saves=not log.decides_elsewhere)),
        calls=sorted(shown.calls.items(), key=lambda named: named[1].total_ns, reverse=True),
        instants=sorted([*shown.troubles, *shown.others], key=lambda instant: instant.sequence),
        num_instants_left_out=shown.num_instants_left_out,
    )


# --- the template -------------------------------------------------------------------------------


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_visible,
        loader=jinja2.FunctionLoader(lambda name: resources.files(__package__).joinpath(name).read_text("utf-8")),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"ms": milliseconds, "duration": duration, "size": size, "plural": plural, "ranges": ranges}
    environment.filters["describe"] = describe_core_event
    environment.globals |= {
        "fragment": lambda request_id: f"request={visible(request_id)}",
        "event_range": event_range,
        "state_change": state_change,
        "numbers": _NUMBERS,
    }
    return environment.get_template("page.html")


def _visible(value: object) -> object:
    """What is no markup yet, with each character that cannot be seen as its number: clients choose request ids."""
    return value if hasattr(value, "__html__") else visible(str(value))


# --- requests -----------------------------------------------------------------------------------


@attrs.frozen
class _Entry:
    request: Request
    facts: dict[str, str]
    timeline: RequestTimeline | None
    is_first: bool
    """Whether no incarnation of the same id is before it."""


def _entries(requests: Sequence[Request], timelines: Mapping[str, RequestTimeline], *, saves: bool) -> Iterator[_Entry]:
    seen: set[str] = set()
    for request in requests:
        name = request.incarnation.request_id
        yield _Entry(
            request, _request_facts(request.incarnation.summary, saves=saves), timelines.get(name), name not in seen
        )
        seen.add(name)


def _request_facts(request: RequestSummary, *, saves: bool) -> dict[str, str]:
    finished = request.finished_ns
    loaded = {"loaded": f"{request.num_tokens_loaded} tokens"}
    if saves:
        loaded = {"loaded, saved": f"{request.num_tokens_loaded} tokens, {plural(request.num_chunks_saved, 'chunk')}"}
    return {
        "outcome": request.outcome,
        "arrived, ms": milliseconds(request.arrived_ns),
        "took": "not finished" if finished is None else duration(finished - request.arrived_ns),
        "tokens (prompt)": f"{request.num_tokens} ({request.num_prompt_tokens})",
        "preempted": plural(request.num_preemptions, "time"),
        **loaded,
        "failures": str(request.num_failures),
    }


def _most_interesting(shown: Shown, log: StoredLog) -> list[str]:
    allowed = max(1, min(_MAX_TIMELINES, _WORK_OF_TIMELINES // max(1, log.num_events)))
    by_interest = sorted(shown.requests, key=lambda request: request.interest, reverse=True)
    return list(dict.fromkeys(request.incarnation.request_id for request in by_interest))[:allowed]


def _axis(shown: Shown, requests: Sequence[Request], selection: Selection, now_ns: int) -> Axis:
    first = 0 if selection.first_sequence == 1 else shown.first_ns or 0
    if selection.request_id is None or not requests:
        return Axis(first, now_ns)
    # One request: its own time and a little around it.
    begin = max(first, min(request.incarnation.since_ns for request in requests))
    end = max((state.last_ns for request in requests for state in request.states), default=now_ns)
    margin = (end - begin) // 50
    return Axis(max(0, begin - margin), min(now_ns, end + margin))


# --- what is wrong ------------------------------------------------------------------------------


def _num_found(found: Findings) -> int:
    judgement = found.judgement
    diverged = (judgement.decided.divergences, judgement.decided.reference_differences)
    num_diverged = sum(each.num_found for each in diverged) + (judgement.unfoldable is not None)
    return len(found.of_workers) + len(found.damage) + sum(judgement.held.num_violations.values()) + num_diverged


def _damage(found: Findings) -> Iterator[Finding]:
    for damage in found.damage:
        yield Finding(damage.place, damage.detail)


def _breaches(violations: Sequence[Violation], proof: Mapping[int, NamedEvent]) -> Iterator[Finding]:
    for item in violations:
        named = dict.fromkeys((*item.evidence, item.sequence))
        evidence = [(sequence, event_text(proof[sequence].event)) for sequence in named if sequence in proof]
        yield Finding(violation_place(item), item.detail, evidence, item.request_id)


def _divergences(judgement: Judgement) -> Iterator[Finding]:
    if judgement.unfoldable is not None:
        yield Finding("An event that cannot be folded", str(judgement.unfoldable))
    for divergence in (*judgement.decided.divergences, *judgement.decided.reference_differences):
        evidence = [
            (divergence.sequence, f"{who}: {'nothing' if event is None else event_text(event)}")
            for who, event in (("recorded", divergence.recorded), ("decided today", divergence.decided))
        ]
        yield Finding(f"Today's code decides otherwise at event {divergence.sequence}", "", evidence)


# --- facts and figures --------------------------------------------------------------------------


def _facts(log: StoredLog, selection: Selection, found: Findings, now_ns: int) -> dict[str, str]:
    last = min(selection.last_sequence or log.last_sequence, log.last_sequence)
    part = "the whole log" if selection.is_everything else f"events {selection.first_sequence} to {last}"
    if selection.request_id is not None:
        part += f", request {selection.request_id} only"
    facts = {**facts_of(log, now_ns), "shown": part}
    if log.head_hash:
        facts["chain's head"] = log.head_hash
    return facts | {"end": ending_text(log.ending, found.end_state.num_open_requests)}


def _figures_of(selection: Selection) -> str:
    if selection.last_sequence is not None:
        return f"All requests in figures, from the beginning to event {selection.last_sequence}"
    return "The log in figures" if selection.is_everything else "The whole log in figures, all requests"


def _figures(log: StoredLog, figures: Figures, shown: Shown) -> dict[str, str]:
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in shown.outcomes.most_common())
    requests = f"{shown.num_requests:,}: {outcomes}" if outcomes else "none"
    return {
        "requests in this part": requests,
        **figures_in_words(figures, has_own_copies=not log.decides_elsewhere),
    }
