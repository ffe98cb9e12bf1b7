"""Which code decides and folds: a hash of its source, so that what other code made of a log can be recognised.

What a log means is in its events, and what may be read by the core's parts and the layout of its states; none of
that changes when a fold or a handler is mended. This does. It judges nothing: see `Core.other_code`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from typing import Any

from kvledger.lifecycle.version import __version__

PACKAGE = "kvledger.lifecycle"
UNKNOWN = "unknown"
"""Stands for a hash where there is no source; never the same code as any other."""
_NOT_DECIDING = {"audit", "reader", "testing"}


@cache
def hash_of_core() -> str:
    """Of kvledger's version, and of the source of all that decides and folds in the package."""
    return _hash_of_sources(PACKAGE, "", __version__)


@cache
def hash_of_reader() -> str:
    """Of the same, and of the source of the reader, which decides nothing."""
    return _hash_of_sources(f"{PACKAGE}.reader", "reader/", hash_of_core())


@cache
def hash_of_module(name: str) -> str:
    """Of the source of another module, which has brought a handler, a projection or an extension."""
    try:
        return _hashed([inspect.getsource(sys.modules[name])])
    except (KeyError, OSError, TypeError):
        return UNKNOWN


@cache
def hash_of_package(name: str) -> str:
    """Of the sources of the package that a module is in: what works together is changed together."""
    package = getattr(sys.modules.get(name), "__package__", None)
    return _hash_of_sources(package, f"{package}/") if package else hash_of_module(name)


def _hash_of_sources(package: str, path: str, *before: str) -> str:
    from importlib.resources import files  # noqa: PLC0415 -- it takes longer to import than it is needed for

    sources = sorted(_sources(files(package), path))
    return _hashed([*before, *(part for source in sources for part in source)]) if sources else UNKNOWN


def _sources(folder: Any, path: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 -- typeshed has two Traversables
    for entry in folder.iterdir():
        if entry.is_dir():
            if path or entry.name not in _NOT_DECIDING:
                yield from _sources(entry, f"{path}{entry.name}/")
        elif entry.name.endswith(".py"):
            yield path + entry.name, entry.read_text(encoding="utf-8")


def _hashed(parts: list[str]) -> str:
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
