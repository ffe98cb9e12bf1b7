"""Lets kvledger start Python processes that import no modules from the working directory.

With `-m` and `-c` Python puts the working directory first on `sys.path`, and `multiprocessing` starts its processes
with `-c`. But other users may be able to write to the folder in which a server runs. Or the working directory may have
come from somebody else, together with a log. A module that lies in such a folder must not run.
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
"""The environment variable that does the same as `python -P` (Python 3.11, "Command line and environment")."""
_lock = threading.Lock()


def child_environment(modules: Iterable[str]) -> dict[str, str]:
    """Return environment variables with which a `python -P` child can import all that this process can import.

    Modules in the working directory are left out, with two exceptions. If PYTHONPATH names the working directory, the
    directory keeps its place. If this process imported kvledger or one of `modules` from the working directory, the
    directory goes last and hides no other module.

    Args:
        modules: the full names of the imported modules that the child needs besides kvledger.
    """
    environment = {**os.environ, SAFE_PATH: "1"}
    entries = [os.fspath(entry) for entry in sys.path]
    with contextlib.suppress(OSError):  # the working directory was removed
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
    """Make `multiprocessing` start processes that behave as with `python -P`, within a `with` block.

    The processes get this process's `sys.path`. The block sets an environment variable, because `multiprocessing` has
    no parameter for this (`multiprocessing/spawn.py`, Python 3.11). Only one thread can be in such a block at a time.
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
    """Return the folder from which the module was imported; None if not known, for example with an editable install."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file:
        return None
    path, parts = Path(file).resolve(), name.split(".")
    folders = path.parents[len(parts) - (path.stem != "__init__") :]
    outermost = parts[0] if len(parts) > 1 or path.stem == "__init__" else path.name
    return folders[0] if folders and (folders[0] / outermost).exists() else None
