"""What the audit knows of a log, made apart from what decides: a mistake there must not hide itself.

Observations and recorded decisions go in, nothing of `projections/` or `decisions/`. Where tokens lie is computed in
`spans.py`. What is shared by nature is the vocabulary and the transition table.
"""

from kvledger.lifecycle.audit.model.model import Model

__all__ = ["Model"]
