"""When a finished request can be forgotten."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.turn import Turn


def release_if_settled(turn: Turn) -> None:
    """Release a finished request that owes no transfer."""
    record = turn.record
    if not turn.projections.transfers.owes(record.ordinal):
        turn.decide(e.RequestReleased(*record.life, turn.cause))
