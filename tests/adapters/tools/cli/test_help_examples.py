"""Every example that `--help` shows, run as it is typed."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from nats_server import NatsServer
from processes import started
from stored_logs import OPENED_AT, replaced, tell_story, write_log

from kvledger.adapters.lab.demo.model import TINY, VOCABULARY_SIZE
from kvledger.adapters.tools.cli.commands import COMMANDS
from kvledger.lifecycle import events as e

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY_SIZE, **TINY}
CONNECTOR = "from small_cache import SmallCache\n\n\nclass Mine(SmallCache):\n    pass\n"
EXIT_CODES = {
    "kvledger conformance OffloadingConnector --seeds 5": 1,
}
"""Of the examples that find something; the others exit with 0."""


def examples(*commands: str) -> list[str]:
    """The lines that `--help` of these commands shows."""
    return [line for name in commands for line in COMMANDS[name].examples.values()]


def words_of(line: str) -> list[str]:
    """The words behind `kvledger`, without what the shell does with the output."""
    line = line.removeprefix('eval "$(').removesuffix(')"')
    return shlex.split(line.partition(" > ")[0].partition(" | ")[0])[1:]


@pytest.fixture
def folder(story: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the examples name: a log_dir with logs of three starts, a model, a handler, a connector.

    An incident is in the log of 2026-01-06, the newest start.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "lab/conformance")
    other = tell_story("chat-18-c7", "chat-10", clock_rate=1000)
    broken = replaced(other.observed, e.BlocksAllocated, 1, num_external_tokens=80)
    for number, (name, events) in enumerate([("2026-01-05", story.observed), ("2026-01-06", broken)]):
        header = {"opened_at_unix_ns": (1 + number) * OPENED_AT}
        write_log(tmp_path / "logs" / name, events, story.configuration, header=header)
    (tmp_path / "handlers.py").write_text("from kvledger.lifecycle.handlers import Running as Mine\n")
    (tmp_path / "connector.py").write_text(CONNECTOR)
    (tmp_path / "models/llama").mkdir(parents=True)
    (tmp_path / "models/llama/config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def assert_works(line: str, run: Any) -> None:
    """It exits as it should; one that judges every log finds the incident."""
    words = words_of(line)
    if words[0] == "repro":
        words.append("--core")  # the incident is one of the core alone, so vLLM is not needed
    expected = 1 if words[0] == "verify" else EXIT_CODES.get(line, 0)
    result = run(*words)
    assert result.exit_code == expected, result.out + result.err


@pytest.mark.parametrize("line", examples(*(COMMANDS.keys() - {"ship", "conformance", "check"})))
def test_an_example_that_reads_logs_works(line: str, run: Any, folder: Path) -> None:
    """On a log_dir with two logs."""
    assert folder.exists()
    assert_works(line, run)


@pytest.mark.xdist_group("check")
@pytest.mark.parametrize("line", examples("check"))
def test_an_example_of_check_works(line: str, run: Any, folder: Path) -> None:
    """With a model's config.json."""
    assert folder.exists()
    assert_works(line, run)


@pytest.mark.scheduler
@pytest.mark.parametrize("line", examples("conformance"))
def test_an_example_of_conformance_works(line: str, run: Any, folder: Path) -> None:
    """Incident: the first thing that a new user typed exited with 64, because vLLM's connector has a required key."""
    assert folder.exists()
    assert_works(line, run)


@pytest.fixture
def server(nats_server_path: str, tmp_path: Path) -> Iterator[NatsServer]:
    """A real server."""
    del nats_server_path
    server = NatsServer(tmp_path / "server").start()
    yield server
    server.kill()


@pytest.mark.parametrize("line", examples("ship"))
def test_an_example_of_ship_works(line: str, run: Any, folder: Path, story: Driver, server: NatsServer) -> None:
    """With a real server in the place of nats.example; what follows is stopped by a signal."""
    assert run("ship", folder / "logs", "--to", server.url, "--create-stream").exit_code == 0
    words = [word.replace("nats://nats.example/LOGS", server.url) for word in words_of(line)]
    if "--follow" not in words:
        assert run(*words).exit_code == 0
        return
    command = [sys.executable, "-m", "kvledger.adapters.tools.cli.main", *words]
    with started(command, stdout=subprocess.DEVNULL) as process:
        write_log(folder / "logs/2026-01-07", story.observed, story.configuration)
        while len(run("ship", "--list", server.url, "--json").objects("log_in_stream")) < 3:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait() in {0, 75}
