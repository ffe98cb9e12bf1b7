"""Token ids for requests of which a log has only chunk keys.

A key stands for a chunk and everything before it, so the tokens of a chunk are drawn from its key: equal keys give
equal tokens, and thus equal block hashes. The keys that come of them differ from the recorded ones, one for one. Where
no key is known, nobody else has the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def tokens_of_chunk(key: bytes, chunk_size: int) -> list[int]:
    """The tokens of the chunk that ends with `key`."""
    return _draw(b"chunk " + key, chunk_size)


def tokens_without_key(owner: str, chunk: int, chunk_size: int) -> list[int]:
    """Tokens of a chunk whose key was never told; only `owner` has them."""
    return _draw(f"nobody else's {owner} {chunk}".encode(), chunk_size)


def token_ids(owner: str, keys: Sequence[bytes], positions: range, chunk_size: int) -> list[int]:
    """The tokens at these positions of a request with these keys."""
    found: list[int] = []
    for chunk in range(positions.start // chunk_size, -(-positions.stop // chunk_size)):
        if chunk < len(keys):
            tokens = tokens_of_chunk(keys[chunk], chunk_size)
        else:
            tokens = tokens_without_key(owner, chunk, chunk_size)
        first = max(positions.start - chunk * chunk_size, 0)
        found += tokens[first : positions.stop - chunk * chunk_size]
    return found


def _draw(seed: bytes, count: int) -> list[int]:
    stream = hashlib.shake_128(seed).digest(2 * count)
    return [int.from_bytes(stream[2 * place : 2 * place + 2], "little") for place in range(count)]
