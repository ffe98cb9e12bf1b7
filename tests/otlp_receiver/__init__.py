"""A receiver of OTLP over HTTP, and spans as tests look at them, decoded with OpenTelemetry's own messages."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

__all__ = ["ReceivedSpan", "Receiver", "receiving", "spans_of_lines"]


@attrs.frozen
class ReceivedSpan:
    """A span with the resource that it came with. Ids in hexadecimal, times in Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: tuple[tuple[str, int, Mapping[str, Any]], ...]
    is_error: bool
    message: str
    resource: Mapping[str, Any]

    def of_ours(self, name: str) -> Any:
        """One of kvledger's attributes, None where it is not there."""
        return self.attributes.get(f"kvledger.{name}")


@attrs.define
class Receiver:
    """What has come in. The next requests get `answers`: HTTP status codes. After them every request gets 200."""

    url: str
    spans: list[ReceivedSpan] = attrs.field(factory=list)
    requests: list[tuple[str, Mapping[str, str]]] = attrs.field(factory=list)
    """Path and headers, in small letters."""
    answers: list[int] = attrs.field(factory=list)


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port of the loopback interface."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            status = receiver.answers.pop(0) if receiver.answers else 200
            if status < 300:
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.spans += _spans(ExportTraceServiceRequest.FromString(body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


def spans_of_lines(text: str) -> list[ReceivedSpan]:
    """The spans of a file of OTLP as JSON, read by Protobuf's parser, which has bytes in base64."""
    found = []
    for line in text.splitlines():
        request = json.loads(line)
        for span in (
            span for resource in request["resourceSpans"] for scope in resource["scopeSpans"] for span in scope["spans"]
        ):
            for name in ("traceId", "spanId", "parentSpanId"):
                if name in span:
                    assert len(span[name]) == (32 if name == "traceId" else 16)
                    span[name] = b64encode(bytes.fromhex(span[name])).decode()
        found += _spans(ParseDict(request, ExportTraceServiceRequest()))
    return found


def _spans(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for of_resource in request.resource_spans:
        resource = _values(of_resource.resource.attributes)
        for span in (span for of_scope in of_resource.scope_spans for span in of_scope.spans):
            yield ReceivedSpan(
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.name,
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                _values(span.attributes),
                tuple((event.name, event.time_unix_nano, _values(event.attributes)) for event in span.events),
                span.status.code == span.status.STATUS_CODE_ERROR,
                span.status.message,
                resource,
            )


def _values(attributes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    each: KeyValue
    for each in attributes:
        kind = each.value.WhichOneof("value")
        assert kind is not None, each
        value = getattr(each.value, kind)
        found[each.key] = [item.int_value for item in value.values] if kind == "array_value" else value
    return found
