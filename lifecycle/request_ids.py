"""Cuts request ids that are too long for a log.

Clients choose request ids, and every event of a request contains one. Without a limit, a few requests fill a log.
"""

from __future__ import annotations

import hashlib
from typing import Final

MAX_ID_BYTES: Final = 256
"""Bytes (UTF-8) of the longest request id that a log contains unchanged."""
CUT: Final = "…"
"""Separates the two parts of a cut id: the beginning of the original id, and its hash."""
_HEAD_BYTES: Final = 200
_DIGEST_BYTES: Final = 16
_LEAST_ALIKE: Final = 24
"""An id matches a cut id if it begins with the end of the cut id's first part, in more characters than this."""


def logged_request_id(request_id: str) -> str:
    """Return the id as it is in a log: unchanged, or cut if it is too long or not valid Unicode.

    The result has at most `MAX_ID_BYTES` bytes. Passing it to this function again returns the same id.
    """
    if len(request_id) <= MAX_ID_BYTES:
        if request_id.isascii():
            return request_id
        try:
            if len(request_id.encode()) <= MAX_ID_BYTES:
                return request_id
        except UnicodeEncodeError:  # a lone surrogate, which no log can contain
            pass
    return cut_request_id(request_id)


def cut_request_id(request_id: str) -> str:
    """Return the first 200 bytes of the id and a 128-bit hash of the whole id. Lone surrogates are escaped."""
    head = request_id[:_HEAD_BYTES].encode(errors="backslashreplace")[:_HEAD_BYTES].decode(errors="ignore")
    digest = hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES)
    return f"{head}{CUT}{digest.hexdigest()}"


def begins_as(logged: str, request_id: str) -> bool:
    """Whether `logged` may be the cut form of an id that consists of a short prefix and this long `request_id`."""
    head, cut, digest = logged.rpartition(CUT)
    if not cut or len(digest) != 2 * _DIGEST_BYTES:
        return False
    return any(request_id.startswith(head[start:]) for start in range(len(head) - _LEAST_ALIKE))
