"""What whoever builds an index knew at its end, so that an index of a log that has grown is continued, not built anew.

Plain values, of which nothing is checked but their types: an index may be false, it can make nothing else happen.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvledger.adapters.tools.reasons import State
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle.snapshots import state_fingerprint


class IndexMemory(msgspec.Struct, forbid_unknown_fields=True):
    """Everything that goes on: what is over is in the index."""

    reader: bytes = b""
    """What the reader knows, and the requests that are not over, as `Reader.capture` returns it."""
    num_batches: int = 0
    time_ns: int = 0
    """The latest time before the last place at which reading can begin."""
    accounts: State = msgspec.field(default_factory=State)
    projections: bytes = b""
    """As `lifecycle.snapshots` captures them; empty where they cannot be folded on."""
    totals: bytes = b""
    """As `Totals` stores them."""


def memory_fingerprint(core: Core, configuration: LedgerConfiguration) -> str:
    """What must be equal for a memory to mean the same: the layout of its classes, and what the projections hold."""
    layout = msgspec.inspect.type_info(IndexMemory)
    return hashlib.blake2b(f"{layout} {state_fingerprint(core, configuration)}".encode(), digest_size=16).hexdigest()
