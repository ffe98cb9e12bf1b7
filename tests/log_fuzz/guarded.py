"""Commands in a child process that may take no more memory and CPU time than the size of the log allows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.logs import index
from log_fuzz.commands import Line
from log_fuzz.commands import lines as every_line

MEMORY_BYTES, MEMORY_BYTES_PER_BYTE = 128 << 20, 1_000
CPU_SECONDS, CPU_SECONDS_PER_BYTE = 5, 20e-6
"""What one command may take: so much, and so much more for each byte of the log. A sound log takes a tenth of it."""
_MISTAKE = re.compile(r"judgement of the log: (\w+).*(\(\w+\.py:\d+\))")
_WAIT_SECONDS = 120
"""A command that uses no CPU time for so long waits, and is ended."""


@attrs.frozen
class Ended:
    """How one command ended."""

    line: Line
    exit_code: int
    """-1: it ended otherwise, which `text` says."""
    text: str
    """What it wrote on stderr, its end; or what ended it."""

    @property
    def reason(self) -> str:
        """The error and its place in the code, where it is a mistake of kvledger's; equal for equal mistakes."""
        found = _MISTAKE.search(self.text)
        return self.text[-80:] if found is None else f"{found[1]} {found[2]}"

    @property
    def is_stated(self) -> bool:
        """Whether the command says of its exit codes that it may end so."""
        return self.exit_code in self.line.exit_codes

    def __str__(self) -> str:
        return f"kvledger {self.line}: {self.exit_code}: {self.text}"


def size_of(log: Path) -> int:
    """Bytes of a log's files."""
    files = log.iterdir() if log.is_dir() else [log]
    return sum(file.lstat().st_size for file in files)


def warm_up(places: Mapping[str, str | Path]) -> None:
    """Run every command once in this process, so that its forks import nothing."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for line in every_line():
            main(line.arguments(places))


def run_guarded(
    lines: Sequence[Line],
    places: Mapping[str, str | Path],
    num_bytes: int,
    *,
    cache: Path | None = None,
    indexes: bool = False,
) -> list[Ended]:
    """Run commands one after the other in a fork of this process; the one that ends it is the last.

    Args:
        lines: what to run.
        places: what stands for LOG, DIR, OTHER, REQUEST and OUT.
        num_bytes: size of the log, from which the limits follow.
        cache: where indexes are kept.
        indexes: whether a small log has one, too.
    """
    ended: list[Ended] = []
    with _output_file() as report, _output_file() as output:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            if cache is not None:
                os.environ["XDG_CACHE_HOME"] = str(cache)
            if indexes:
                index.INDEX_FROM_BYTES = 0
            _run_in_child(lines, places, num_bytes, report, output)
        status = _wait(pid)
        codes = os.pread(report, 1 << 20, 0).decode().split("\n")[:-1]
        for line, code in zip(lines, codes, strict=False):
            exit_code, _, text = code.partition(" ")
            ended.append(Ended(line, int(exit_code), text.encode().decode("unicode_escape")))
        if len(codes) < len(lines):
            ended.append(Ended(lines[len(codes)], -1, f"{status}; {_tail(output)}"))
    return ended


def _run_in_child(
    lines: Sequence[Line], places: Mapping[str, str | Path], num_bytes: int, report: int, output: int
) -> None:
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        memory = _virtual_bytes() + MEMORY_BYTES + int(MEMORY_BYTES_PER_BYTE * num_bytes)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        for line in lines:
            os.ftruncate(output, 0)
            os.lseek(output, 0, os.SEEK_SET)
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
            sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
            used = resource.getrusage(resource.RUSAGE_SELF)
            cpu = int(used.ru_utime + used.ru_stime + CPU_SECONDS + CPU_SECONDS_PER_BYTE * num_bytes) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
            exit_code = main(line.arguments(places))
            text = _tail(output).encode("unicode_escape").decode()
            os.write(report, f"{exit_code} {text}\n".encode())
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 -- a child of pytest must not go on as pytest
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(99)


def _wait(pid: int) -> str:
    descriptor = os.pidfd_open(pid)
    used = -1
    try:
        while not select.select([descriptor], [], [], _WAIT_SECONDS)[0]:
            before, used = used, _cpu_ticks(pid)
            if used == before:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return f"it was waiting for {_WAIT_SECONDS} s"
    finally:
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return {signal.SIGXCPU: "it took too much CPU time"}.get(signal.Signals(number), signal.Signals(number).name)
    return f"the process ended with {os.WEXITSTATUS(status)}"


def _cpu_ticks(pid: int) -> int:
    """CPU time of a process, as the kernel counts it; the name in front of the numbers may have spaces in it."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(numbers[11]) + int(numbers[12])


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    lines = os.pread(descriptor, 2000, max(0, size - 2000)).decode(errors="replace").strip().splitlines()
    return lines[-1][-1500:] if lines else ""


@contextlib.contextmanager
def _output_file() -> Iterator[int]:
    descriptor = os.memfd_create("output")
    try:
        yield descriptor
    finally:
        os.close(descriptor)
