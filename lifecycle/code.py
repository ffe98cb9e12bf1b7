"""Hashes of the source code that decides and folds, to recognise logs that other code has written.

A fix of a fold or a handler changes these hashes, even if no event and no state gets another layout. An audit does not
reject a log because of these hashes; see `Core.other_code`.
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
"""Replaces the hash of code whose source is not available. Such code counts as different from all code, even itself."""
_NOT_DECIDING = {"audit", "reader", "testing"}


@cache
def hash_of_core() -> str:
    """Return the hash of kvledger's version and of all source in this package that decides and folds."""
    return _hash_of_sources(PACKAGE, "", __version__)


@cache
def hash_of_reader() -> str:
    """Return a hash of the source of `reader/`, together with everything that `hash_of_core` covers."""
    return _hash_of_sources(f"{PACKAGE}.reader", "reader/", hash_of_core())


@cache
def hash_of_module(name: str) -> str:
    """Return the hash of an imported module's own source; `UNKNOWN` if the source is not available.

    Used for modules outside of this package that define a handler, a projection or an extension.
    """
    try:
        return _hashed([inspect.getsource(sys.modules[name])])
    except (KeyError, OSError, TypeError):
        return UNKNOWN


@cache
def hash_of_package(name: str) -> str:
    """Return the hash of all sources in the package that contains the module `name`.

    The module may use any of these sources.
    """
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
