"""What is kept of the headers by which a caller's span is known, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvledger.adapters.vllm.trace_context import trace_parent
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = (
    *(f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f" 00-{TRACE}-{SPAN}-01\t", f"cc-{TRACE}-{SPAN}-01-what"),
    *(f"cc-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-what", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}"),
    *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}-1"),
    *(
        "",
        "00",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-zz",
        "\u0660" * 55,
        "x" * 100_000,
    ),
)


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header[:60])
def test_the_callers_span_is_what_opentelemetry_reads(header: str) -> None:
    """VLLM asks OpenTelemetry for the span that its own is a child of; two answers would be two traces."""
    context = TraceContextTextMapPropagator().extract({"traceparent": header})
    span = get_current_span(context).get_span_context()
    expected = span.trace_id.to_bytes(16, "big") + span.span_id.to_bytes(8, "big") if span.is_valid else b""
    assert trace_parent({"traceparent": header}) == expected


@pytest.mark.parametrize(
    "headers", [None, {}, {"tracestate": "a=1"}, {"traceparent": 7}, ["traceparent"], "traceparent"]
)
def test_without_a_header_there_is_no_trace(headers: Any) -> None:
    """Nor where it is no header at all; nothing is raised into vLLM."""
    assert trace_parent(headers) == b""


def test_an_arrival_keeps_the_callers_span_and_nothing_else_of_the_headers(make_engine: Any) -> None:
    """24 bytes, or none; what a vendor wrote into `tracestate` is nobody's business."""
    engine = make_engine(num_blocks=20, chunk_size=16)
    engine.add("traced", range(20), 2, trace_headers={"traceparent": HEADERS[0], "tracestate": "vendor=secret"})
    engine.add("untraced", range(20), 2)
    engine.run()
    assert [event.trace_parent.hex() for event in engine.logged(e.RequestArrived)] == [TRACE + SPAN, ""]
    assert b"secret" not in b"".join(stored.payload for stored in engine.connector.scheduler_side.log.store.read())
