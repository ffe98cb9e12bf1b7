"""OpenTelemetry spans of a log: one per request, and below it the request's phases, waits, loads and saves.

Each span is emitted when it ends. Only open spans are kept in memory. This module must not depend on targets or
formats.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import attrs
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

from kvledger.adapters.tools.export.otlp_ids import SpanIds, parent_of
from kvledger.adapters.tools.export.request_sums import RequestSums
from kvledger.adapters.tools.export.spans import CopySpan, Instant, LifeSpan, Lookup, Sink, Span, StateSpan
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.lifecycle import __version__
from kvledger.lifecycle import events as e

Emit = Callable[[ReadableSpan], object]
Attributes = Mapping[str, AttributeValue]

_BEYOND: Final = 2**64 - 1
"""Latest time of a span, in nanoseconds. A forged log may have later times."""
_SUFFIX: Final = re.compile("-[0-9a-f]{8}$")
"""What vLLM appends to the client's id (`assign_request_id`, vllm/v1/engine/input_processor.py, 0.32)."""
_MAX_EVENTS: Final = 1024
"""Maximum number of events of a span; the last ones are kept. The SDK also applies `OTEL_SPAN_EVENT_COUNT_LIMIT`."""
_OF_REQUEST: Final = frozenset({e.TokensRolledBack.id, e.SessionContinued.id, e.SaveDeclined.id, e.TransferAwaited.id})
_OF_LOG: Final = frozenset({e.CacheReset.id, e.PrefixCacheReset.id, e.LogNote.id})
"""Kinds of instants that are not trouble and become events of a span."""


@attrs.frozen
class _Event:
    name: str
    time_ns: int
    attributes: Attributes


@attrs.define
class _Wait:
    """Consecutive lookups of a request that were deferred because a save was in flight."""

    deferral: e.LookupDeferred
    sequence: int
    since_ns: int
    num_deferrals: int = 1


@attrs.define
class _Request:
    """A request whose span has not been emitted yet."""

    life: LifeSpan
    events: deque[_Event] = attrs.field(factory=lambda: deque(maxlen=_MAX_EVENTS))
    wait: _Wait | None = None
    trouble: Instant | None = None
    """First failure that concerns the request; None: no failure so far."""


class _Emitting(SpanProcessor):
    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def on_end(self, span: ReadableSpan) -> None:
        self._emit(span)


