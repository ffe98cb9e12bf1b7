"""Makes every character of a text from a log visible, and writes remarks to stderr.

Clients choose request ids, and errors, paths and headers may contain anything. A terminal must not interpret such text.
"""

from __future__ import annotations

import sys
import unicodedata

from kvledger.lifecycle import without_credentials

__all__ = ["remark", "shortened", "visible"]

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control and format characters, surrogates, line and paragraph separators."""


def visible(text: str) -> str:
    r"""Replace each invisible character by an escape such as `\u001b`, as in JSON."""
    if text.isprintable():
        return text
    return "".join(_number(each) if unicodedata.category(each) in _UNSEEN else each for each in text)


def _number(character: str) -> str:
    data = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{data[at : at + 4]}" for at in range(0, len(data), 4))


def shortened(text: str, max_length: int) -> str:
    """Cut the text to `max_length` characters; a cut text ends with three dots."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def remark(text: str) -> None:
    """Write a remark, which is not part of the results, as one line to stderr. Remove credentials from addresses."""
    sys.stderr.write(f"kvledger: {visible(without_credentials(text))}\n")
