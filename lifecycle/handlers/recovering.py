"""A recovering request: KV comes back into its new blocks; it runs again when its load has arrived."""

from __future__ import annotations

from kvledger.lifecycle.handlers.chunked_prefill import Computing
from kvledger.lifecycle.handlers.new import Waiting
from kvledger.lifecycle.states import RequestState


class Recovering(Computing, Waiting):
    """Is looked up and leaves waiting like a new request; is preempted and ends like one that has computed tokens."""

    state = RequestState.RECOVERING
