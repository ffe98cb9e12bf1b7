"""What the audit knows of a log, made apart from what decides: a mistake there must not hide itself.

Observations and recorded decisions go in, nothing of `projections/` or `decisions/`; what is shared by nature is
geometry, windows, the vocabulary and the transition table.
"""

from kvledger.lifecycle.audit.model.model import Model

__all__ = ["Model"]
