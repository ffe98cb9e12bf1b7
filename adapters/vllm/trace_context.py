"""Reads from a request's headers which span of a distributed trace the request belongs to.

vLLM passes the headers on. kvledger keeps nothing else from them, because `tracestate` may contain anything about the
caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_TRACEPARENT: Final = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<span>[0-9a-f]{16})-[0-9a-f]{2}"
    r"(?P<more>-.*)?",
    re.ASCII,
)


def trace_parent(headers: Mapping[str, str] | None) -> bytes:
    """Return the caller's span (W3C Trace Context): 16 bytes of the trace's id, then 8 bytes of the span's id.

    Empty if there is no valid header. An invalid header raises no error, because a client wrote it. `headers` are
    `Request.trace_headers` (`vllm/v1/request.py`, 0.32): the caller's `traceparent` and `tracestate`, or None. vLLM's
    server passes the headers on only with `--otlp-traces-endpoint`.
    """
    header = headers.get("traceparent") if isinstance(headers, Mapping) else None
    found = _TRACEPARENT.fullmatch(header.strip(" \t")) if isinstance(header, str) else None
    if found is None or (found["version"] == "00" and found["more"]):
        return b""
    return bytes.fromhex(found["trace"] + found["span"])
