"""The ranges of the numbers that a log may hold.

Types of event fields, which msgspec checks while it decodes. A number outside its range makes its frame undecodable,
and readers report such a frame as damage. Encoding checks nothing, because a hook must not raise. So each range holds
everything that vLLM, a worker or a wrong connector can say in service. A number that is merely wrong is for the rules
to name.

Fields of the projections' states have the same types, keys of dicts too: a snapshot holds what folds make of events. A
state with a number outside its range is refused as a whole. Sums have wider ranges than the numbers that they add up.

No reader may loop or allocate by such a number alone, however small its range is.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_INT64 = 2**63 - 1
MAX_TOKENS = 2**31 - 1
"""vLLM keeps token counts in 32-bit integers (`v1/worker/gpu_input_batch.py`, 0.32)."""
MAX_COUNT = 2**53
"""Every integer up to here is exact in JSON, also for readers that use floating-point numbers."""
MAX_NS = 2**62
"""146 years in nanoseconds."""
MAX_RANKS = 4096
MAX_SLOTS = 2**32
MAX_BLOCK_TOKENS = 2**24
"""Tokens of a block or a chunk; the blocks of a state space model may be as long as the longest request."""
MAX_GROUPS = 256

TimeNs = Annotated[int, Meta(ge=0, le=MAX_NS)]
"""Nanoseconds since the log was opened."""
DurationNs = Annotated[int, Meta(ge=0, le=MAX_NS)]
"""Nanoseconds that something took."""
NumTokens = Annotated[int, Meta(ge=-MAX_TOKENS, le=MAX_TOKENS)]
"""Tokens that vLLM or kvledger has counted. A negative number is wrong, and TOKEN_CONSERVATION names it."""
SumOfTokens = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
"""Tokens that a state has added up, or the difference of such a sum and another number."""
Int64 = Annotated[int, Meta(ge=-(2**63), le=MAX_INT64)]
"""A digest, or a number from a worker or from a recorded connector, which may be any; a rule judges it."""
NumBytes = Annotated[int, Meta(ge=0, le=MAX_NS)]
"""Bytes that were copied."""
ChunkNumber = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
"""A chunk of a request, counted from 0; or a number of chunks."""
BlockId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""A block of the device's KV cache; 0 is vLLM's null block."""
BlockNumber = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
"""The place of a block in a request's table, counted from 0."""
Slot = Annotated[int, Meta(ge=-1, le=MAX_SLOTS - 1)]
"""A slot of the host pool; -1 (`NO_SLOT`) for a page that is not stored."""
NumSlots = Annotated[int, Meta(ge=0, le=MAX_SLOTS)]
"""A number of slots, or a slot that is there."""
Group = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
"""A group of layers, counted from 0."""
JobId = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""A copy; 0 for none."""
Ordinal = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
"""A life of a request, counted from 0; -1 (`NO_LIFE`) for none."""
LifeOrdinal = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""A life of a request that has begun."""
Generation = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
"""How often a life lost what it had computed; -1 (`NO_LIFE`) without a life."""
Step = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""A step of the engine, counted from 0."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""How often something happened."""
Sequence = Annotated[int, Meta(ge=0, le=MAX_INT64)]
"""The sequence number of an event; 0 for none."""
