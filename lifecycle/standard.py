"""The standard core: combines kvledger's own events, transition tables, handlers and rules.

`projections/__init__.py` has the core's projections and the order in which they fold.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvledger.lifecycle.audit.rules import RULES
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.events import STANDARD_EVENTS
from kvledger.lifecycle.handlers import STANDARD_HANDLERS
from kvledger.lifecycle.table import GATING, JOB_REGIONS, REGIONS
from kvledger.lifecycle.upcasters import Upcasters

NOT_CHECKED: Mapping[str, str] = MappingProxyType(
    {
        "STEP_WHILE_PENDING": "idle steps of the engine are not recorded",
        "ROUNDTRIP": "bytes of the KV cache never enter the log",
        "EVENTS_EQ_RESIDENCY": "published KV events are not recorded, only the log's events that they are made from",
    }
)
UPCASTERS: Upcasters = MappingProxyType({})  # every event is in its first version


def standard_core() -> Core:
    """Return the core of kvledger's connector."""
    return Core(
        events=STANDARD_EVENTS,
        regions=REGIONS,
        job_regions=JOB_REGIONS,
        gating=GATING,
        handlers=MappingProxyType({handler.state: (handler,) for handler in STANDARD_HANDLERS}),
        rules=RULES,
        not_checked=NOT_CHECKED,
        upcasters=UPCASTERS,
    )
