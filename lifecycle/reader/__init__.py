"""What a log says, made apart from what decides: a mistake there must not hide itself.

Observations and recorded decisions go in, nothing of `projections/` or `decisions/`. Where tokens lie is computed in
`layout.py`. What is shared by nature is the vocabulary and the transition table.
"""

from kvledger.lifecycle.reader.model import Model
from kvledger.lifecycle.reader.moment import EventChecks, Moment, num_intact_tokens
from kvledger.lifecycle.reader.start import Start

__all__ = ["EventChecks", "Model", "Moment", "Start", "num_intact_tokens"]
