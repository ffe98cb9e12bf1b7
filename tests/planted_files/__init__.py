"""What others may put in the place of a log's files: links, pipes, and everything else that is no file of a log."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from pathlib import Path
from typing import Final

import attrs
import pytest

CONTENT: Final = b"precious\n" * 30
FOREIGN: Final = ("link", "dangling link", "pipe", "directory", "socket", "device", "link to a device")
"""Kinds that nothing opens."""
KINDS: Final = (*FOREIGN, "hard link")
"""With the kind that only a writer refuses."""


@attrs.frozen
class Plant:
    """What was put in a log directory, and the file of somebody else that it may lead to."""

    path: Path
    kind: str
    victim: Path

    def check_untouched(self) -> None:
        """Fail if the foreign file was written, or one was made where a link leads to nothing."""
        if self.kind == "dangling link":
            assert not os.path.lexists(self.victim)
        else:
            assert self.victim.read_bytes() == CONTENT
            assert stat.S_IMODE(self.victim.stat().st_mode) == 0o640


def plant(path: Path, kind: str, victim: Path) -> Plant:
    """Put something of this kind at `path`, in place of what is there; links lead to the file `victim`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    victim.unlink(missing_ok=True)
    if kind != "dangling link":
        victim.write_bytes(CONTENT)
        victim.chmod(0o640)
    make = {
        "link": lambda: path.symlink_to(victim.absolute()),
        "dangling link": lambda: path.symlink_to(victim.absolute()),
        "hard link": lambda: path.hardlink_to(victim),
        "link to a device": lambda: path.symlink_to("/dev/zero"),
        "pipe": lambda: os.mkfifo(path),
        "directory": path.mkdir,
        "device": lambda: _make_device(path),
        "socket": lambda: _make_socket(path),
    }
    make[kind]()
    return Plant(path, kind, victim)


def _make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root makes devices")


def _make_socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as listening:  # a socket's path is short
        listening.bind(path.name)
