"""The host memory that is available to this process, and the limit that restricts it.

The kernel kills a process that exceeds the memory limit, without an error. Check here before a large allocation.

The available memory is the smallest of several figures: the machine's estimate (`MemAvailable` in /proc/meminfo), and
the limit minus the usage of each control group of the process. Each figure counts cached files as available, because
the kernel can drop them. A limit that cannot be read is ignored. Other limits (`ulimit -v`, strict overcommit)
need no check, because an allocation beyond them fails with an error. This module must not know what the memory is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import attrs

from kvledger.storage.kv.errors import PoolTooSmall

__all__ = ["HostMemory", "available_memory", "most_memory", "refuse_unavailable"]

ROOT = Path("/")
_SHARE_LEFT = 20
_MAX_LEFT_BYTES = 1024**3


@attrs.frozen
class HostMemory:
    """Host memory that is available under one limit."""

    num_bytes: int
    limit: str
    """The limit in words, with its figures."""

    @property
    def num_usable_bytes(self) -> int:
        """Bytes that a pool may allocate. A twentieth of the memory, at most 1 GiB, is reserved for other uses."""
        return self.num_bytes - min(self.num_bytes // _SHARE_LEFT, _MAX_LEFT_BYTES)


@attrs.frozen
class _Controller:
    """Names of the files of one version of control groups (kernel documentation, cgroup-v1/memory and cgroup-v2)."""

    mount: str
    limit: str
    usage: str
    cached: tuple[str, ...]


_V1 = _Controller(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Controller("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))


def available_memory(root: Path | None = None) -> HostMemory | None:
    """Return the memory that is available under the strictest limit. None: no limit can be read.

    `root` is the directory that contains proc and sys; None: "/".
    """
    root = ROOT if root is None else root
    return min((*_of_machine(root), *_of_groups(root)), key=lambda memory: memory.num_bytes, default=None)


def most_memory(root: Path | None = None) -> int | None:
    """Return how many bytes this process could have if no other process used memory. None: no limit can be read.

    Unlike the available memory, this number does not change with time, and is equal in all processes of an engine.
    """
    root = ROOT if root is None else root
    num_kib = _fields(root / "proc/meminfo").get("MemTotal:")
    machine = () if num_kib is None else (num_kib * 1024,)
    return min((*machine, *(group.limit_bytes for group in _groups(root))), default=None)


def refuse_unavailable(num_bytes: int) -> None:
    """Raise `PoolTooSmall` if less than `num_bytes` of memory can be used. Do nothing if no limit can be read."""
    memory = available_memory()
    if memory is not None and num_bytes > memory.num_usable_bytes:
        raise PoolTooSmall(
            f"a host pool of {_mib(num_bytes)} does not fit into {_mib(memory.num_usable_bytes)} ({memory.limit}; a "
            "twentieth of the free memory, at most 1 GiB, is reserved for the engine); lower host_bytes, or give the "
            "process more memory"
        )


def _of_machine(root: Path) -> Iterator[HostMemory]:
    num_kib = _fields(root / "proc/meminfo").get("MemAvailable:")
    if num_kib is not None:
        yield HostMemory(num_kib * 1024, f"MemAvailable in /proc/meminfo is {num_kib} kB")


@attrs.frozen
class _Group:
    """A control group that has a memory limit."""

    path: PurePosixPath
    controller: _Controller
    limit_bytes: int
    used_bytes: int
    cached_bytes: int


def _of_groups(root: Path) -> Iterator[HostMemory]:
    for group in _groups(root):
        yield HostMemory(
            max(0, group.limit_bytes - max(0, group.used_bytes - group.cached_bytes)),
            f"{group.controller.limit} of the control group {group.path} is {_mib(group.limit_bytes)}, "
            f"{_mib(group.used_bytes)} are used, {_mib(group.cached_bytes)} of them by files that can be dropped",
        )


def _groups(root: Path) -> Iterator[_Group]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            yield from _hierarchy(root, _V2, PurePosixPath(path))
        elif "memory" in controllers.split(","):
            yield from _hierarchy(root, _V1, PurePosixPath(path))


def _hierarchy(root: Path, controller: _Controller, path: PurePosixPath) -> Iterator[_Group]:
    """Yield the control group `path` and its parents, if their limits can be read.

    In a container, `path` may be the path on the host. Only the group "/" can then be read.
    """
    for group in (path, *path.parents):
        directory = root / controller.mount / str(group).lstrip("/")
        limit, usage = _number(directory / controller.limit), _number(directory / controller.usage)
        if ".." in group.parts or limit is None or usage is None:
            continue
        cached = sum(_fields(directory / "memory.stat").get(name, 0) for name in controller.cached)
        yield _Group(group, controller, limit, usage, cached)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    """Return the number in a file. None: the file is missing or has no number, for example "max"."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """Return name → number from the lines of a file that have the form `name number …`."""
    pairs = (line.split()[:2] for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}  # noqa: PLR2004 -- a pair
