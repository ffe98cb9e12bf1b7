"""Which span of a distributed trace a request belongs to, read from the headers that vLLM hands on.

Of the headers nothing else is kept: `tracestate` may say anything about who calls. It must not know of spans.
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
    """The caller's span, by W3C's Trace Context: the 16 bytes of the trace's id, then the 8 of the span's; or nothing.

    What is not exactly such a header counts as none, and nothing is raised: a client wrote it.

    Args:
        headers: `Request.trace_headers` (`vllm/v1/request.py`, 0.32): `traceparent` and `tracestate` of the caller, or
            None. vLLM's server hands them on only with `--otlp-traces-endpoint`.
    """
    header = headers.get("traceparent") if isinstance(headers, Mapping) else None
    found = _TRACEPARENT.fullmatch(header.strip(" \t")) if isinstance(header, str) else None
    if found is None or (found["version"] == "00" and found["more"]):
        return b""
    return bytes.fromhex(found["trace"] + found["span"])
