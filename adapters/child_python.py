"""Python processes that kvledger starts, without the working directory as a place for modules.

Python puts the working directory first on `sys.path` with `-m` and `-c`, and `multiprocessing` starts its processes
with `-c`. A server may run in a folder that others can write to, and a reader in one that came with a log: a module
placed there must not run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

__all__ = ["child_environment", "without_working_directory"]

SAFE_PATH: Final = "PYTHONSAFEPATH"
"""What `python -P` is in the environment (Python 3.11, "Command line and environment")."""
_lock = threading.Lock()


def child_environment(modules: Iterable[str]) -> dict[str, str]:
    """Return the environment of a `python -P` that can import what this process can, less the working directory.

    The working directory keeps its place if PYTHONPATH names it. It goes last if this process imported kvledger or one
    of `modules` from there, so that it hides no other module.

    Args:
        modules: the full names of the imported modules that the child needs besides kvledger.
    """
    environment = {**os.environ, SAFE_PATH: "1"}
    entries = [os.fspath(entry) for entry in sys.path]
    with contextlib.suppress(OSError):  # the working directory was removed: nothing can be imported from there
        here = Path.cwd().resolve()
        named = {Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
        if here not in named:
            entries = [entry for entry in entries if Path(entry).resolve() != here]
            if any(_folder(name) == here for name in (__name__, *modules)):
                entries.append(str(here))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, entries))
    return environment


@contextlib.contextmanager
def without_working_directory() -> Iterator[None]:
    """Let `multiprocessing` start processes inside as with `python -P`; they take over this process's `sys.path`.

    It offers no other way than the environment (`multiprocessing/spawn.py`, Python 3.11). One thread at a time.
    """
    with _lock:
        before = os.environ.get(SAFE_PATH)
        os.environ[SAFE_PATH] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[SAFE_PATH]
            else:
                os.environ[SAFE_PATH] = before


def _folder(name: str) -> Path | None:
    """The folder from which this process imported the module; None if that is unknown, as for an editable install."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file:
        return None
    path, parts = Path(file).resolve(), name.split(".")
    folders = path.parents[len(parts) - (path.stem != "__init__") :]
    outermost = parts[0] if len(parts) > 1 or path.stem == "__init__" else path.name
    return folders[0] if folders and (folders[0] / outermost).exists() else None
