"""Shows configured values and addresses without passwords and access tokens. This module must not name any setting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Self

_ADDRESS: Final = re.compile(r":(?P<slashes>/+)(?P<rest>\S*)")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+")
_CLOSING: Final = re.compile(r"[\"'`)\]>,;:.]*$")
_LEFT_OUT: Final = "…"
_QUOTES: Final = " \t\r\n\"'\\"


def without_credentials(text: str, *, is_address: bool = False) -> str:
    """Return the text without the user, password, query and fragment of the addresses in it.

    A password may contain any character. If its last character cannot be determined, all text after the scheme is left
    out.

    Args:
        text: a message, or an address.
        is_address: whether the whole text is one address, which may contain spaces or lack its scheme.
    """
    if not is_address:
        return _ADDRESS.sub(_in_text, text)
    found = _SCHEME.match(text)
    if found is None:
        bare = _bare(text) if "@" in text else text
        return text if bare == text else f"{_LEFT_OUT}@{bare}"
    return f"{found[0]}{_bare(text[found.end() :])}"


class Hidden(str):
    """Text that replaces a value that must not be shown. Messages print this text without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def of(cls, value: object) -> Self:
        """Return the type and length of a value, in parentheses."""
        match value:
            case bool():
                kind = "boolean"
            case int() | float():
                kind = "number"
            case str():
                kind = f"text of {len(value)} characters"
            case bytes() | bytearray():
                kind = f"{len(value)} bytes"
            case Mapping():
                kind = f"mapping of {len(value)}"
            case list() | tuple() | set() | frozenset():
                kind = f"list of {len(value)}"
            case _:
                kind = "object"
        return cls(f"({kind})")


def shown(value: object) -> object:
    """Return a configured value as messages may show it.

    Addresses lose their credentials. Mappings, JSON and nested lists are replaced by their type and length.
    """
    match value:
        case Hidden() | None | bool() | int() | float():
            return value
        case str() if value.lstrip(_QUOTES).startswith(("{", "[")):  # an object that was put in quotes
            return Hidden.of(value)
        case str():
            return without_credentials(value, is_address="://" in value)
        case list() | tuple() if not any(isinstance(item, Mapping | list | tuple) for item in value):
            return type(value)(map(shown, value))
        case Mapping() | list() | tuple() | set() | frozenset():
            return Hidden.of(value)
    return value


def _in_text(found: re.Match[str]) -> str:
    rest = found["rest"]
    closing = _CLOSING.search(rest)
    end = len(rest) if closing is None else closing.start()
    return f":{found['slashes']}{_bare(rest[:end])}{rest[end:]}"


def _bare(rest: str) -> str:
    """Return the part of an address after its scheme, without anything that may be secret."""
    before, at, after = rest.rpartition("@")
    if at and re.search("[?#]", before):
        return _LEFT_OUT
    return re.split("[?#]", after, maxsplit=1)[0]
