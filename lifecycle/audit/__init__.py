"""The audit: one checker per rule of `docs/invariants.md`, run over a stored log.

The package is pure, as is the rest of the core: it takes events and returns violations. Checkers query the audit's own
model (`model.py`). An import contract and a test forbid them to import the code that decides. Each checker states what
it verifies and what it does not verify. `Core.not_checked` lists the rules that no checker can decide.
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
"""Name of the rule that reports the violations and failed hooks that the connector itself recorded."""
