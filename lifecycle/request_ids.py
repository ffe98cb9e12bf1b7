"""How long a request id may be in a log, and what stands for a longer one.

A client chooses its request ids, and every event of a request has one. Without a limit a few requests fill a log.
"""

from __future__ import annotations

import hashlib
from typing import Final

MAX_ID_BYTES: Final = 256
"""Bytes of the longest request id, in UTF-8, that a log has as it is."""
CUT: Final = "…"
"""Between the beginning of a longer id and its hash."""
_HEAD_BYTES: Final = 200
_DIGEST_BYTES: Final = 16
_LEAST_ALIKE: Final = 24
"""Characters of a cut id that say enough about which one it is."""


def logged_request_id(request_id: str) -> str:
    """The id that a log has for this one: the same, or its beginning and its hash if it is long or no Unicode text.

    The result has at most `MAX_ID_BYTES` bytes and is its own logged id.
    """
    if len(request_id) <= MAX_ID_BYTES:
        if request_id.isascii():
            return request_id
        try:
            if len(request_id.encode()) <= MAX_ID_BYTES:
                return request_id
        except UnicodeEncodeError:  # a lone surrogate, which no log can hold
            pass
    return cut_request_id(request_id)


def cut_request_id(request_id: str) -> str:
    """The first 200 bytes and a 128-bit hash of all bytes; lone surrogates are written as escapes."""
    head = request_id[:_HEAD_BYTES].encode(errors="backslashreplace")[:_HEAD_BYTES].decode(errors="ignore")
    digest = hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES)
    return f"{head}{CUT}{digest.hexdigest()}"


def begins_as(logged: str, request_id: str) -> bool:
    """Whether an id in a log is cut and may stand for one that has this long id in it, behind something short."""
    head, cut, digest = logged.rpartition(CUT)
    if not cut or len(digest) != 2 * _DIGEST_BYTES:
        return False
    return any(request_id.startswith(head[start:]) for start in range(len(head) - _LEAST_ALIKE))
