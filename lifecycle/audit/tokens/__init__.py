"""Tokens: how many are computed, promised, loaded and scheduled."""

from kvledger.lifecycle.audit.tokens.alloc_matches_lookup import AllocMatchesLookup
from kvledger.lifecycle.audit.tokens.defer_bounded import DeferBounded
from kvledger.lifecycle.audit.tokens.external_zero_no_load import ExternalZeroNoLoad
from kvledger.lifecycle.audit.tokens.last_token import LastToken
from kvledger.lifecycle.audit.tokens.longest_hit import LongestHit
from kvledger.lifecycle.audit.tokens.lookup_pure import LookupPure
from kvledger.lifecycle.audit.tokens.resume_covers_output import ResumeCoversOutput
from kvledger.lifecycle.audit.tokens.rollback_observed import RollbackObserved
from kvledger.lifecycle.audit.tokens.step_sum import StepSum
from kvledger.lifecycle.audit.tokens.token_conservation import TokenConservation

CHECKERS = (
    LookupPure,
    LongestHit,
    LastToken,
    AllocMatchesLookup,
    ExternalZeroNoLoad,
    TokenConservation,
    DeferBounded,
    ResumeCoversOutput,
    RollbackObserved,
    StepSum,
)
