"""What memory can be had, read from files as the kernel writes them; and who asks for more is refused, not killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import finished

from kvledger.storage.kv import HostPool, available_memory, host_memory, most_memory
from kvledger.storage.kv.errors import PoolTooSmall

GIB = 1024**3


def write(path: Path, text: object) -> None:
    """A file of the kernel's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(root: Path, num_available_bytes: int) -> None:
    """/proc/meminfo, with what matters."""
    write(
        root / "proc/meminfo", f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {num_available_bytes // 1024} kB"
    )


def group_v2(root: Path, path: str, limit: object, usage: int, cached: int = 0) -> None:
    """A control group of version 2."""
    directory = root / "sys/fs/cgroup" / path
    write(directory / "memory.max", limit)
    write(directory / "memory.current", usage)
    write(
        directory / "memory.stat", f"anon 5\nfile {cached}\ninactive_file {cached // 4}\nactive_file {cached * 3 // 4}"
    )


def group_v1(root: Path, path: str, limit: object, usage: int, cached: int = 0) -> None:
    """A control group of version 1."""
    directory = root / "sys/fs/cgroup/memory" / path
    write(directory / "memory.limit_in_bytes", limit)
    write(directory / "memory.usage_in_bytes", usage)
    stat = f"inactive_file 7\ntotal_inactive_file {cached // 4}\ntotal_active_file {cached * 3 // 4}"
    write(directory / "memory.stat", stat)


def available(root: Path) -> int | None:
    """The figure alone."""
    memory = available_memory(root)
    return None if memory is None else memory.num_bytes


def test_without_control_groups_the_machine_s_estimate_counts(tmp_path: Path) -> None:
    """And the limit says where the figure is from."""
    machine(tmp_path, 3 * GIB)
    memory = available_memory(tmp_path)
    assert memory is not None
    assert (memory.num_bytes, memory.limit) == (3 * GIB, "MemAvailable in /proc/meminfo is 3145728 kB")


def test_where_nothing_can_be_read_nothing_is_known(tmp_path: Path) -> None:
    """No file, files without the line, files that are no numbers."""
    assert available(tmp_path) is None
    write(tmp_path / "proc/meminfo", "MemTotal: 5 kB")
    write(tmp_path / "proc/self/cgroup", "nonsense\n0::/gone\n3:memory:/gone")
    write(tmp_path / "sys/fs/cgroup/memory.max", "what?")
    write(tmp_path / "sys/fs/cgroup/memory.current", "12")
    assert available(tmp_path) is None


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_of_the_hierarchy_limits(tmp_path: Path, version: int) -> None:
    """A slice may allow less than the service in it; what files take there can be had again."""
    machine(tmp_path, 64 * GIB)
    group = {1: group_v1, 2: group_v2}[version]
    line = {1: "4:memory:/slice/service", 2: "0::/slice/service"}[version]
    unlimited: object = {1: 9223372036854771712, 2: "max"}[version]
    write(tmp_path / "proc/self/cgroup", f"7:cpu,cpuacct:/other\n{line}")
    group(tmp_path, "", unlimited, 9 * GIB)
    group(tmp_path, "slice", unlimited, 5 * GIB)
    group(tmp_path, "slice/service", unlimited, 5 * GIB)
    assert available(tmp_path) == 64 * GIB
    group(tmp_path, "slice/service", 16 * GIB, 5 * GIB)
    assert available(tmp_path) == 11 * GIB
    group(tmp_path, "slice", 12 * GIB, 6 * GIB, cached=2 * GIB)
    memory = available_memory(tmp_path)
    assert memory is not None
    assert memory.num_bytes == 8 * GIB
    assert "control group /slice is 12288 MiB, 6144 MiB are used, 2048 MiB of them by files" in memory.limit
    group(tmp_path, "slice", 4 * GIB, 6 * GIB)
    assert available(tmp_path) == 0


@pytest.mark.parametrize("path", ["/docker/4711", "/../../host.slice/pod", "/"])
@pytest.mark.parametrize("version", [1, 2])
def test_in_a_container_the_group_is_the_root_of_what_is_seen(tmp_path: Path, path: str, version: int) -> None:
    """Whatever the host calls it."""
    machine(tmp_path, 64 * GIB)
    write(tmp_path / "proc/self/cgroup", f"4:memory:{path}" if version == 1 else f"0::{path}")
    (group_v1 if version == 1 else group_v2)(tmp_path, "", 4 * GIB, GIB)
    assert available(tmp_path) == 3 * GIB


def test_something_is_left_to_the_process(tmp_path: Path) -> None:
    """A twentieth of little, 1 GiB of much."""
    for num_bytes, usable in ((2000 * 1024, 1900 * 1024), (100 * GIB, 99 * GIB)):
        machine(tmp_path, num_bytes)
        memory = available_memory(tmp_path)
        assert memory is not None
        assert memory.num_usable_bytes == usable


def test_this_machine_tells() -> None:
    """As every Linux does."""
    memory = available_memory()
    assert memory is not None
    assert memory.num_bytes > 0


def test_a_pool_beyond_what_can_be_had_touches_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both figures, what limits, and the remedy; nothing was allocated, so nothing can have been touched."""
    machine(tmp_path, GIB)
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    monkeypatch.setattr("torch.zeros", lambda *_arguments, **_options: pytest.fail("memory was allocated"))
    with pytest.raises(PoolTooSmall) as caught:
        HostPool(1024, 1024**2, pin=False)
    message = str(caught.value)
    for told in ("1024 MiB", "972 MiB", "MemAvailable", "lower host_bytes"):
        assert told in message


# --- a group of the kernel's own ----------------------------------------------------------------------

IN_A_GROUP = """
import os, sys
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
from kvledger.storage.kv import HostPool, available_memory
from kvledger.storage.kv.errors import PoolTooSmall
memory = available_memory()
print(memory.limit)
pool = HostPool(memory.num_usable_bytes // 2**20 // 2, 2**20, pin=False)
print("half of it was had")
try:
    HostPool(1024, 2**20, pin=False)
except PoolTooSmall as error:
    print("refused:", error)
"""


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A control group of 1 GiB; skipped where this process may not make one."""
    for mount, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        directory = Path("/sys/fs/cgroup") / mount / f"kvledger-test-{os.getpid()}"
        try:
            directory.mkdir()
        except OSError:
            continue
        try:
            (directory / limit).write_text(str(GIB))
        except OSError:
            directory.rmdir()
            continue
        yield directory
        directory.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_in_a_real_control_group_a_pool_is_refused_and_the_process_lives(limited_group: Path) -> None:
    """Half of what is said to be there can be had, and touched; what is beyond the limit is refused."""
    result = finished([sys.executable, "-c", IN_A_GROUP, limited_group])
    assert result.returncode == 0, result.stderr
    assert f"control group /{limited_group.name} is 1024 MiB" in result.stdout
    assert "half of it was had" in result.stdout
    assert "refused: a host pool of 1024 MiB does not fit into" in result.stdout


def test_what_could_be_had_is_the_same_whatever_is_used(tmp_path: Path) -> None:
    """All processes of an engine must come to one figure, at different times: the machine's size or the least limit."""
    assert most_memory(tmp_path) is None
    machine(tmp_path, 3 * GIB)
    assert most_memory(tmp_path) == 99999999 * 1024
    write(tmp_path / "proc/self/cgroup", "0::/pod/box")
    for used in (GIB, 5 * GIB):
        group_v2(tmp_path, "pod", 6 * GIB, used)
        group_v2(tmp_path, "pod/box", "max", used)
        assert most_memory(tmp_path) == 6 * GIB
