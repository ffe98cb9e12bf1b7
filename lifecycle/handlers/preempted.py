"""A preempted request: polled until there are blocks, then loaded as far as the host pool reaches."""

from __future__ import annotations

from kvledger.lifecycle.handlers.new import Waiting
from kvledger.lifecycle.states import RequestState


class Preempted(Waiting):
    """It has no blocks. Lookups cover prompt and output tokens alike."""

    state = RequestState.PREEMPTED
