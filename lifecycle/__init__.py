"""The lifecycle of a request as an event-sourced state machine: the pure core of kvledger.

Reads top to bottom: `states`, `events`, `table`, `machine`, `gate`, `projections/`, `decisions/`, `handlers/`, `core`,
`standard`, `decider`, `ledger`, `divergences`, `replay`, `codec`. It knows no torch, no vLLM, no files and no clock.
What a program needs is here, in `events`, in `audit` and, for tests, in `testing`; nothing deeper is promised.
"""

from kvledger.lifecycle.codec import (
    CodecError,
    DecodedFrame,
    EventDecoder,
    EventEncoder,
    SchemaTooNew,
    log_header,
    vocabulary_header,
)
from kvledger.lifecycle.configuration import ConfigurationError, LedgerConfiguration
from kvledger.lifecycle.core import Core, CoreError
from kvledger.lifecycle.divergences import Divergence
from kvledger.lifecycle.extension import Extension
from kvledger.lifecycle.handlers import StateHandler
from kvledger.lifecycle.ledger import EventSink, Ledger, LedgerCorrupt
from kvledger.lifecycle.projections import Projections, ProjectionSpec
from kvledger.lifecycle.projections.lookup_cache import MissReason
from kvledger.lifecycle.projections.totals import Figures
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.replay import Replay, SequencedEvent, batches, fold
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.snapshots import SnapshotError, capture, restore, state_fingerprint
from kvledger.lifecycle.states import BlocksRegion, RequestState, TrustRegion
from kvledger.lifecycle.steps import Scheduled, StepEncoder
from kvledger.lifecycle.turn import Turn
from kvledger.lifecycle.windows import NO_SLOT, NULL_BLOCK, interleave

__all__ = [
    "NO_SLOT",
    "NULL_BLOCK",
    "BlocksRegion",
    "CodecError",
    "ConfigurationError",
    "Core",
    "CoreError",
    "DecodedFrame",
    "Divergence",
    "EventDecoder",
    "EventEncoder",
    "EventSink",
    "Extension",
    "Figures",
    "Ledger",
    "LedgerConfiguration",
    "LedgerCorrupt",
    "MissReason",
    "ProjectionSpec",
    "Projections",
    "Replay",
    "RequestRecord",
    "RequestState",
    "Rule",
    "Scheduled",
    "SchemaTooNew",
    "SequencedEvent",
    "SnapshotError",
    "StateHandler",
    "StepEncoder",
    "TrustRegion",
    "Turn",
    "batches",
    "capture",
    "fold",
    "interleave",
    "log_header",
    "restore",
    "state_fingerprint",
    "vocabulary_header",
]
