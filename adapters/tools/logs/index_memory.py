"""What whoever builds an index knew at its end, so that an index of a log that has grown is continued, not built anew.

Plain values, of which nothing is checked but their types: an index may be false, it can make nothing else happen.
"""

from __future__ import annotations

import hashlib

import msgspec


class IndexMemory(msgspec.Struct, forbid_unknown_fields=True):
    """Everything that goes on: what is over is in the index."""

    reader: bytes = b""
    """What the reader knows, the requests that are not over, the totals and the reasons, as `Reader.capture` returns
    it."""
    num_batches: int = 0
    time_ns: int = 0
    """The latest time before the last place at which reading can begin."""


def memory_fingerprint() -> str:
    """What must be equal for a memory to mean the same, besides what the reader compares: the layout of its classes."""
    layout = msgspec.inspect.type_info(IndexMemory)
    return hashlib.blake2b(f"{layout}".encode(), digest_size=16).hexdigest()