class LogSpans(Sink):
    """Emits the spans of one log.

    Args:
        log: the opened log.
        opened_at_ns: Unix time at which the log was opened. The log's times count from this time.
        sums: the tokens of each request by reason.
        emit: called with each span.
    """

    def __init__(self, log: StoredLog, opened_at_ns: int, sums: RequestSums, emit: Emit) -> None:
        log_id = str(log.header.get("log_id", log.path))
        self._opened_at_ns = opened_at_ns
        self._sums = sums
        self._ids = SpanIds(log_id)
        provider = TracerProvider(
            sampler=ALWAYS_ON, resource=_resource(log, log_id), shutdown_on_exit=False, id_generator=self._ids
        )
        provider.add_span_processor(_Emitting(emit))
        self._tracer = provider.get_tracer("kvledger", __version__)
        self._requests: dict[int, _Request] = {}
        """Ordinal → request whose span is open."""
        self._of_log: deque[_Event] = deque(maxlen=_MAX_EVENTS)

    # --- requests and the spans below them ----------------------------------------------------

    def began(self, span: Span) -> None:
        """Keep the span of a life, so that events can be added to this span. Other spans are ignored until they end."""
        if isinstance(span, LifeSpan):
            self._requests[span.ordinal] = _Request(span)

    def ended(self, span: Span) -> None:
        """Emit the span."""
        match span:
            case LifeSpan():
                self._end_request(span)
            case StateSpan():
                self._end_wait(span.ordinal, span.last_ns)
                self._end_state(span)
            case CopySpan():
                self._end_copy(span)

    def _end_request(self, span: LifeSpan) -> None:
        # In a damaged log two requests may have the same ordinal. Then the first one to end has removed the record.
        request = self._requests.pop(span.ordinal, None) or _Request(span)
        self._end_wait(span.ordinal, span.last_ns, request)
        summary, trouble = span.summary, request.trouble
        error = ""
        attributes = {
            **_attributes(span, "request_id", "ordinal", "sequence"),
            "kvledger.last_sequence": summary.last_sequence,
            **_attributes(summary, "outcome", "num_prompt_tokens", "num_tokens", "num_preemptions", "num_lookups"),
            **_attributes(summary, "num_tokens_loaded", "num_chunks_saved", "num_failures"),
            **_attributes(span, "num_tokens_recovered", "num_tokens_retained", "num_bytes_loaded", "num_bytes_saved"),
            **self._sums.attributes_of(span.ordinal),
            "gen_ai.request.id": _SUFFIX.sub("", span.request_id),
        }
        if trouble is not None:
            error = trouble.text
            attributes["error.type"] = str(trouble.fields.get("rule", trouble.kind))
        elif summary.outcome == "FINISHED_ERROR":
            error = attributes["error.type"] = summary.outcome
        context, parent = self._ids.of_request(span.ordinal, span.trace_parent), parent_of(span.trace_parent)
        self._emit("request", span, context, attributes, parent, request.events, error)

    def _end_state(self, span: StateSpan) -> None:
        attributes = {
            **_attributes(span, "request_id", "sequence", "generation", "cause", "left_by"),
            **_attributes(span, "num_computed_tokens", "num_computed_tokens_at_end", "num_tokens"),
        }
        parent = self._ids.of_request(span.ordinal, self._requests[span.ordinal].life.trace_parent)
        context = self._ids.within(parent, "state", span.ordinal, span.sequence)
        self._emit(span.state, span, context, attributes, parent)

    def _end_copy(self, span: CopySpan) -> None:
        attributes = {
            **_attributes(span, "request_id", "sequence", "generation", "job_id", "num_pages", "num_bytes"),
            **_attributes(span, "first_token", "num_tokens", "is_async", "before_forward", "outcome"),
            **_attributes(span, "ranks_failed"),
            "kvledger.num_chunks": len(span.chunks),
            "kvledger.worker_ms": span.worker_ns / 1e6,
        }
        has_failed = span.outcome in {"failed", "given up"}
        if has_failed:
            attributes["error.type"] = span.outcome
        parent = self._ids.of_request(span.ordinal, span.trace_parent)
        context = self._ids.within(parent, "copy", span.sequence, span.job_id)
        self._emit(span.kind, span, context, attributes, parent, error=(span.error or span.outcome) * has_failed)

    def _end_wait(self, ordinal: int | None, time_ns: int, request: _Request | None = None) -> None:
        request = request or self._requests.get(-1 if ordinal is None else ordinal)
        if request is None or request.wait is None:
            return
        wait, request.wait = request.wait, None
        span = Span(request_id=wait.deferral.request_id, sequence=wait.sequence, since_ns=wait.since_ns)
        span.last_ns = span.until_ns = time_ns
        attributes = {
            **_attributes(span, "request_id", "sequence"),
            **_attributes(wait.deferral, "generation", "job_id"),
            **_attributes(wait, "num_deferrals"),
        }
        parent = self._ids.of_request(request.life.ordinal, request.life.trace_parent)
        context = self._ids.within(parent, "wait", request.life.ordinal, wait.sequence)
        self._emit("wait for save", span, context, attributes, parent)

    # --- instants -----------------------------------------------------------------------------

    def looked_up(self, lookup: Lookup) -> None:
        """Add an event to the request's span for an answer that differs from the previous answer.

        Consecutive deferrals become one span, a wait.
        """
        request = self._requests.get(-1 if lookup.ordinal is None else lookup.ordinal)
        if request is None:
            return
        answer = lookup.answer
        if isinstance(answer, e.LookupDeferred):
            if request.wait is None:
                request.wait = _Wait(answer, lookup.sequence, lookup.time_ns)
            else:
                request.wait.num_deferrals += 1
            return
        self._end_wait(lookup.ordinal, lookup.time_ns)
        if not lookup.is_repeated:
            attributes = {
                "kvledger.sequence": lookup.sequence,
                **_attributes(answer, "num_computed_tokens", "num_tokens", "num_hit_tokens", "num_external_tokens"),
                **_attributes(answer, "miss_reason"),
            }
            request.events.append(_Event(answer.id, lookup.time_ns, attributes))

    def happened(self, instant: Instant) -> None:
        """Add an event to the span of the instant's request, or to the log's span if the request has no open span."""
        request = self._requests.get(-1 if instant.ordinal is None else instant.ordinal)
        if not instant.is_trouble and instant.kind not in (_OF_LOG if request is None else _OF_REQUEST):
            return
        attributes: dict[str, AttributeValue] = {
            "kvledger.sequence": instant.sequence,
            "kvledger.text": instant.text,
            **({"kvledger.rule": str(instant.fields["rule"])} if instant.fields.get("rule") else {}),
            **({"kvledger.request_id": instant.request_id} if request is None and instant.request_id else {}),
        }
        event = _Event(instant.kind, instant.time_ns, attributes)
        (self._of_log if request is None else request.events).append(event)
        if request is not None and instant.is_trouble and request.trouble is None:
            request.trouble = instant

    def end(self, time_ns: int) -> None:
        """Emit a span of the whole log, with the events that belong to no request."""
        span = Span(request_id="", sequence=0, since_ns=0, until_ns=time_ns, last_ns=time_ns)
        self._emit("log", span, self._ids.of_request(None, b""), {}, None, self._of_log)

    # --- spans --------------------------------------------------------------------------------

    def _emit(
        self,
        name: str,
        span: Span,
        context: SpanContext,
        attributes: Attributes,
        parent: SpanContext | None,
        events: Iterable[_Event] = (),
        error: str = "",
    ) -> None:
        self._ids.next = context
        made = self._tracer.start_span(
            f"kvledger.{name.replace(' ', '_')}",
            None if parent is None else set_span_in_context(NonRecordingSpan(parent)),
            attributes=attributes if span.until_ns is not None else {**attributes, "kvledger.is_open": True},
            start_time=self._at(span.since_ns),
        )
        for event in events:
            made.add_event(event.name, event.attributes, self._at(event.time_ns))
        if error:
            made.set_status(Status(StatusCode.ERROR, error))
        made.end(self._at(span.last_ns))

    def _at(self, time_ns: int) -> int:
        return min(max(self._opened_at_ns + time_ns, 0), _BEYOND)


def _attributes(record: object, *names: str) -> dict[str, AttributeValue]:
    """Return attribute → value for these fields of a record, without empty values."""
    values = ((name, getattr(record, name)) for name in names)
    return {f"kvledger.{name}": value for name, value in values if value not in (None, "", [], ())}


def _resource(log: StoredLog, log_id: str) -> Resource:
    """Return a description of the spans' source. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` apply as usual."""
    header = log.header
    fields = {
        "service.version": header.get("kvledger_version"),
        "service.instance.id": log_id,
        "kvledger.log.path": str(log.path).encode(errors="replace").decode(),
        "kvledger.log.id": log_id,
        "kvledger.engine_id": header.get("engine_id"),
        "kvledger.connector": header.get("connector"),
        "kvledger.vllm_version": header.get("vllm_version"),
        "kvledger.process_id": header.get("process_id"),
    }
    found = Resource.create({name: value for name, value in fields.items() if value and isinstance(value, str | int)})
    is_named = not str(found.attributes[SERVICE_NAME]).startswith("unknown_service")  # the SDK's default name
    return found if is_named else found.merge(Resource({SERVICE_NAME: "kvledger"}))
