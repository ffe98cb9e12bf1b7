"""Python source of plain values, laid out as `ruff format` does. It knows nothing of what the values mean."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

LINE_LENGTH = 120
_INDENT = "    "
_LONG = 100_000
"""From here on digits are grouped by three."""


@attrs.frozen
class Group:
    """Items between brackets, such as a call, a tuple or a mapping."""

    opening: str
    items: tuple[Source, ...]
    closing: str
    is_call: bool = False
    """Arguments that do not fit beside the call's name are tried on a line of their own first."""

    def flat(self) -> str:
        """On one line."""
        comma = "," if self.closing == ")" and not self.is_call and len(self.items) == 1 else ""
        return f"{self.opening}{', '.join(map(flat, self.items))}{comma}{self.closing}"


@attrs.frozen
class Named:
    """`name=value` or `key: value`."""

    prefix: str
    value: Source


Source = str | Group | Named


def flat(source: Source) -> str:
    """On one line."""
    if isinstance(source, Group):
        return source.flat()
    if isinstance(source, Named):
        return f"{source.prefix}{flat(source.value)}"
    return source


def laid_out(source: Source, *, prefix: str = "", suffix: str = "", depth: int = 0) -> str:
    """On as many lines as it needs.

    Args:
        source: what to write.
        prefix: stands before it on its first line, such as `NAME = `.
        suffix: stands behind it on its last line, such as a comma.
        depth: how far it is indented.
    """
    margin = _INDENT * depth
    line = f"{margin}{prefix}{flat(source)}{suffix}"
    if len(line) <= LINE_LENGTH:
        return line
    if isinstance(source, Named):
        return laid_out(source.value, prefix=prefix + source.prefix, suffix=suffix, depth=depth)
    if isinstance(source, str) or not source.items:
        return line
    inner = _INDENT * (depth + 1)
    arguments = f"{inner}{', '.join(map(flat, source.items))}"
    if source.is_call and len(arguments) <= LINE_LENGTH:
        lines = [arguments]
    else:
        lines = [laid_out(item, suffix=",", depth=depth + 1) for item in source.items]
    return "\n".join([f"{margin}{prefix}{source.opening}", *lines, f"{margin}{source.closing}{suffix}"])


def call(name: str, *positional: Source, **named: Source) -> Group:
    """`name(positional, name=value)`."""
    items = (*positional, *(Named(f"{key}=", value) for key, value in named.items()))
    return Group(f"{name}(", items, ")", is_call=True)


def mapping(entries: Sequence[tuple[Source, Source]]) -> Group:
    """`{key: value}`."""
    return Group("{", tuple(Named(f"{flat(key)}: ", value) for key, value in entries), "}")


def literal(value: object) -> Source:
    """A number, text, bytes, or tuples, lists and mappings of them."""
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, int):
        return f"{value:_}" if abs(value) >= _LONG else str(value)
    if isinstance(value, str | bytes):
        return _quoted(value)
    if isinstance(value, tuple | list):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        return Group(opening, tuple(map(literal, value)), closing)
    if isinstance(value, dict):
        return mapping([(literal(key), literal(item)) for key, item in value.items()])
    return repr(value)


def _quoted(value: str | bytes) -> str:
    """In double quotes, as the formatter wants it, unless that would need more escapes."""
    text = repr(value)
    opening = text.index("'") if "'" in text else -1
    if text.lstrip("b").startswith("'") and '"' not in text:
        return f'{text[:opening]}"{text[opening + 1 : -1]}"'
    return text
