"""Makes the page for a ticket out of a stored log: tells it once with every rule held against it, then reads again.

What is shown of a log that is too large for a page is decided here.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

from kvledger.adapters.exit_codes import ExitCode
from kvledger.adapters.export import reasons
from kvledger.adapters.export.drawing import Span
from kvledger.adapters.export.gathering import Gathering
from kvledger.adapters.export.life_stories import LifeStories, read_stories
from kvledger.adapters.export.page import Finding, Page, render
from kvledger.adapters.export.reading import read_trace
from kvledger.adapters.logs.amounts import duration, plural, size
from kvledger.adapters.logs.describe import event_text
from kvledger.adapters.logs.ending import ending_text, num_open_requests, sound_text
from kvledger.adapters.logs.log import StoredLog
from kvledger.adapters.logs.progress import Progress
from kvledger.adapters.logs.selection import Selection
from kvledger.adapters.logs.verification import Findings
from kvledger.lifecycle import Figures
from kvledger.lifecycle.audit import Audit, Violation

MAX_FINDINGS = 50
MAX_STORIES = 60
"""Requests whose life is told event by event."""
_WORK_OF_STORIES = 20_000_000
"""Events times stories: beyond that a page would take minutes, so fewer are told."""

_VERDICTS = {
    "SOUND": (": every rule that a log can decide is kept", "good"),
    "RULE_BROKEN": ("a rule is broken", "bad"),
    "DAMAGED": ("the log is damaged", "bad"),
    "DIVERGED": ("today's code decides otherwise", "warn"),
    "END_MISSING": ("", "warn"),
}


def write_page(log: StoredLog, selection: Selection, output: Progress) -> Iterator[str]:
    """The page about the selected part of a log, piece by piece."""

    def is_selected(violation: Violation) -> bool:
        return selection.holds(violation.sequence) and selection.holds_request(violation.request_id)

    gathering = Gathering()
    accounts = reasons.Reasons(log, selection)
    keeps = None if selection.is_everything else is_selected
    audit = Audit(log.core, log.configuration, keeps=keeps)
    with output.progress(log, "reading"):
        trace = read_trace(log, selection, gathering, output.remark, audit=audit, also=accounts.take)
    found = Findings.of(log, audit, selection)
    violations = audit.violations[:MAX_FINDINGS]
    request_ids = _most_interesting(gathering, log)
    evidence = {sequence for item in violations for sequence in (*item.evidence, item.sequence)}
    with output.progress(log, "reading once more"):
        stories = read_stories(log, selection, request_ids, evidence)
    findings = [*_damage(found), *_breaches(violations, stories), *_divergences(audit, found)]
    verdict, style = _VERDICTS[found.exit_code.name]
    if found.exit_code in {ExitCode.SOUND, ExitCode.END_MISSING}:
        verdict = sound_text(log.ending) + verdict
    page = Page(
        title=f"kvledger · {selection.request_id or log.path.name}",
        verdict=verdict,
        verdict_style=style,
        facts=_facts(log, selection, trace.now_ns)
        | {"end": ending_text(log.ending, num_open_requests(audit.projections))},
        figures_of=_figures_of(selection),
        figures=_figures(log, audit.projections.totals.figures, gathering),
        remarks=found.remarks,
        findings=findings[:MAX_FINDINGS],
        num_findings_left_out=_num_found(audit, found) - len(findings[:MAX_FINDINGS]),
        checked=(
            f"{len(audit.judged)} rules were held against {plural(audit.num_events, 'event')}, and every decision "
            f"was made again; {len(log.core.not_checked)} rules cannot be decided from a log: kvledger verify "
            "--verbose lists them."
        ),
        span=_span(gathering, selection, trace.now_ns),
        gathering=gathering,
        stories=stories,
        opened_request=selection.request_id,
        decides_elsewhere=log.decides_elsewhere,
        sections=tuple(_reasons(log, selection, accounts, output)),
        footer=f"Made by kvledger export --html from {log.path}. Times are milliseconds since the log was opened; "
        "this page holds everything it shows and fetches nothing.",
    )
    yield from render(page)


def _reasons(
    log: StoredLog, selection: Selection, accounts: reasons.Reasons, output: Progress
) -> Iterator[tuple[str, str]]:
    yield "Why tokens were computed", reasons.totals(accounts.sums())
    if selection.request_id is not None:
        yield "What led to what", reasons.causes(log, selection, selection.request_id, output)


def _most_interesting(gathering: Gathering, log: StoredLog) -> list[str]:
    allowed = max(1, min(MAX_STORIES, _WORK_OF_STORIES // max(1, log.num_events)))
    by_interest = sorted(gathering.requests, key=lambda told: told.interest, reverse=True)
    return list(dict.fromkeys(told.incarnation.request_id for told in by_interest))[:allowed]


def _span(gathering: Gathering, selection: Selection, now_ns: int) -> Span:
    first = 0 if selection.first_sequence == 1 else gathering.first_ns or 0
    requests = gathering.requests
    if selection.request_id is None or not requests:
        return Span(first, now_ns)
    # One request: its own time and a little around it.
    begin = max(first, min(told.incarnation.since_ns for told in requests))
    end = max((state.last_ns for told in requests for state in told.states), default=now_ns)
    margin = (end - begin) // 50
    return Span(max(0, begin - margin), min(now_ns, end + margin))


def _num_found(audit: Audit, found: Findings) -> int:
    divergences = len(found.divergences) + len(found.reference_differences) + (audit.unfoldable is not None)
    return len(found.damage) + audit.num_violations.total() + divergences


def _damage(found: Findings) -> Iterator[Finding]:
    for damage in found.damage:
        yield Finding(damage.place, damage.detail)


def _breaches(violations: list[Violation], stories: LifeStories) -> Iterator[Finding]:
    for item in violations:
        of = f", request {item.request_id}" if item.request_id else ""
        generation = "" if item.generation is None else f", generation {item.generation}"
        named = dict.fromkeys((*item.evidence, item.sequence))
        evidence = [
            (sequence, event_text(stories.evidence[sequence])) for sequence in named if sequence in stories.evidence
        ]
        title = f"{item.rule} at event {item.sequence}{of}{generation}"
        yield Finding(title, item.detail, evidence, item.request_id)


def _divergences(audit: Audit, found: Findings) -> Iterator[Finding]:
    if audit.unfoldable is not None:
        yield Finding("An event that cannot be folded", str(audit.unfoldable))
    for divergence in (*found.divergences, *found.reference_differences):
        evidence = [
            (divergence.sequence, f"{who}: {'nothing' if event is None else event_text(event)}")
            for who, event in (("recorded", divergence.recorded), ("decided today", divergence.decided))
        ]
        yield Finding(f"Today's code decides otherwise at event {divergence.sequence}", "", evidence)


def _facts(log: StoredLog, selection: Selection, now_ns: int) -> dict[str, str]:
    header, configuration = log.header, log.configuration
    facts = {"log": str(log.path), "written by": log.written_by}
    opened_at = header.get("opened_at_unix_ns")
    if isinstance(opened_at, int):
        facts["opened"] = f"{dt.datetime.fromtimestamp(opened_at / 1e9, tz=dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
    last = min(selection.last_sequence or log.last_sequence, log.last_sequence)
    part = "the whole log" if selection.is_everything else f"events {selection.first_sequence} to {last}"
    if selection.request_id is not None:
        part += f", request {selection.request_id} only"
    chunks = f", chunk {configuration.chunk_size} tokens, {plural(configuration.num_slots, 'slot')}"
    chunks = "" if log.decides_elsewhere else f"{chunks}, {plural(configuration.num_ranks, 'rank')}"
    facts |= {
        "covers": f"{duration(now_ns)}: {part}",
        "read": f"{plural(log.num_events, 'event')} in {plural(log.num_frames, 'frame')}, {size(log.num_bytes)}",
        "sizes": f"block {configuration.block_size} tokens{chunks}",
    }
    if log.head_hash:
        facts["chain's head"] = log.head_hash
    return facts


def _figures_of(selection: Selection) -> str:
    if selection.last_sequence is not None:
        return f"All requests in figures, from the beginning to event {selection.last_sequence}"
    return "The log in figures" if selection.is_everything else "The whole log in figures, all requests"


def _figures(log: StoredLog, figures: Figures, gathering: Gathering) -> dict[str, str]:
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in gathering.outcomes.most_common())
    loaded, saved = duration(figures.load_duration_ns), duration(figures.save_duration_ns)
    failures = {
        "load": figures.num_loads_failed,
        "save": figures.num_saves_failed,
        "hook": figures.num_hook_failures,
        "recorded breach": figures.num_violations,
    }
    failed = ", ".join(plural(count, name) for name, count in failures.items() if count)
    after_preemption = {
        "recovered": figures.num_tokens_recovered,
        "retained": figures.num_tokens_retained,
        "recomputed": figures.num_tokens_recomputed,
    }
    shown = {
        "requests in this part": f"{gathering.num_requests:,}: {outcomes}" if outcomes else "none",
        "preemptions": f"{figures.num_preemptions:,}",
        "tokens after preemption": ", ".join(f"{count:,} {name}" for name, count in after_preemption.items()),
        "lookups": f"{figures.num_lookups:,}, which offered {figures.num_tokens_hit:,} tokens",
        "loaded": f"{figures.num_tokens_loaded:,} tokens, {size(figures.num_bytes_loaded)} in {loaded}",
        "saved": f"{plural(figures.num_chunks_saved, 'chunk')}, {size(figures.num_bytes_saved)} in {saved}",
        "left the cache": f"{figures.num_chunks_evicted:,} evicted, {figures.num_chunks_tainted:,} tainted",
        "failed": failed or "nothing",
    }
    if log.decides_elsewhere:
        del shown["saved"], shown["left the cache"]
        shown["loaded"] = f"{figures.num_tokens_loaded:,} tokens"
    return shown
