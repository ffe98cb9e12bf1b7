"""The core of kvledger: the life of a request as a state machine whose state is computed from events.

Read its modules in this order: `states`, `events`, `table`, `declaration`, `machine`, `projections/`, `turn`,
`decisions/`, `handlers`, `extension`, `core`, `standard`, `ledger`, `divergences`, `replay`, `codec`. The core uses no
torch, no vLLM, no files and no clock.

Other programs may use the following modules. All other modules may change without notice:

- this module, `events`, `audit` and, for tests, `testing`
- `handlers` and `decisions`: to change decisions, subclass a handler and combine functions of `decisions`
- `codec` and `snapshots`: to read and write logs and snapshots as bytes
- `geometry`: to lay out pages
- `ranges`: the ranges of the numbers in a log
"""

from kvledger.lifecycle import decisions, handlers
from kvledger.lifecycle.codec import log_header
from kvledger.lifecycle.configuration import ConfigurationError, LedgerConfiguration, Refusal
from kvledger.lifecycle.copy_moments import CopyMoments, Hook, Moment
from kvledger.lifecycle.core import Core, CoreError
from kvledger.lifecycle.divergences import Divergence
from kvledger.lifecycle.errors import Unstoppable, described, raise_if_unstoppable, suppressed, without_secrets
from kvledger.lifecycle.events import MissReason
from kvledger.lifecycle.extension import Extension
from kvledger.lifecycle.handlers import StateHandler
from kvledger.lifecycle.ledger import EventSink, Ledger, LedgerCorrupt, effects_delivered
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections import Projection, Projections, ProjectionSpec
from kvledger.lifecycle.projections.base import Subject
from kvledger.lifecycle.projections.computed_tokens import ComputedTokens
from kvledger.lifecycle.projections.copies import NOTHING_OWED, Channel, PageJob, Ready
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.replay import Replay, SequencedEvent, batches, fold
from kvledger.lifecycle.request_ids import begins_as, cut_request_id, logged_request_id
from kvledger.lifecycle.rules import Rule
from kvledger.lifecycle.shown import Hidden, without_credentials
from kvledger.lifecycle.states import BlocksRegion, RequestState, TrustRegion
from kvledger.lifecycle.steps import Scheduled, StepEncoder
from kvledger.lifecycle.turn import Turn
from kvledger.lifecycle.version import __version__

__all__ = [
    "NOTHING_OWED",
    "BlocksRegion",
    "Channel",
    "ComputedTokens",
    "ConfigurationError",
    "CopyMoments",
    "Core",
    "CoreError",
    "Divergence",
    "EventSink",
    "Extension",
    "Hidden",
    "Hook",
    "Ledger",
    "LedgerConfiguration",
    "LedgerCorrupt",
    "MissReason",
    "Moment",
    "PageJob",
    "Projection",
    "ProjectionSpec",
    "Projections",
    "Ready",
    "Refusal",
    "Replay",
    "RequestRecord",
    "RequestState",
    "Rule",
    "Scheduled",
    "SequencedEvent",
    "StateHandler",
    "StepEncoder",
    "Subject",
    "TrustRegion",
    "Turn",
    "Unstoppable",
    "__version__",
    "batches",
    "begins_as",
    "cut_request_id",
    "decisions",
    "described",
    "effects_delivered",
    "fold",
    "handlers",
    "log_header",
    "logged_request_id",
    "on",
    "raise_if_unstoppable",
    "suppressed",
    "without_credentials",
    "without_secrets",
]
