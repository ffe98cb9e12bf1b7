"""A decoding request: as in prefill, but there is no progress left to tell."""

from __future__ import annotations

from kvledger.lifecycle.handlers.chunked_prefill import Computing
from kvledger.lifecycle.states import RequestState


class Running(Computing):
    """Every known token is computed or in flight."""

    state = RequestState.RUNNING
