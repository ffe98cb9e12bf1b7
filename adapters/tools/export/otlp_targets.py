"""Targets of OpenTelemetry spans: an endpoint for OTLP over HTTP, or a file in the format of the collector.

This module must not depend on the contents of the spans.
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
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan

from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.lifecycle import without_credentials

SPANS_PER_REQUEST: Final = 512
"""Maximum number of spans that are sent together, as in OpenTelemetry's batch processor."""
_PATH: Final = "/v1/traces"
_IDS: Final = ("traceId", "spanId", "parentSpanId")
_LATER: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


class SpanTarget(Protocol):
    """Accepts spans."""

    name: str
    """Name of the target in messages."""

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Accept the spans, or raise."""


class Batches:
    """Collects spans and sends them in groups of `SPANS_PER_REQUEST`. Call `flush` at the end to send the rest."""

    def __init__(self, target: SpanTarget) -> None:
        self._target = target
        self._spans: list[ReadableSpan] = []
        self.num_spans = 0

    def add(self, span: ReadableSpan) -> None:
        """Add a span."""
        self._spans.append(span)
        if len(self._spans) >= SPANS_PER_REQUEST:
            self.flush()

    def flush(self) -> None:
        """Send the collected spans."""
        spans, self._spans = self._spans, []
        if spans:
            self._target.send(spans)
            self.num_spans += len(spans)


class SpanFile:
    """A file of OTLP as JSON, one `ExportTraceServiceRequest` per line, as the collector's file exporter writes it.

    See https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/ .
    """

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name = name
        self._file = file

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Write one line."""
        request: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        for of_resource in request["resourceSpans"]:
            for of_scope in of_resource["scopeSpans"]:
                for span in of_scope["spans"]:
                    # Protobuf's JSON has bytes in base64; OTLP's has ids in hexadecimal.
                    span |= {name: base64.b64decode(span[name]).hex() for name in _IDS if name in span}
        self._file.write(msgspec.json.encode(request) + b"\n")


class SpanEndpoint:
    """A collector, or a backend that accepts OTLP. The SDK's exporter reads the variables `OTEL_EXPORTER_OTLP_*`.

    Args:
        url: `http://host:4318`; `/v1/traces` is added if the URL does not end with it.
    """

    def __init__(self, url: str) -> None:
        self._url = _traces_url(url)
        self.name = without_credentials(self._url, is_address=True)
        self._session = _Session()
        self._exporter = OTLPSpanExporter(self._url, session=self._session)
        self._logger = logging.getLogger("opentelemetry.exporter.otlp")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL)  # the error of this command has the reason

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Send the spans in one request. After a temporary failure, the exporter tries again within its timeout.

        Raises:
            CommandFailed: the endpoint did not accept the spans.
        """
        self._exporter.export(spans)
        outcome = self._session.take_outcome()
        if not isinstance(outcome, requests.Response):
            raise CommandFailed(
                f"{self.name} cannot be reached: {self._reason(outcome)}; check that a receiver for OTLP over HTTP "
                "listens there (port 4318; 4317 is for gRPC), then repeat the command: it sends the same spans",
                ExitCode.TRY_AGAIN,
            )
        status = outcome.status_code
        answered = f"{self.name} answered {status} {outcome.reason}"
        if status in _LATER or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise CommandFailed(f"{answered}; repeat the command: it sends the same spans", ExitCode.TRY_AGAIN)
        if status >= HTTPStatus.MULTIPLE_CHOICES:
            raise CommandFailed(
                f"{answered}; check that the URL belongs to a receiver for OTLP over HTTP, and that "
                "OTEL_EXPORTER_OTLP_HEADERS has the headers that it requires, such as authorization=Bearer%20…",
                ExitCode.REFUSED,
            )

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        self._logger.setLevel(self._level)

    def _reason(self, error: BaseException) -> str:
        """Return the innermost error, without the class names of the three libraries that wrap it."""
        while error.__context__ is not None:
            error = error.__context__
        message = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        return without_credentials(message.replace(self._url, self.name))


class _Session(requests.Session):
    """Keeps the response or error of the last HTTP request. The exporter returns only whether the request succeeded."""

    _outcome: requests.Response | Exception | None = None

    def request(self, *arguments: Any, **options: Any) -> requests.Response:  # noqa: ANN401
        try:
            # Older exporters follow redirects, which turn the POST into a GET without the spans.
            self._outcome = super().request(*arguments, **{**options, "allow_redirects": False})
        except Exception as error:
            self._outcome = error
            raise
        return self._outcome

    def take_outcome(self) -> requests.Response | Exception:
        outcome, self._outcome = self._outcome, None
        return RuntimeError("OpenTelemetry's exporter sent no request") if outcome is None else outcome


def is_endpoint(target: str) -> bool:
    """Whether the target is an endpoint and not a file.

    Raises:
        CommandFailed: the target looks like an endpoint but is not a valid one.
    """
    shown = without_credentials(target, is_address=True)
    if re.match(r"https?://", target, re.IGNORECASE):
        try:
            has_host = bool(urlsplit(target).hostname) and urlsplit(target).port != 0
        except ValueError:
            has_host = False
        if not has_host:
            raise CommandFailed(f"--otlp {shown}: the URL has no host; give http://host:4318")
        return True
    if "://" in target:
        raise CommandFailed(f"--otlp {shown}: only OTLP over HTTP is supported; give http://host:4318, or a file")
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", target):
        raise CommandFailed(f"--otlp {target}: this can be an endpoint or a file; give http://{target} or ./{target}")
    return False


def _traces_url(url: str) -> str:
    """Return the endpoint's URL for traces: the given base and `/v1/traces`, as in the specification."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith(_PATH) else path + _PATH))
