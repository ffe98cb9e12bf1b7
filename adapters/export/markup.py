"""HTML as text, from which nothing can break out: everything that comes from a log goes through here.

A request id is chosen by a client. It is escaped, and what cannot be seen (control characters, marks that turn the
direction of text) is shown as its number.
"""

from __future__ import annotations

import html
import unicodedata
import urllib.parse

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def visible(value: object) -> str:
    """Text in which every character can be seen."""
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if unicodedata.category(character) not in _UNSEEN else f"\\u{ord(character):04x}"
        for character in text
    )


def escaped(value: object) -> str:
    """Text that may stand between tags and in quoted attributes."""
    return html.escape(visible(value), quote=True)


def lines(*parts: str) -> str:
    """Lines of text, escaped one by one, for a tooltip; empty ones are left out."""
    return "\n".join(escaped(part) for part in parts if part)


def fragment(request_id: str) -> str:
    """The part of an address behind `#` that selects a request."""
    return "request=" + urllib.parse.quote(visible(request_id), safe="")


def element(tag: str, content: str, **attributes: object) -> str:
    """An element with content that is markup already; a trailing `_` of an attribute's name is dropped."""
    listed = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{listed}>{content}</{tag}>"


def cell(value: object, style: str | None = None) -> str:
    """A cell of a table with plain text."""
    return element("td", escaped(value), class_=style)


def table(head: list[tuple[str, str | None]], rows: list[str], **attributes: object) -> str:
    """A table of rows that are markup already; `head` has (name, class) of each column."""
    names = "".join(element("th", escaped(name), class_=style, scope="col") for name, style in head)
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    whole = element("table", f"<thead><tr>{names}</tr></thead>\n<tbody>\n{body}</tbody>", **attributes)
    return f'<div class="wide" tabindex="0">{whole}</div>\n'
