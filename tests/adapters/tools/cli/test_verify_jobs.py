"""`kvledger verify --jobs`: several logs side by side are printed as one after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver, play_seed
from stored_logs import OPENED_AT, serve_many, tell_story, write_log

from kvledger.adapters.tools.cli import verify
from kvledger.adapters.tools.logs.processes import Processes


@pytest.fixture(scope="module")
def walked() -> Driver:
    """Breaks rules here and there, in all parts of its log."""
    return play_seed(3, 140, chunk_size=16, block_size=16)


@pytest.fixture(scope="module")
def sound() -> Any:
    """A driver whose log is sound."""
    return serve_many(150)


def test_several_logs_are_verified_side_by_side_and_printed_in_their_order(
    run: Any, sound: Any, walked: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sound, one broken, one unreadable, each with what is remarked of it."""
    monkeypatch.setattr(verify, "MIN_BYTES", 0)
    write_log(tmp_path / "logs/1", sound.observed, sound.configuration)
    write_log(tmp_path / "logs/2", walked.observed, walked.configuration)
    (tmp_path / "logs/3").mkdir()
    (tmp_path / "logs/3/00000000000000000001.kvlog").write_bytes(b"nothing")
    for form in ((), ("--json",)):
        one, two = (run("verify", *form, "--jobs", jobs, tmp_path / "logs") for jobs in (1, 2))
        assert two == one
        assert one.exit_code == 2
        assert one.err


def test_no_module_of_the_working_directory_runs_in_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: `verify --jobs`, run in the folder that a log came in, imported a planted `multiprocessing`."""
    for name in ("multiprocessing", "argparse", "sitecustomize", "signal", "runpy"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    started = Processes(1)
    try:
        assert started.submit(os.getpid).result() != os.getpid()
    finally:
        started.end()
    assert not (tmp_path / "ran").exists()
    assert "PYTHONSAFEPATH" not in os.environ


def test_processes_end_whatever_they_do() -> None:
    """Nobody is left behind when a command is interrupted."""
    started = Processes(1)
    number = started.submit(os.getpid).result()
    assert number != os.getpid()
    busy = started.submit(time.sleep, 3600)
    started.end()
    assert busy.cancelled() or busy.exception() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_processes_end_with_the_one_that_started_them() -> None:
    """Also where that one is killed and can do nothing about it."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        started = Processes(1)
        os.write(writer, b"%d" % started.submit(os.getpid).result())
        started.submit(time.sleep, 3600)
        os._exit(0)
    number = int(os.read(reader, 20))
    os.waitpid(child, 0)
    while Path(f"/proc/{number}").exists():
        time.sleep(0.01)


MORTAL = """
import os, signal
from multiprocessing import parent_process
from kvledger.lifecycle.handlers import New

class Mortal(New):
    def lookup_requested(self, turn, event):
        if parent_process() is not None and event.request_id.startswith("victim"):
            with open("killed", "a") as file:
                file.write(event.request_id + "\\n")
            if len(open("killed").readlines()) <= int(os.environ["KILLS"]):
                os.kill(os.getpid(), signal.SIGKILL)
        super().lookup_requested(turn, event)
"""
"""A handler that kills the process that verifies a log with a certain request, so many times."""


@pytest.fixture
def mortal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[str, ...]]:
    """Options of `verify` with which that many processes are killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(verify, "MIN_BYTES", 0)
    (tmp_path / "mortal.py").write_text(MORTAL)

    def options(num_kills: int) -> tuple[str, ...]:
        monkeypatch.setenv("KILLS", str(num_kills))
        (tmp_path / "killed").unlink(missing_ok=True)
        return ("--handlers", "mortal:Mortal", "--jobs", "2")

    return options


@pytest.fixture
def with_victim(tmp_path: Path) -> Path:
    """A directory of three logs, of which the second has the request."""
    for number, name in enumerate(("chat-17", "victim-1", "chat-18")):
        story = tell_story(name)
        header = {"opened_at_unix_ns": OPENED_AT + number}
        write_log(tmp_path / "logs" / name, story.observed, story.configuration, header=header)
    return tmp_path / "logs"


def verdicts(result: Any) -> list[tuple[str, str]]:
    """(name of the log, verdict) of each, as JSON says it."""
    names = [Path(str(each["path"])).name for each in result.objects("log")]
    return list(zip(names, [str(each["verdict"]) for each in result.objects("verdict")], strict=True))


def test_a_killed_process_costs_the_other_logs_nothing(run: Any, mortal: Any, with_victim: Path) -> None:
    """Incident: where one process was killed, no log got a verdict, and the exit code was 70."""
    result = run("verify", "--json", *mortal(2), with_victim)
    assert result.exit_code == 7, result.err
    assert verdicts(result) == [("chat-17", "sound"), ("victim-1", "not_verified"), ("chat-18", "sound")]
    assert "victim-1: not verified: its process was killed" in result.err
    text = run("verify", *mortal(2), with_victim)
    assert text.exit_code == 7
    assert "verdict     not verified" in text.out
    assert "logs        3, 2 sound" in text.out


def test_a_log_whose_process_was_killed_once_is_verified_by_another(run: Any, mortal: Any, with_victim: Path) -> None:
    """What is printed is what it would have been."""
    whole = run("verify", "--handlers", "mortal:Mortal", "--jobs", "1", with_victim)
    result = run("verify", *mortal(1), with_victim)
    assert Path("killed").read_text().count("victim-1") > 1
    assert result == whole
    assert result.exit_code == 0
