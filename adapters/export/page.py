"""One page about one log, for a ticket: complete in itself, readable without scripts, safe whatever the log holds.

The page allows nothing but its own style and script, named by their hashes, so that text which got past the escaping
could not run and nothing can be fetched. It must not read logs.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources

import attrs

from kvledger.adapters.export.drawing import Span, draw_rows, in_time
from kvledger.adapters.export.gathering import SERIES, SLOTS, Calls, Gathering, Told
from kvledger.adapters.export.life_stories import LifeStories
from kvledger.adapters.export.markup import cell, element, escaped, fragment, table
from kvledger.adapters.export.spans import Incarnation, Instant
from kvledger.adapters.logs.amounts import duration, event_range, milliseconds, plural
from kvledger.adapters.logs.describe import state_change
from kvledger.adapters.logs.timeline import Group

_LEGEND = (
    ("s-new", "new"),
    ("s-chunked_prefill", "chunked prefill"),
    ("s-running", "running"),
    ("s-preempted", "preempted"),
    ("s-recovering", "recovering"),
    ("s-finished", "finished, still owing copies"),
    ("c-load", "load"),
    ("c-save", "save"),
    ("c-tail-save", "tail save"),
    ("c-save failed", "failed copy"),
)
_LEGEND_OF_SAVES = _LEGEND[-3:-1]
_LEGEND_OF_MARKS = (
    '<li><svg width="10" height="10"><circle class="m-trouble" cx="5" cy="5" r="4"/></svg>something went wrong</li>'
    '<li><svg width="10" height="10"><circle class="m-note" cx="5" cy="5" r="3"/></svg>something else happened</li>'
    '<li><svg width="10" height="10"><line class="lookup" x1="5" x2="5" y1="0" y2="10"/></svg>lookup</li>'
)
_HATCH = (
    '<svg class="defs" width="0" height="0" aria-hidden="true"><defs><pattern id="hatch" width="5" height="5" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="hatch-paper" width="5" height="5"/>'
    '<line class="hatch-line" x1="0" y1="0" x2="0" y2="5"/></pattern></defs></svg>'
)
_GROUP_HEAD: list[tuple[str, str | None]] = [
    ("ms", "number"),
    ("events", "number"),
    ("state", None),
    ("what happened", None),
]
_STATE_HEAD: list[tuple[str, str | None]] = [
    ("ms", "number"),
    ("took", "number"),
    ("state", None),
    ("because of", None),
    ("computed tokens", "number"),
]


@attrs.frozen
class Finding:
    """Something wrong, with what proves it: (event number, text)."""

    title: str
    detail: str
    evidence: Sequence[tuple[int, str]] = ()
    request_id: str = ""
    """Of the request that it is about, where it is about one."""


@attrs.frozen
class Page:
    """Everything that is on it, in plain text."""

    title: str
    verdict: str
    """A few words."""
    verdict_style: str
    """`good`, `warn` or `bad`."""
    facts: Mapping[str, str]
    figures: Mapping[str, str]
    figures_of: str
    """Their heading, which says what they count."""
    remarks: Sequence[str]
    findings: Sequence[Finding]
    num_findings_left_out: int
    checked: str
    """What was checked and what was not."""
    span: Span
    gathering: Gathering
    stories: LifeStories
    opened_request: str | None
    """The request that the page is about."""
    decides_elsewhere: bool
    """Whether another connector saves: chunks and slots are not in the log."""
    sections: Sequence[tuple[str, str]] = ()
    """(heading, markup) of further sections, between the findings and the timeline."""
    footer: str = ""


def render(page: Page) -> Iterator[str]:
    """The page, piece by piece."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield '<meta name="referrer" content="no-referrer">\n'
    yield f"<title>{escaped(page.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
    yield from _head(page)
    yield "<main>\n"
    yield from _findings(page)
    for heading, markup in page.sections:
        yield f"<section>\n<h2>{escaped(heading)}</h2>\n{markup}</section>\n"
    yield from _timeline(page)
    yield from _life_stories(page)
    yield from _calls(page.gathering)
    yield from _moments(page)
    yield f"</main>\n<footer><p>{escaped(page.footer)}</p></footer>\n"
    yield f'<div id="tip" role="tooltip" hidden></div>\n<script>{script}</script>\n</body>\n</html>\n'


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _head(page: Page) -> Iterator[str]:
    yield f"<header>\n<h1>{escaped(page.title)}</h1>\n"
    yield f'<p class="verdict {page.verdict_style}">{escaped(page.verdict)}</p>\n'
    yield _facts(page.facts)
    for remark in page.remarks:
        yield f'<p class="note">{escaped(remark)}</p>\n'
    yield "</header>\n"


def _facts(facts: Mapping[str, str]) -> str:
    listed = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>\n" for name, value in facts.items())
    return f"<dl>\n{listed}</dl>\n"


