"""Jobs: how copies are reported and settled."""

from kvledger.lifecycle.audit.jobs.completion_once import CompletionOnce
from kvledger.lifecycle.audit.jobs.delivered_once import DeliveredOnce
from kvledger.lifecycle.audit.jobs.liveness import Liveness
from kvledger.lifecycle.audit.jobs.rank_agreement import RankAgreement

CHECKERS = (
    CompletionOnce,
    DeliveredOnce,
    RankAgreement,
    Liveness,
)
