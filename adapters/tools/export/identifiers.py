"""Shortens ids for narrow columns by hiding the beginning and end that all ids share, and the middle of long ids.

This module must not depend on what the ids name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

_KEPT = 3
"""Number of characters that stay visible of a beginning or an end that all ids share."""
_LONGEST = 22
"""Longest id that is shown whole, in characters."""
_SEPARATORS = "-_.:/"

Pieces = tuple[tuple[str, bool], ...]
"""The whole id in pieces: text, and whether it is hidden in narrow columns."""


def told_apart(names: Collection[str]) -> dict[str, Pieces]:
    """Cut each name into pieces and mark the pieces that a narrow column hides. Return name → pieces.

    Any two names differ in the pieces that are shown.
    """
    names = dict.fromkeys(names)
    begin = end = 0
    if len(names) > 1 and max(map(len, names)) > _LONGEST:
        begin = _common([*names])
        end = min(_common([name[::-1] for name in names]), min(map(len, names)) - begin)
    begin = begin if begin > 2 * _KEPT else 0
    end = end if end > 2 * _KEPT else 0
    cut = {name: _cut(name, begin, end) for name in names}
    looks = Counter(map(_look, cut.values()))
    return {name: pieces if looks[_look(pieces)] == 1 else ((name, False),) for name, pieces in cut.items()}


def _common(names: list[str]) -> int:
    """Return the length of the beginning that all names share, cut after its last separator if it has one."""
    differing = (at for at, characters in enumerate(zip(*names, strict=False)) if len(set(characters)) > 1)
    common = names[0][: next(differing, min(map(len, names)))]
    last = max(map(common.rfind, _SEPARATORS))
    return last + 1 if last > 0 else len(common)


def _cut(name: str, begin: int, end: int) -> Pieces:
    """Return the pieces of a name. The shared beginning and end and the middle of a long remainder are hidden."""
    hidden = [(_KEPT, begin)] if begin else []
    core = (begin, len(name) - end)
    length = core[1] - core[0]
    if length > _LONGEST:
        half = (_LONGEST - 1) // 2
        hidden.append((core[0] + half, core[1] - half))
    if end:
        hidden.append((len(name) - end, len(name) - _KEPT))
    pieces, at = [], 0
    for first, last in hidden:
        pieces += [(name[at:first], False), (name[first:last], True)]
        at = last
    return tuple(piece for piece in (*pieces, (name[at:], False)) if piece[0])


def _look(pieces: Pieces) -> tuple[str | None, ...]:
    return tuple(None if is_hidden else text for text, is_hidden in pieces)
