"""The timeline of a page: curves of the engine and a row per request, as SVG over one axis of time.

Everything lies at a percentage of the width, so that a page zooms by making the drawing wider. It must not know logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from kvledger.adapters.export.gathering import SERIES, Sample, Told
from kvledger.adapters.export.markup import element, escaped, fragment, lines
from kvledger.adapters.export.spans import Copy, Instant, Lookup, StateSpan
from kvledger.adapters.logs.amounts import duration, plural, ranges, size

_NUM_COLUMNS = 800
_TICKS = 8
_NEAR_THE_END = 0.95
_STEPS_NS = [base * 10**power for power in range(1, 15) for base in (1, 2, 5)]


@attrs.frozen
class Span:
    """The time that is drawn."""

    first_ns: int
    last_ns: int

    @property
    def length_ns(self) -> int:
        """Never zero."""
        return max(1, self.last_ns - self.first_ns)

    def share(self, time_ns: int) -> float:
        """Where a time lies, from 0 to 1; what lies outside lies on the border."""
        return min(1.0, max(0.0, (time_ns - self.first_ns) / self.length_ns))

    def percent(self, time_ns: int) -> str:
        """The same in percent."""
        return _percent(self.share(time_ns))


def draw_rows(span: Span, samples: Sequence[Sample], requests: Sequence[Told], curves: Sequence[str]) -> Iterator[str]:
    """The axis, the curves of these names, and a row per request."""
    yield _axis(span)
    for name in curves:
        yield _curve(span, samples, SERIES.index(name), name)
    for told in requests:
        yield _row(span, told)


def time_text(time_ns: int) -> str:
    """A time, for a tooltip."""
    return f"{time_ns / 1e6:,.3f} ms"


def _percent(share: float) -> str:
    return f"{share * 100:.4f}".rstrip("0").rstrip(".") + "%"


def _axis(span: Span) -> str:
    step = next((step for step in _STEPS_NS if span.length_ns / step <= _TICKS), _STEPS_NS[-1])
    first = -(-span.first_ns // step) * step
    ticks = []
    for time_ns in range(first, span.last_ns + 1, step):
        share = span.share(time_ns)
        anchor = "end" if share > _NEAR_THE_END else "start"
        x = _percent(share)
        text = element("text", f"{time_ns / 1e6:,.10g}", x=x, y=13, dx=-4 if anchor == "end" else 4, text_anchor=anchor)
        ticks.append(f'<line x1="{x}" x2="{x}" y1="0" y2="20"/>{text}')
    drawing = f'<svg class="ticks" height="20" aria-hidden="true">{"".join(ticks)}</svg>'
    return f'<div class="row axis"><span class="label">ms since opening</span>{drawing}</div>\n'


def _curve(span: Span, samples: Sequence[Sample], index: int, name: str) -> str:
    columns = [0] * (_NUM_COLUMNS + 1)
    previous_column, value = 0, 0
    for sample in samples:
        column = int(span.share(sample.time_ns) * _NUM_COLUMNS)
        for between in range(previous_column, column):
            columns[between] = max(columns[between], value)
        previous_column, value = column, sample.values[index]
        columns[column] = max(columns[column], value)
    for after in range(previous_column, _NUM_COLUMNS + 1):
        columns[after] = max(columns[after], value)
    highest = max(columns)
    path = ["M0 100"]
    drawn = 0
    for column, count in enumerate(columns[:-1]):
        if count != drawn or column == 0:
            path.append(f"H{column}V{100 - round(count * 100 / max(1, highest))}")
            drawn = count
    area = f'<path d="{"".join(path)}H{_NUM_COLUMNS}V100Z"/>'
    label = (
        f'<span class="label" title="{escaped(name)}, at most {highest:,}">{escaped(name)} <b>≤ {highest:,}</b></span>'
    )
    drawing = (
        f'<svg class="curve" height="26" viewBox="0 0 {_NUM_COLUMNS} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escaped(name)}, at most {highest}">{area}</svg>'
    )
    return f'<div class="row counter">{label}{drawing}</div>\n'


def _row(span: Span, told: Told) -> str:
    incarnation = told.incarnation
    marks = [_state(span, state) for state in told.states]
    marks += [_copy(span, copy) for copy in told.copies]
    marks += [_lookup(span, lookup) for lookup in told.lookups]
    marks += [_instant(span, instant) for instant in told.instants]
    has_trouble = any(instant.is_trouble for instant in told.instants) or bool(incarnation.num_failures)
    flags = f"{' trouble' if has_trouble else ''}{' preempted' if incarnation.num_preemptions else ''}"
    name = escaped(incarnation.request_id)
    label = f'<a class="label" href="#{fragment(incarnation.request_id)}" title="{name}">{name}</a>'
    return (
        f'<div class="row life{flags}" data-request="{name}" {in_time(told)}>{label}'
        f'<svg height="24" role="img" aria-label="{escaped(_in_short(told))}">{"".join(marks)}</svg></div>\n'
    )


def in_time(told: Told) -> str:
    """Attributes that tell when a request was there."""
    last = max((state.last_ns for state in told.states), default=told.incarnation.since_ns)
    return f'data-from-ms="{told.incarnation.since_ns / 1e6}" data-to-ms="{last / 1e6}"'


def _in_short(told: Told) -> str:
    states = ", ".join(state.state for state in told.states[:20])
    return f"{told.incarnation.request_id}: {states}"


def _state(span: Span, state: StateSpan) -> str:
    begin, end = span.share(state.since_ns), span.share(state.last_ns)
    goes_on = "goes on" if state.until_ns is None else f"until {time_text(state.until_ns)} by {state.left_by}"
    title = lines(
        f"{state.request_id}: {state.state}, {duration(state.duration_ns)}",
        f"since {time_text(state.since_ns)} by {state.cause} (event {state.sequence}), {goes_on}",
        f"generation {state.generation}; computed {state.num_computed_tokens} → {state.num_computed_tokens_at_end} "
        f"tokens",
    )
    return (
        f'<rect class="s-{escaped(state.state)}" x="{_percent(begin)}" y="4" width="{_percent(end - begin)}" '
        f'height="10"><title>{title}</title></rect>'
    )


def _copy(span: Span, copy: Copy) -> str:
    begin, end = span.share(copy.since_ns), span.share(copy.last_ns)
    style = copy.kind.replace(" ", "-") + ("" if copy.outcome in {"completed", "open"} else " failed")
    what = (
        f"tokens {copy.first_token}–{copy.first_token + (copy.num_tokens or 0) - 1}"
        if copy.first_token is not None
        else ""
    )
    if copy.chunks:
        what = f"chunks {ranges(copy.chunks)}"
    beside = "beside the steps" if copy.is_async else "before the forward" if copy.before_forward else "in its step"
    ranks = f"; ranks {ranges(sorted(copy.ranks_failed))} failed" if copy.ranks_failed else ""
    title = lines(
        f"{copy.kind} {copy.job_id} of {copy.request_id}: {copy.outcome}, {duration(copy.duration_ns)}",
        f"from {time_text(copy.since_ns)} (event {copy.sequence}), {beside}; {what}",
        f"{plural(copy.num_pages, 'page')}, {size(copy.num_bytes)} in {duration(copy.worker_ns)} of work{ranks}",
        copy.error,
    )
    return (
        f'<rect class="c-{style}" x="{_percent(begin)}" y="{16 if copy.kind == "load" else 19}" '
        f'width="{_percent(end - begin)}" height="3"><title>{title}</title></rect>'
    )


def _lookup(span: Span, lookup: Lookup) -> str:
    if lookup.deferred_for_job:
        answer = f"to ask again, job {lookup.deferred_for_job} is under way"
    else:
        answer = f"{lookup.num_hit_tokens} are saved, {lookup.num_external_tokens} offered; {lookup.miss_reason}"
    title = lines(
        f"lookup of {lookup.request_id} at {time_text(lookup.time_ns)} (event {lookup.sequence})",
        f"{lookup.num_tokens} tokens, {lookup.num_computed_tokens} of them computed: {answer}",
    )
    x = span.percent(lookup.time_ns)
    return f'<line class="lookup" x1="{x}" x2="{x}" y1="0" y2="4"><title>{title}</title></line>'


def _instant(span: Span, instant: Instant) -> str:
    title = lines(f"{instant.kind} at {time_text(instant.time_ns)} (event {instant.sequence})", instant.text)
    style, radius = ("m-trouble", 4) if instant.is_trouble else ("m-note", 2.5)
    x = span.percent(instant.time_ns)
    return f'<circle class="{style}" cx="{x}" cy="9" r="{radius}"><title>{title}</title></circle>'
