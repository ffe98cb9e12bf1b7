"""Stories to bytes and back, for an index; the format may change with every version of it."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any, get_args

import msgspec

from kvledger.adapters.reasons import RequestHistory


def encode_story(story: RequestHistory) -> bytes:
    """For an index."""
    return zlib.compress(msgspec.msgpack.encode(story), 1)


def decode_story(stored: bytes) -> RequestHistory:
    """The other way round."""
    return msgspec.msgpack.decode(zlib.decompress(stored), type=RequestHistory, dec_hook=counter)


def counter(counter_type: type, counts: dict[str, int]) -> Counter[Any]:
    """What `msgspec` cannot decode by itself: counts by the members of an enumeration."""
    (key_type,) = get_args(counter_type)
    return Counter({key_type(key): count for key, count in counts.items()})
