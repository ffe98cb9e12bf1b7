"""Rules that a log of today cannot decide, and why. A reader must not take silence about them for soundness."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NOT_CHECKED: Mapping[str, str] = MappingProxyType(
    {
        "STEP_WHILE_PENDING": "idle steps of the engine are not recorded",
        "ROUNDTRIP": "bytes of the KV cache never enter the log",
        "EVENTS_EQ_RESIDENCY": "published KV events are not recorded",
    }
)
"""Rule -> reason."""
