"""Available host memory of this process, and its limit.

The kernel kills a process that exceeds the memory limit, without an error. Check here before a large allocation.

kvledger reads the machine's estimate (`MemAvailable` in /proc/meminfo) and the limits of the process's control groups
minus their usage. Cached files count as available in both, because the kernel can drop them. A limit that cannot be
read is ignored. Other limits (`ulimit -v`, strict overcommit) make an allocation fail with an error, so they need no
check. This module knows bytes. It must not know what the bytes are for.
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
    """Available memory."""

    num_bytes: int
    limit: str
    """The limit in words, with its figures."""

    @property
    def num_usable_bytes(self) -> int:
        """Bytes that may be allocated. A twentieth, at most 1 GiB, is left for everything else in the process."""
        return self.num_bytes - min(self.num_bytes // _SHARE_LEFT, _MAX_LEFT_BYTES)


@attrs.frozen
class _Controller:
    """The files of one version of control groups (kernel documentation, cgroup-v1/memory and cgroup-v2)."""

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
    """Return the memory available under the tightest limit; None if no limit is readable. `root` has /proc and /sys."""
    root = ROOT if root is None else root
    return min((*_of_machine(root), *_of_groups(root)), key=lambda memory: memory.num_bytes, default=None)


def most_memory(root: Path | None = None) -> int | None:
    """Return the bytes that this process could have if no other process used any; None if no limit can be read.

    Unlike the available memory, this does not change over time or between the processes of an engine.
    """
    root = ROOT if root is None else root
    num_kib = _fields(root / "proc/meminfo").get("MemTotal:")
    machine = () if num_kib is None else (num_kib * 1024,)
    return min((*machine, *(group.limit_bytes for group in _groups(root))), default=None)


def refuse_unavailable(num_bytes: int) -> None:
    """Raise `PoolTooSmall` if this much memory is known not to be available."""
    memory = available_memory()
    if memory is not None and num_bytes > memory.num_usable_bytes:
        raise PoolTooSmall(
            f"a host pool of {_mib(num_bytes)} does not fit into {_mib(memory.num_usable_bytes)} ({memory.limit}; a "
            "twentieth, at most 1 GiB, is reserved for the engine); lower host_bytes, or give the process more memory"
        )


def _of_machine(root: Path) -> Iterator[HostMemory]:
    num_kib = _fields(root / "proc/meminfo").get("MemAvailable:")
    if num_kib is not None:
        yield HostMemory(num_kib * 1024, f"MemAvailable in /proc/meminfo is {num_kib} kB")


@attrs.frozen
class _Group:
    """A control group with a limit."""

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
    """Yield the group and its parents. In a container the path may be the host's, and then only "/" is visible."""
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
    """Return the number in a file; None for "max" or if there is no file."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """Name → number, for lines of the form `name number …`."""
    pairs = (line.split()[:2] for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}  # noqa: PLR2004 -- a pair
