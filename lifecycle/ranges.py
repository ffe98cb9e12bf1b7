"""Ranges of the numbers in a log.

The ranges are types of event fields. Msgspec checks them when it decodes a log. A number outside its range makes its
frame undecodable, and readers report the frame as damage. Encoding checks no ranges, because a hook must not raise.
Each range therefore includes every number that vLLM, a worker or a faulty connector can send. Rules report wrong
numbers inside a range.

Fields and dict keys of the projections' states have the same types, because snapshots contain these states. A state
with a number outside its range is refused as a whole. Sums have wider ranges than the numbers that they add up.

A reader must not use a number from a log as the length of a loop or an allocation without another check, however small
the number's range is.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_INT64 = 2**63 - 1
MAX_TOKENS = 2**31 - 1
"""vLLM keeps token counts in 32-bit integers (`v1/worker/gpu_input_batch.py`, 0.32)."""
MAX_COUNT = 2**53
"""Largest integer up to which all integers are exact in JSON, even for programs that use floating-point numbers."""
MAX_NS = 2**62
"""146 years in nanoseconds."""
MAX_RANKS = 4096
MAX_SLOTS = 2**32
MAX_BLOCK_TOKENS = 2**24
"""Most tokens of a block or a chunk. A block of a state space model may be as long as the longest request."""
MAX_GROUPS = 256

TimeNs = Annotated[int, Meta(ge=0, le=MAX_NS)]
"""Nanoseconds since the log was opened."""
DurationNs = Annotated[int, Meta(ge=0, le=MAX_NS)]
"""Duration in nanoseconds."""
NumTokens = Annotated[int, Meta(ge=-MAX_TOKENS, le=MAX_TOKENS)]
"""Tokens, as vLLM or kvledger counted them. The rule TOKEN_CONSERVATION reports a negative number."""
SumOfTokens = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
"""Sum of numbers of tokens in a projection's state, or the difference between such a sum and another number."""
Int64 = Annotated[int, Meta(ge=-(2**63), le=MAX_INT64)]
"""A digest, or any number from a worker or a recorded connector. The range allows every 64-bit number."""
NumBytes = Annotated[int, Meta(ge=0, le=MAX_NS)]
"""Bytes that were copied."""
ChunkNumber = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
"""Index of a chunk in its request, from 0; or a number of chunks."""
BlockId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""Id of a block of the device's KV cache; 0 is vLLM's null block."""
BlockNumber = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
"""Index of a block in a request's table, from 0."""
Slot = Annotated[int, Meta(ge=-1, le=MAX_SLOTS - 1)]
"""Slot of the host pool; -1 (`NO_SLOT`) for a page that is not stored."""
NumSlots = Annotated[int, Meta(ge=0, le=MAX_SLOTS)]
"""How many slots, or which slot of the host pool."""
Group = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
"""Index of a group of layers, from 0."""
JobId = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""Id of a job; 0 for no job."""
Ordinal = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
"""Ordinal of a life, from 0; -1 (`NO_LIFE`) for no life."""
LifeOrdinal = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""Ordinal of a life, from 0, in a field that always has a life."""
Generation = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
"""Generation of a life, from 0; -1 (`NO_LIFE`) for no life."""
Step = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""Index of an engine step, from 0."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""How many things there are or how often something happened, or an extension's version."""
Sequence = Annotated[int, Meta(ge=0, le=MAX_INT64)]
"""Sequence number of an event; 0 for no event."""
