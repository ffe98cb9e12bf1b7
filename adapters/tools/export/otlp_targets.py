"""Where spans for OpenTelemetry go: an endpoint that speaks OTLP over HTTP, or a file as the collector's own.

It must not know what the spans say.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import IO, Any, Final, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec
import requests
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.lifecycle import without_credentials

SPANS_PER_REQUEST: Final = 512
"""As many as OpenTelemetry's batch processor sends at once."""
_PATH: Final = "/v1/traces"
_IDS: Final = ("traceId", "spanId", "parentSpanId")
_LATER: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


class SpanTarget(Protocol):
    """What takes spans."""

    name: str
    """For messages."""
    is_endpoint: bool
    num_rejected: int
    """Of the spans that were sent: what an endpoint said that it dropped, and `why_rejected`."""
    why_rejected: str

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Take these, or raise."""


class Batches:
    """Collects spans and sends so many at once; `flush` sends the last ones."""

    def __init__(self, target: SpanTarget) -> None:
        self._target = target
        self._spans: list[ReadableSpan] = []
        self.num_spans = 0

    def add(self, span: ReadableSpan) -> None:
        """Take up one span."""
        self._spans.append(span)
        if len(self._spans) >= SPANS_PER_REQUEST:
            self.flush()

    def flush(self) -> None:
        """Send what has been collected."""
        spans, self._spans = self._spans, []
        if spans:
            self._target.send(spans)
            self.num_spans += len(spans)


class SpanFile:
    """OTLP as JSON, an `ExportTraceServiceRequest` a line: what the collector's file exporter writes.

    See https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/ .
    """

    is_endpoint = False
    num_rejected = 0
    why_rejected = ""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name = name
        self._file = file
        self._encode = msgspec.json.Encoder().encode

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Write a line."""
        request: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        for of_resource in request["resourceSpans"]:
            for of_scope in of_resource["scopeSpans"]:
                for span in of_scope["spans"]:
                    # Protobuf's JSON has bytes in base64; OTLP's has ids in hexadecimal.
                    span |= {name: base64.b64decode(span[name]).hex() for name in _IDS if name in span}
        self._file.write(self._encode(request) + b"\n")


class SpanEndpoint:
    """A collector, or a backend that takes OTLP itself. `OTEL_EXPORTER_OTLP_*` say headers, timeout and certificates.

    Args:
        url: `http://host:4318`; `/v1/traces` is added where it does not stand there.
    """

    is_endpoint = True

    def __init__(self, url: str) -> None:
        self.url = traces_url(url)
        self.name = without_credentials(self.url, is_address=True)
        self._num_sent = 0
        self.num_rejected = 0
        self.why_rejected = ""
        self._session = _Session()
        self._said = _Said()
        self._logger = logging.getLogger("opentelemetry.exporter.otlp")
        self._logger.addHandler(self._said)
        self._propagates, self._logger.propagate = self._logger.propagate, False
        self._exporter = OTLPSpanExporter(self.url, session=self._session)

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Send one request, again where that may help, within the timeout.

        Raises:
            CommandFailed: they were not taken.
        """
        self._session.forget()
        taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        answer = self._session.answer
        if answer is None or not taken or answer.is_redirect:
            raise self._failure(answer)
        self._num_sent += len(spans)
        self._note_rejected(answer.content)

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        self._logger.removeHandler(self._said)
        self._logger.propagate = self._propagates

    def _why_unreachable(self) -> str:
        """The innermost reason: around it stand the names of three libraries' classes."""
        error, said = self._session.error, self._said.last
        if error is not None:
            while error.__context__ is not None:
                error = error.__context__
            said = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        return without_credentials(said.replace(self.url, self.name))

    def _note_rejected(self, body: bytes) -> None:
        """A collector may take some of them and say so; where it answers something else, it took all."""
        try:
            answer = ExportTraceServiceResponse.FromString(body)
        except DecodeError:
            return
        self.num_rejected += answer.partial_success.rejected_spans
        self.why_rejected = self.why_rejected or answer.partial_success.error_message

    def _failure(self, answer: requests.Response | None) -> CommandFailed:
        done = f"; {self._num_sent} spans were sent before" if self._num_sent else ""
        again = f"{done}; the same command sends the same spans again"
        if answer is None:
            message = (
                f"{self.name} cannot be reached: {self._why_unreachable()}; see that a receiver for OTLP over HTTP is "
                f"there (port 4318; 4317 is gRPC's){again}"
            )
            return CommandFailed(message, ExitCode.TRY_AGAIN)
        if answer.is_redirect:
            where = without_credentials(answer.headers["location"], is_address=True)
            return CommandFailed(
                f"{self.name} answers that traces are taken at {where}: name that{done}", ExitCode.REFUSED
            )
        said = f"{self.name} answered {answer.status_code} {answer.reason}"
        if answer.status_code in _LATER or answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return CommandFailed(f"{said}{again} once it takes them", ExitCode.TRY_AGAIN)
        remedy = "see that the URL is that of a receiver for OTLP over HTTP"
        if answer.status_code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            remedy = "OTEL_EXPORTER_OTLP_HEADERS has what it asks for, such as authorization=Bearer%20…"
        return CommandFailed(f"{said}; {remedy}{done}", ExitCode.REFUSED)


class _Session(requests.Session):
    """Remembers how the last request went: the exporter answers only whether it went well.

    It follows no redirect, behind which a POST may become a GET and spans get lost.
    """

    answer: requests.Response | None = None
    error: BaseException | None = None

    def forget(self) -> None:
        self.answer = self.error = None

    def send(self, request: requests.PreparedRequest, **options: object) -> requests.Response:
        try:
            self.answer = super().send(request, **{**options, "allow_redirects": False})
        except requests.RequestException as error:
            self.error = error
            raise
        return self.answer


class _Said(logging.Handler):
    """What the SDK has to say about a failure, which it says only to its logger."""

    last = "no answer"

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def is_endpoint(target: str) -> bool:
    """Whether spans are sent there, and not written.

    Raises:
        CommandFailed: it looks like an endpoint and is none.
    """
    shown = without_credentials(target, is_address=True)
    if re.match(r"https?://", target, re.IGNORECASE):
        try:
            has_host = bool(urlsplit(target).hostname) and urlsplit(target).port != 0
        except ValueError:
            has_host = False
        if not has_host:
            raise CommandFailed(f"--otlp {shown}: there is no host in it; give http://host:4318")
        return True
    if "://" in target:
        raise CommandFailed(f"--otlp {shown}: only OTLP over HTTP is spoken; give http://host:4318, or a file")
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", target):
        raise CommandFailed(f"--otlp {target}: for an endpoint give http://{target}, for a file ./{target}")
    return False


def traces_url(url: str) -> str:
    """The URL of an endpoint for traces: the base that was given, and `/v1/traces`, as the specification says."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith(_PATH) else path + _PATH))
