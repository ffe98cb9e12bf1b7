"""`kvledger show`: what is in a log, and the life of one request in it."""

from __future__ import annotations

import argparse
import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterator

import attrs

from kvledger.adapters.cli.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.cli.logs import StoredLog, open_log
from kvledger.adapters.cli.output import Output, plain
from kvledger.adapters.cli.requests import Requests, RequestSummary
from kvledger.adapters.cli.state import show_state
from kvledger.adapters.cli.timeline import Group, Timeline
from kvledger.adapters.cli.words import duration, milliseconds, plural, size
from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.projections.totals import Figures
from kvledger.lifecycle.replay import SequencedEvent

_MAX_CANDIDATES = 20
_COLUMNS = {
    "request": "left",
    "outcome": "left",
    "arrived ms": "right",
    "took ms": "right",
    "prompt": "right",
    "tokens": "right",
    "preempted": "right",
    "lookups": "right",
    "loaded": "right",
    "saved chunks": "right",
    "failures": "right",
}


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Show a log, a request, or a state."""
    log = open_log(arguments.log)
    with output.progress(log, "reading"):
        request_id = None if arguments.request is None else _resolve(log, arguments.request)
        if arguments.at is not None:
            projections = Projections(log.configuration)
            last = _take_each(
                _until(log.trusted_events(), arguments.at), lambda at, event: projections.fold(event, at), output
            )
        elif request_id is not None:
            timeline = _timeline(log, request_id, output)
        else:
            requests, projections = _summaries(log, output)
    if arguments.at is not None:
        if last < arguments.at:
            output.remark(f"the log can be folded up to event {last}, not to {arguments.at}")
        show_state(output, projections, last, request_id)
    elif request_id is not None:
        _show_timeline(output, request_id, timeline.groups)
    else:
        _show_summary(output, log, requests, projections)
    for damage in log.damage:
        output.remark(f"{damage.kind} in {damage.segment} at byte {damage.offset}: {damage.detail}")
    return ExitCode.SOUND


def _take_each(events: Iterator[SequencedEvent], take: Callable[[int, e.Event], None], output: Output) -> int:
    """Take up events as long as they can be folded; returns the last. Behind a gap, or in a forged log, one may not."""
    last = 0
    for sequence, event in events:
        try:
            take(sequence, event)
        except Exception as error:  # noqa: BLE001 -- what was read before it is still worth showing
            output.remark(f"event {sequence} ({event.id}) cannot be folded: {error!r}; what follows is left out")
            for _ in events:  # to the end, for the log's figures and its damage
                pass
            break
        last = sequence
    return last


def _until(events: Iterator[SequencedEvent], at: int) -> Iterator[SequencedEvent]:
    for sequence, event in events:
        if sequence > at:
            return
        yield sequence, event


def _resolve(log: StoredLog, wanted: str) -> str:
    """The one request id that is `wanted`, or begins with it."""
    known: dict[str, None] = {}
    for _, event in log.events():
        if isinstance(event, e.RequestEvent):
            known.setdefault(event.request_id)
    if wanted in known:
        return wanted
    candidates = [request_id for request_id in known if request_id.startswith(wanted)]
    if len(candidates) == 1:
        return candidates[0]
    kind = "several requests begin" if candidates else "no request begins"
    listed = candidates or list(known)
    more = f" and {len(listed) - _MAX_CANDIDATES} more" if len(listed) > _MAX_CANDIDATES else ""
    raise CommandFailed(
        f"{kind} with {wanted!r}; {'they are' if candidates else 'the log has'}: "
        f"{', '.join(listed[:_MAX_CANDIDATES]) or 'none'}{more}",
        ExitCode.USAGE,
    )


# --- one request --------------------------------------------------------------------------------


def _timeline(log: StoredLog, request_id: str, output: Output) -> Timeline:
    timeline = Timeline(log.configuration, request_id)
    expected = 1

    def take(sequence: int, event: e.Event) -> None:
        nonlocal expected
        if sequence != expected:
            timeline.lose(expected, sequence - 1)
        timeline.take(sequence, event)
        expected = sequence + 1

    _take_each(log.events(), take, output)
    timeline.finish()
    return timeline


def _show_timeline(output: Output, request_id: str, groups: list[Group]) -> None:
    if output.is_json:
        for group in groups:
            fields = attrs.asdict(group, filter=lambda attribute, _: attribute.name != "texts")
            output.record("group", {"request_id": request_id, **fields, "text": group.text})
        return
    output.line(request_id, style="bold")
    columns = {"ms": "right", "events": "right", "state": "left", "what happened": "left"}
    output.table(columns, [[milliseconds(g.time_ns), _events(g), _states(g), g.text] for g in groups])


def _events(group: Group) -> str:
    if group.first_sequence == group.last_sequence:
        return str(group.first_sequence)
    return f"{group.first_sequence}–{group.last_sequence}"


def _states(group: Group) -> str:
    if group.state_before is None:
        return group.state_after or ""
    if group.state_before == group.state_after:
        return group.state_before
    return f"{group.state_before} → {group.state_after or 'released'}"


# --- the whole log ------------------------------------------------------------------------------


def _summaries(log: StoredLog, output: Output) -> tuple[Requests, Projections]:
    requests, projections = Requests(), Projections(log.configuration)

    def take(sequence: int, event: e.Event) -> None:
        requests.take(event)
        if sequence <= log.trusted_sequence:
            projections.fold(event, sequence)

    _take_each(log.events(), take, output)
    requests.finish(projections)
    return requests, projections


def _show_summary(output: Output, log: StoredLog, requests: Requests, projections: Projections) -> None:
    outcomes = Counter(summary.outcome or "unknown" for summary in requests.summaries)
    figures = projections.totals.figures
    if output.is_json:
        output.record(
            "log",
            {
                "path": str(log.path),
                "header": plain(log.header),
                "num_events": log.num_events,
                "num_frames": log.num_frames,
                "num_bytes": log.num_bytes,
                "duration_ns": projections.tracker.time_ns,
                "outcomes": dict(outcomes),
                "figures": attrs.asdict(figures),
            },
        )
        for summary in requests.summaries:
            output.record("request", attrs.asdict(summary))
        return
    _show_header(output, log, projections)
    outcome_words = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    output.field("requests", f"{len(requests.summaries)}: {outcome_words}" if outcomes else "none")
    _show_figures(output, figures)
    if requests.summaries:
        output.line()
        output.table(_COLUMNS, [_request_row(summary) for summary in requests.summaries])


def _show_header(output: Output, log: StoredLog, projections: Projections) -> None:
    header, configuration = log.header, log.configuration
    versions = f"kvledger {header.get('kvledger_version', 'unknown')}, vLLM {header.get('vllm_version', 'unknown')}"
    output.field("log", str(log.path))
    output.field("written by", versions)
    opened_at = header.get("opened_at_unix_ns")
    if isinstance(opened_at, int):
        opened = dt.datetime.fromtimestamp(opened_at / 1e9, tz=dt.UTC)
        output.field("opened", f"{opened:%Y-%m-%d %H:%M:%S} UTC, covers {duration(projections.tracker.time_ns)}")
    output.field(
        "sizes",
        f"block {configuration.block_size} tokens, chunk {configuration.chunk_size} tokens, "
        f"{plural(configuration.num_slots, 'slot')}, {plural(configuration.num_ranks, 'rank')}",
    )
    if len(configuration.windows) > 1:
        seen = ", ".join("all tokens" if not size else f"{size} tokens" for size in configuration.windows)
        output.field("groups", f"{len(configuration.windows)}, which see {seen}")
    policies = ["longest prefix"]
    if configuration.max_hit_share < 1:
        policies.append(f"at most {configuration.max_hit_share:.0%} of the prompt")
    if configuration.chunk_statistics:
        policies.append("chunk statistics")
    output.field("policies", ", ".join(policies))
    output.field("events", f"{log.num_events} in {plural(log.num_frames, 'frame')}, {size(log.num_bytes)}")


def _show_figures(output: Output, figures: Figures) -> None:
    output.field(
        "preempted",
        f"{plural(figures.num_preemptions, 'time')}; tokens recovered {figures.num_tokens_recovered}, "
        f"retained {figures.num_tokens_retained}, recomputed {figures.num_tokens_recomputed}",
    )
    saved = f"{plural(figures.num_chunks_saved, 'chunk')}, {size(figures.num_bytes_saved)}"
    output.field("saved", f"{saved} in {duration(figures.save_duration_ns)}")
    loaded = f"{plural(figures.num_tokens_loaded, 'token')}, {size(figures.num_bytes_loaded)}"
    output.field("loaded", f"{loaded} in {duration(figures.load_duration_ns)}")
    failures = {
        "loads": figures.num_loads_failed,
        "saves": figures.num_saves_failed,
        "rules broken": figures.num_violations,
        "hooks": figures.num_hook_failures,
    }
    failed = ", ".join(f"{count} {name}" for name, count in failures.items() if count)
    output.field("failures", failed or "none", "red" if failed else "")


def _request_row(summary: RequestSummary) -> list[str]:
    took = "" if summary.finished_ns is None else milliseconds(summary.finished_ns - summary.arrived_ns)
    counts = (
        summary.num_prompt_tokens,
        summary.num_tokens,
        summary.num_preemptions,
        summary.num_lookups,
        summary.num_tokens_loaded,
        summary.num_chunks_saved,
        summary.num_failures,
    )
    return [summary.request_id, summary.outcome, milliseconds(summary.arrived_ns), took, *map(str, counts)]