def _findings(page: Page) -> Iterator[str]:
    yield '<section id="findings">\n<h2>What is wrong</h2>\n'
    if not page.findings:
        yield '<p class="good">Nothing that the log can decide.</p>\n'
    shown = {told.incarnation.request_id for told in page.gathering.requests}
    for finding in page.findings:
        link = ""
        if finding.request_id in shown:
            link = f' <a href="#{fragment(finding.request_id)}">its life</a>'
        yield f'<div class="finding"><h3>{escaped(finding.title)}{link}</h3>\n<p>{escaped(finding.detail)}</p>\n'
        if finding.evidence:
            events = "".join(
                f'<li class="mono"><span class="dim">{sequence}</span><div>{escaped(text)}</div></li>\n'
                for sequence, text in finding.evidence
            )
            yield f"<ol>\n{events}</ol>\n"
        yield "</div>\n"
    if page.num_findings_left_out:
        yield f"<p>… and {page.num_findings_left_out:,} more; <code>kvledger verify</code> lists them.</p>\n"
    yield f'<p class="dim">{escaped(page.checked)}</p>\n</section>\n'
    yield f'<section id="figures">\n<h2>{escaped(page.figures_of)}</h2>\n{_facts(page.figures)}</section>\n'


def _timeline(page: Page) -> Iterator[str]:
    gathering, span = page.gathering, page.span
    requests = gathering.requests
    yield f'<section id="timeline">\n<h2>Timeline</h2>\n{_HATCH}\n'
    if gathering.num_left_out:
        yield (
            f'<p class="note">{len(requests)} of {gathering.num_requests:,} requests are drawn: those with trouble and '
            "preemptions first, then the earliest. --since, --until and --request choose others.</p>\n"
        )
    num_unmarked = sum(told.num_left_out for told in requests)
    if num_unmarked:
        yield (
            f'<p class="note">{num_unmarked:,} ordinary saves and lookups of requests that have very many are not '
            "drawn.</p>\n"
        )
    yield '<div class="controls" hidden><button id="farther" title="zoom out">−</button>'
    yield '<button id="closer" title="zoom in">+</button><button id="whole">everything</button>'
    yield '<span id="range" class="dim mono"></span>'
    yield '<input type="search" id="filter" placeholder="filter by request id" aria-label="filter by request id">'
    yield '<label><input type="checkbox" id="only-trouble"> with trouble</label>'
    yield '<label><input type="checkbox" id="only-preempted"> preempted</label>'
    yield '<label><input type="checkbox" id="only-visible"> in this part of the time</label>'
    yield '<span id="shown" class="dim"></span>'
    yield '<span class="dim">Ctrl + wheel or a double click zooms</span></div>\n'
    legend = [entry for entry in _LEGEND if not (page.decides_elsewhere and entry in _LEGEND_OF_SAVES)]
    yield f'<ul class="legend">{"".join(_legend_entry(style, name) for style, name in legend)}'
    yield f"{_LEGEND_OF_MARKS}</ul>\n"
    yield (
        f'<div class="timeline" tabindex="0" data-first-ms="{span.first_ns / 1e6}" '
        f'data-length-ms="{span.length_ns / 1e6}"><div class="rows">\n'
    )
    curves = [name for name in SERIES if not (page.decides_elsewhere and name == SLOTS)]
    yield from draw_rows(span, gathering.samples, requests, curves)
    yield "</div></div>\n</section>\n"


def _legend_entry(style: str, name: str) -> str:
    height = 10 if style.startswith("s-") else 4
    rect = f'<rect class="{style}" y="{(10 - height) // 2}" width="18" height="{height}"/>'
    return f'<li><svg width="18" height="10" aria-hidden="true">{rect}</svg>{escaped(name)}</li>'


# --- lives --------------------------------------------------------------------------------------


def _life_stories(page: Page) -> Iterator[str]:
    requests = page.gathering.requests
    yield f'<section id="requests">\n<h2>{escaped(plural(len(requests), "request"))}</h2>\n'
    told_ids: set[str] = set()
    for told in requests:
        name = told.incarnation.request_id
        is_open = page.opened_request == name or len(requests) == 1
        has_groups = name in page.stories.groups
        if has_groups and name in told_ids:
            body = "<p>Another life of this id; the first one above tells all of them.</p>"
        elif has_groups:
            body = _groups(page.stories.groups[name], page.stories.num_left_out.get(name, 0))
        else:
            body = _states(told) + (
                f"<p class='dim'>Event by event: <code>kvledger show LOG {escaped(name)}</code>, or this page with "
                f"<code>--request {escaped(name)}</code></p>"
            )
        told_ids.add(name)
        yield _life_story(told, body, is_open=is_open, saves=not page.decides_elsewhere)
    yield "</section>\n"


