"""Text from logs in which every character can be seen, and remarks on stderr made of it.

A client chooses its request's id, and errors, paths and headers hold anything: a terminal must not obey them.
"""

from __future__ import annotations

import sys
import unicodedata

from kvledger.lifecycle import without_credentials

__all__ = ["remark", "shortened", "visible"]

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control and format characters, surrogates, line and paragraph separators."""


def visible(text: str) -> str:
    r"""The text with each character that cannot be seen as `\u001b`, the way that JSON has it."""
    if text.isprintable():
        return text
    return "".join(_number(each) if unicodedata.category(each) in _UNSEEN else each for each in text)


def _number(character: str) -> str:
    data = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{data[at : at + 4]}" for at in range(0, len(data), 4))


def shortened(text: str, max_length: int) -> str:
    """The text with at most so many characters; one that is longer ends with three dots."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def remark(text: str) -> None:
    """Write one line to stderr that is no result; addresses in it lose their credentials."""
    sys.stderr.write(f"kvledger: {visible(without_credentials(text))}\n")
