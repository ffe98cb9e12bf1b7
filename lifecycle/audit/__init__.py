"""The audit: one checker per rule of `docs/invariants.md`, run over a stored log.

Pure like the rest of the core: events in, violations out. Checkers ask a model of the audit's own, see `model/`, and
cannot reach what decided; an import contract and a test hold that. Each checker says what it verifies and what it does
not; rules that no checker can decide stand in `Core.not_checked` with the reason.
"""

from kvledger.lifecycle.audit.audit import Audit
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.judgement import Judgement, Unfoldable
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.audit.rules.recorded import Recorded
from kvledger.lifecycle.audit.start import Start, StartFolds
from kvledger.lifecycle.audit.violations import Violation
from kvledger.lifecycle.reader.moment import Moment, Visits, num_intact_tokens

__all__ = [
    "RECORDED",
    "Audit",
    "AuditModel",
    "Checker",
    "Judgement",
    "Moment",
    "Start",
    "StartFolds",
    "Unfoldable",
    "Violation",
    "Visits",
    "num_intact_tokens",
]

RECORDED = Recorded.rule
"""The rule of what the connector noticed and recorded itself."""