def _life_story(told: Told, body: str, *, is_open: bool, saves: bool) -> str:
    life = told.incarnation
    has_trouble = bool(life.num_failures) or any(instant.is_trouble for instant in told.instants)
    style = f"life-story{' trouble' if has_trouble else ''}{' preempted' if life.num_preemptions else ''}"
    named = _life_facts(life, saves=saves).items()
    facts = "".join(f"<span><small>{name}</small>{escaped(value)}</span>" for name, value in named)
    name = escaped(life.request_id)
    opened = " open" if is_open else ""
    return (
        f'<details class="{style}" data-request="{name}" {in_time(told)} id="life-{life.ordinal}"{opened}>'
        f'<summary><b class="mono">{name}</b>{facts}</summary>\n{body}</details>\n'
    )


def _life_facts(life: Incarnation, *, saves: bool) -> dict[str, str]:
    loaded = {"loaded": f"{life.num_tokens_loaded} tokens"}
    if saves:
        loaded = {"loaded, saved": f"{life.num_tokens_loaded} tokens, {plural(life.num_chunks_saved, 'chunk')}"}
    took = "not finished" if life.finished_ns is None else duration(life.finished_ns - life.since_ns)
    return {
        "outcome": life.outcome,
        "arrived, ms": milliseconds(life.since_ns),
        "took": took,
        "tokens (prompt)": f"{life.num_tokens} ({life.num_prompt_tokens})",
        "preempted": plural(life.num_preemptions, "time"),
        **loaded,
        "failures": str(life.num_failures),
    }


def _groups(groups: Sequence[Group], num_left_out: int) -> str:
    rows = []
    for index, group in enumerate(groups):
        if num_left_out and index == len(groups) // 2:
            rows.append(f'<td colspan="4" class="warn">{num_left_out:,} rows are left out here</td>')
        row = cell(milliseconds(group.time_ns), "number")
        row += cell(event_range(group.first_sequence, group.last_sequence), "number")
        row += cell(state_change(group.state_before, group.state_after), "state")
        row += cell(group.text, "bad" if group.num_broken else None)
        rows.append(row)
    return table(_GROUP_HEAD, rows)


def _states(told: Told) -> str:
    rows = [
        cell(milliseconds(state.since_ns), "number")
        + cell(duration(state.duration_ns), "number")
        + cell(state.state, "state")
        + cell(f"{state.cause} (event {state.sequence})")
        + cell(f"{state.num_computed_tokens} → {state.num_computed_tokens_at_end}", "number")
        for state in told.states
    ]
    return table(_STATE_HEAD, rows)


# --- calls --------------------------------------------------------------------------------------


def _calls(gathering: Gathering) -> Iterator[str]:
    if not gathering.calls:
        return
    yield '<section id="calls">\n<h2>How long calls took</h2>\n'
    numbers = ("calls", "together", "each", "longest", "its end, ms", "event")
    head: list[tuple[str, str | None]] = [("call", None), *((name, "number") for name in numbers), ("request", None)]
    by_time = sorted(gathering.calls.items(), key=lambda named: named[1].total_ns, reverse=True)
    yield table(head, [_call_row(f"{extension}: {name}", calls) for (extension, name), calls in by_time])
    yield "</section>\n"


def _call_row(name: str, calls: Calls) -> str:
    longest = calls.longest
    return (
        cell(name, "mono")
        + cell(f"{calls.num_calls:,}", "number")
        + cell(duration(calls.total_ns), "number")
        + cell(duration(calls.total_ns // calls.num_calls), "number")
        + cell(duration(longest.duration_ns), "number")
        + cell(milliseconds(longest.last_ns), "number")
        + cell(longest.sequence, "number")
        + _of_request(longest.request_id)
    )


def _of_request(request_id: str) -> str:
    link = f'<a href="#{fragment(request_id)}">{escaped(request_id)}</a>' if request_id else ""
    return element("td", link, class_="mono")


# --- moments ------------------------------------------------------------------------------------


def _moments(page: Page) -> Iterator[str]:
    gathering = page.gathering
    moments = sorted([*gathering.troubles, *gathering.others], key=lambda moment: moment.sequence)
    if not moments:
        return
    yield '<section id="moments">\n<h2>What the connector noticed</h2>\n'
    head: list[tuple[str, str | None]] = [
        ("ms", "number"),
        ("event", "number"),
        ("kind", None),
        ("request", None),
        ("what happened", None),
    ]
    yield table(head, [_moment_row(moment) for moment in moments])
    if gathering.num_troubles > len(gathering.troubles):
        num_more = gathering.num_troubles - len(gathering.troubles)
        yield f"<p>… and {num_more:,} more; <code>kvledger export --csv moments</code> lists them.</p>\n"
    yield "</section>\n"


def _moment_row(moment: Instant) -> str:
    return (
        cell(milliseconds(moment.time_ns), "number")
        + cell(moment.sequence, "number")
        + cell(moment.kind, "bad" if moment.is_trouble else None)
        + _of_request(moment.request_id)
        + cell(moment.text)
    )
