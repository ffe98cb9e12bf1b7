"""A file system of a few kilobytes that only one forked process sees: it is really full when it is full."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import forked

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_NOT_PERMITTED = 77


def run_on_small_disk(mount_point: Path, num_bytes: int, work: Callable[[], None]) -> None:
    """Do `work` in a forked process in which `mount_point` is an empty file system of `num_bytes`.

    Skips the test, with the reason, where this machine permits no mounts; fails where `work` raises.
    """
    mount_point.mkdir()

    def mount_and_work() -> int | None:
        try:
            _mount(mount_point, num_bytes)
        except OSError:
            return _NOT_PERMITTED
        return work()

    exit_code = forked(mount_and_work)
    if exit_code == _NOT_PERMITTED:
        pytest.skip("this machine permits no mount namespace, so no disk here can be really full")
    assert exit_code == 0, f"the process on the small disk ended with {exit_code}; its traceback stands in stderr"


def fill(directory: Path) -> Path:
    """Take what is left of the file system, to the last byte; returns the file to remove."""
    ballast = directory / "ballast"
    descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(descriptor, bytes(4096)):
            pass
    except OSError:
        return ballast
    finally:
        os.close(descriptor)
    return ballast


def _mount(mount_point: Path, num_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    flags = _CLONE_NEWNS if os.geteuid() == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    _check(libc.unshare(flags))
    if flags & _CLONE_NEWUSER:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/setgroups").write_text("deny")  # without that nobody but root may map a group
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")  # no file is made for one that is not mapped
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(libc.mount(b"none", os.fsencode(mount_point), b"tmpfs", 0, b"size=%d" % num_bytes))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
