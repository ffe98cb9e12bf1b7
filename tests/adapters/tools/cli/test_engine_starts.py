"""Which logs of a directory belong to one engine start, and which start `--newest` means: the same in every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from stored_logs import OPENED_AT, replaced, write_log

from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.sources import engine_starts, find_logs
from kvledger.adapters.tools.logs.workers import logs_of_workers
from kvledger.lifecycle import events as e


class Writer:
    """Writes logs into a log_dir, each opened so many seconds after the first."""

    def __init__(self, log_dir: Path, story: Driver) -> None:
        self.log_dir = log_dir
        self._story = story

    def __call__(self, name: str, opened_s: float, engine_id: str = "", *, broken: bool = False, **header: Any) -> Path:
        """A log of the story; with `worker_rank` one that tells of no request, as a worker's."""
        events = list(self._story.observed)
        if broken:
            events = replaced(events, e.BlocksAllocated, 1, num_external_tokens=80)
        if "worker_rank" in header:
            events = [e.HookFailed("register_kv_caches", "", "RuntimeError: no device", 3)] if broken else events[:0]
        more = {"opened_at_unix_ns": OPENED_AT + round(opened_s * 1e9), "engine_id": engine_id, **header}
        return write_log(self.log_dir / name, events, self._story.configuration, header=more)


@pytest.fixture
def write(tmp_path: Path, story: Driver) -> Writer:
    """Writes into `logs`."""
    return Writer(tmp_path / "logs", story)


def read_by(run: Any, command: str, logs: Path, *options: str) -> list[str]:
    """The names of the logs that a command reads, in its order."""
    result = run(command, logs, *options, "--json")
    return [Path(str(each["path"])).name for each in result.objects() if each["type"] in {"log", "statistics"}]


@pytest.mark.parametrize("worker_opened_s", [-3, 4])
def test_the_newest_log_is_the_schedulers_whenever_its_workers_opened_theirs(
    run: Any, write: Writer, worker_opened_s: float
) -> None:
    """Incident: `verify RUN --newest` read a worker's log of a recorded connector, said sound, and exited with 0."""
    write("a-before", -100, "first")
    write("b-scheduler", 0, "second", broken=True)
    write("c-worker", worker_opened_s, "second", worker_rank=0)
    newest = run("verify", write.log_dir, "--newest")
    assert newest.exit_code == 1
    assert "b-scheduler" in newest.err
    assert read_by(run, "show", write.log_dir, "--newest") == ["b-scheduler"]
    assert read_by(run, "stats", write.log_dir, "--newest") == ["b-scheduler"]
    assert read_by(run, "verify", write.log_dir, "--newest") == ["c-worker", "b-scheduler"]
    listed = [Path(str(each["path"])).name for each in run("ls", write.log_dir, "--json").objects("log_listed")]
    assert listed == ["b-scheduler", "c-worker", "a-before"]


@pytest.mark.parametrize("command", ["repro", "show --at 3", "core", "show --follow --until 3"])
def test_a_command_for_one_log_takes_the_schedulers_log_of_the_only_start(
    run: Any, write: Writer, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: `repro RUN` said that RUN holds 2 logs, and refused the one that it called the newest."""
    monkeypatch.chdir(tmp_path)
    write("scheduler", 0, "an-id", broken=True)
    write("worker", 2, "an-id", worker_rank=0)
    name, *options = command.split()
    result = run(name, write.log_dir, *options, *(["--core"] if name == "repro" else []))
    assert result.exit_code in {0, 3}, result.err  # 3: the story was changed


def test_several_starts_are_named_without_the_logs_of_workers(run: Any, write: Writer) -> None:
    """Only one of a scheduler can be meant."""
    for number in (0, 100):
        write(f"scheduler-{number}", number, f"id-{number}")
        write(f"worker-{number}", number + 1, f"id-{number}", worker_rank=0)
    result = run("show", write.log_dir, "--at", 3)
    assert result.exit_code == 64
    assert "contains 2 logs" in result.err
    assert "worker-" not in result.err


def test_workers_are_told_apart_where_every_start_has_the_same_id(write: Writer) -> None:
    """An id may be configured; then it is the time that tells, and the process where that is the same."""
    write("scheduler-0", 0, "fixed")
    write("scheduler-100", 100, "fixed")
    write("worker-0", -5, "fixed", worker_rank=0)
    write("worker-90", 90, "fixed", worker_rank=0)
    write("worker-91", 91, "fixed", worker_rank=1)
    write("scheduler-200", 200, "fixed", process_id=7)
    write("worker-203", 203, "fixed", worker_rank=0, process_id=7)
    found = [
        (None if start.scheduler is None else start.scheduler.name, [log.name for log in start.workers])
        for start in engine_starts(write.log_dir.iterdir())
    ]
    assert found == [
        ("scheduler-0", ["worker-0"]),
        ("scheduler-100", ["worker-90", "worker-91"]),
        ("scheduler-200", ["worker-203"]),
    ]
    scheduler = open_log(write.log_dir / "scheduler-100")
    assert {rank: path.name for rank, path in logs_of_workers(scheduler).items()} == {0: "worker-90", 1: "worker-91"}
    assert [log.name for log in find_logs(write.log_dir)][-2:] == ["worker-203", "scheduler-200"]


def test_a_start_that_left_only_logs_of_workers_is_the_newest_and_is_named_so(run: Any, write: Writer) -> None:
    """It failed before its scheduler was made. The start before it is not judged in its place."""
    write("scheduler", 0, "first")
    write("worker-of-first", 1, "first", worker_rank=0)
    failed = write("worker-of-second", 50, "second", worker_rank=0, broken=True)
    result = run("verify", write.log_dir, "--newest")
    assert result.exit_code == 1
    assert "verdict     rule broken: a hook of worker 0 raised; only the calls of worker 0 were checked" in result.out
    assert "the log of this engine's scheduler, which has the requests, is not in the same directory" in result.out
    repro = run("repro", failed)
    assert repro.exit_code == 64
    assert "the start failed before the scheduler was created" in repro.err
    assert (
        f"give the scheduler's log: {write.log_dir / 'scheduler'}"
        in run("repro", failed.parent / "worker-of-first").err
    )
    assert "the newest of 2 engine starts" in result.err
    assert "has no scheduler log" in result.err
    assert read_by(run, "verify", write.log_dir, "--newest") == ["worker-of-second"]
    assert run("verify", write.log_dir / "scheduler").exit_code == 0


def test_engines_that_were_started_together_are_named(run: Any, write: Writer) -> None:
    """With data parallelism vLLM gives each engine the id of the server and its own rank."""
    write("old-0", -100, "server_dp0")
    write("old-1", -99, "server_dp1")
    write("new-1", 0, "server_dp1")
    write("new-0", 1, "server_dp0")
    result = run("verify", write.log_dir, "--newest")
    assert "reading " in result.err
    assert f"{write.log_dir / 'new-0'}, the newest of 4 logs" in result.err
    remark = f"the server has 2 engines or connectors with logs; these logs are not read: {write.log_dir / 'new-1'}"
    assert remark in result.err
    assert "old-" not in result.err
