"""A disk that loses power: what a file system may show afterwards, built from what the process asked of it.

Every change of a file is carried out and noted. At each moment between two of them, the images that a machine may find
after losing power are: of each file, what was there when it was last synced, and of what came since all, nothing, a
torn write, or a later write without an earlier one (a hole of zeros); of the directory, the names that were there when
it was last synced, and any beginning of the changes since. That is the model of ALICE and CrashMonkey.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

Lost = Literal["nothing", "everything unsynced", "the end of the last write", "an earlier write, not the last"]
ALL_LOSSES: tuple[Lost, ...] = (
    "nothing",
    "everything unsynced",
    "the end of the last write",
    "an earlier write, not the last",
)


@attrs.define(eq=False)
class _File:
    """What was done to one inode, in order: `(position, bytes)`, or `(length, None)` for a truncation."""

    changes: list[tuple[int, bytes | None]] = attrs.field(factory=list)
    num_synced: int = 0

    def content(self, changes: list[tuple[int, bytes | None]]) -> bytes:
        data = bytearray()
        for position, written in changes:
            if written is None:
                data = data[:position].ljust(position, b"\0")
            else:
                data = data.ljust(position, b"\0")
                data[position : position + len(written)] = written
        return bytes(data)

    def after(self, lost: Lost) -> bytes | None:
        """The content after a loss; None where this loss cannot happen to what is unsynced."""
        synced, pending = self.changes[: self.num_synced], self.changes[self.num_synced :]
        if lost == "nothing":
            return self.content(self.changes)
        if lost == "everything unsynced":
            return self.content(synced)
        writes = [number for number, (_, written) in enumerate(pending) if written]
        if lost == "the end of the last write":
            if not writes:
                return None
            position, written = pending[writes[-1]]
            torn = (position, (written or b"")[: len(written or b"") // 2])
            return self.content([*synced, *pending[: writes[-1]], torn])
        if len(writes) < 2:
            return None
        return self.content([*synced, *(change for number, change in enumerate(pending) if number != writes[-2])])


@attrs.frozen
class Image:
    """What a machine finds after losing power."""

    moment: int
    lost: Lost
    num_names_kept: int
    last_acknowledged: int
    files: dict[str, bytes]

    def write_to(self, directory: Path) -> None:
        """Make the directory hold exactly this."""
        directory.mkdir()
        for name, data in self.files.items():
            (directory / name).write_bytes(data)


@attrs.define(eq=False)
class PowerLoss:
    """Notes what is done to the files of one directory, and tells `on_image` after each change what may be left."""

    directory: Path
    on_image: Callable[[Image], None]
    last_acknowledged: int = 0
    num_moments: int = 0
    _names: dict[str, _File] = attrs.field(factory=dict)
    _name_changes: list[Callable[[dict[str, _File]], None]] = attrs.field(factory=list)
    _synced_names: dict[str, _File] = attrs.field(factory=dict)
    _descriptors: dict[int, tuple[_File | None, int]] = attrs.field(factory=dict)
    """Descriptor to the file and how it was opened; no file: a directory."""
    _positions: dict[int, int] = attrs.field(factory=dict)
    _real: dict[str, Callable[..., Any]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, directory: Path, on_image: Callable[[Image], None]) -> PowerLoss:
        """One for a directory that is there, with all of its files on disk."""
        power = cls(directory, on_image)
        for path in directory.iterdir():
            power._names[path.name] = _File([(0, path.read_bytes())], 1)
        power._synced_names = dict(power._names)
        return power

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for the functions of `os` that change files."""
        for name in (
            "open",
            "close",
            "write",
            "pwrite",
            "ftruncate",
            "fsync",
            "fdatasync",
            "rename",
            "unlink",
            "mkdir",
        ):
            self._real[name] = getattr(os, name)
            patch.setattr(os, name, getattr(self, f"_{name}"))

    def acknowledge(self, sequence: int) -> None:
        """Everything up to `sequence` must survive from now on."""
        self.last_acknowledged = max(self.last_acknowledged, sequence)

    def _name_of(self, path: Any, dir_fd: int | None = None) -> str | None:
        full = Path(os.fsdecode(path))
        is_inside = full.parent == self.directory if dir_fd is None else dir_fd in self._descriptors
        return full.name if is_inside else None

    def _open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        descriptor: int = self._real["open"](path, flags, mode, **options)
        name = self._name_of(path)
        if Path(os.fsdecode(path)) == self.directory:
            self._descriptors[descriptor] = (None, flags)
        elif name is not None and flags & (os.O_WRONLY | os.O_RDWR):
            if name not in self._names:
                made = _File()
                self._change_names(lambda names: names.__setitem__(name, made))
            self._descriptors[descriptor] = (self._names[name], flags)
            self._positions[descriptor] = 0
            if flags & os.O_TRUNC:
                self._names[name].changes.append((0, None))
            self._moment()
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._descriptors.pop(descriptor, None)
        self._real["close"](descriptor)

    def _write(self, descriptor: int, data: Any) -> int:
        num_written: int = self._real["write"](descriptor, data)
        file, flags = self._descriptors.get(descriptor, (None, 0))
        if file is not None:
            position = len(file.content(file.changes)) if flags & os.O_APPEND else self._positions[descriptor]
            file.changes.append((position, bytes(data)[:num_written]))
            self._positions[descriptor] = position + num_written
            self._moment()
        return num_written

    def _pwrite(self, descriptor: int, data: Any, position: int) -> int:
        num_written: int = self._real["pwrite"](descriptor, data, position)
        file, _ = self._descriptors.get(descriptor, (None, 0))
        if file is not None:
            file.changes.append((position, bytes(data)[:num_written]))
            self._moment()
        return num_written

    def _ftruncate(self, descriptor: int, length: int) -> None:
        self._real["ftruncate"](descriptor, length)
        file, _ = self._descriptors.get(descriptor, (None, 0))
        if file is not None:
            file.changes.append((length, None))
            self._moment()

    def _fsync(self, descriptor: int) -> None:
        self._real["fsync"](descriptor)
        if descriptor not in self._descriptors:
            return
        file, _ = self._descriptors[descriptor]
        if file is None:
            self._synced_names = dict(self._names)
            self._name_changes.clear()
        else:
            file.num_synced = len(file.changes)
        self._moment()

    def _fdatasync(self, descriptor: int) -> None:
        self._fsync(descriptor)

    def _rename(self, source: Any, target: Any, **options: Any) -> None:
        self._real["rename"](source, target, **options)
        old, new = self._name_of(source), self._name_of(target)
        if old is not None and new is not None:
            self._change_names(lambda names: names.__setitem__(new, names.pop(old)) if old in names else None)
            self._moment()

    def _unlink(self, path: Any, **options: Any) -> None:
        self._real["unlink"](path, **options)
        name = self._name_of(path, **options)
        if name is not None:
            self._change_names(lambda names: names.pop(name, None) and None)
            self._moment()

    def _mkdir(self, path: Any, mode: int = 0o777, **options: Any) -> None:
        self._real["mkdir"](path, mode, **options)

    def _change_names(self, change: Callable[[dict[str, _File]], None]) -> None:
        change(self._names)
        self._name_changes.append(change)

    def _moment(self) -> None:
        self.num_moments += 1
        for image in self.images():
            self.on_image(image)

    def images(self) -> Iterator[Image]:
        """What a machine may find that loses power now."""
        seen = []
        for num_names_kept in range(len(self._name_changes) + 1):
            names = dict(self._synced_names)
            for change in self._name_changes[:num_names_kept]:
                change(names)
            for lost in ALL_LOSSES:
                contents = {name: file.after(lost) for name, file in names.items()}
                if names and all(content is None for content in contents.values()):
                    continue
                whole = {
                    name: names[name].after("nothing") or b"" if content is None else content
                    for name, content in contents.items()
                }
                if whole not in seen:
                    seen.append(whole)
                    yield Image(self.num_moments, lost, num_names_kept, self.last_acknowledged, whole)
