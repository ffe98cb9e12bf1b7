"""`kvledger ship`, and the reading commands on a stream: the same answers as on the files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from log_torture import reopened
from nats_server import NatsServer, segments_in_stream, segments_of
from processes import started
from stored_logs import replaced, write_log

from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events

Run = Any


@pytest.fixture
def server(nats_server_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
    """A real server; mirrors of its streams go into the test's own cache."""
    del nats_server_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = NatsServer(tmp_path / "server").start()
    yield server
    server.kill()


def verdict_of(run: Run, log: object) -> dict[str, object]:
    """What `verify` finds, without where the log is, and how it ended, which a stream does not know."""
    result = run("verify", "--json", log)
    found = [item for item in result.objects() if item["type"] != "end"]
    for item in found:
        item.pop("path", None)
        item.pop("log", None)
        item.pop("end", None)
        item.pop("text", None)  # names how the log ended
    return {"exit_code": result.exit_code, "objects": found}


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_stream_gets_the_verdict_of_its_files(
    server: NatsServer, run: Run, story: Driver, tmp_path: Path, is_sound: bool
) -> None:
    """Sound, and with a broken rule: verdict, findings and head hash are the same."""
    events = list(story.observed)
    if not is_sound:
        events = replaced(events, e.BlocksAllocated, 1, num_external_tokens=80)
    log = write_log(tmp_path / "log", events, story.configuration, segment_bytes=2_000)
    assert len(segments_of(log)) > 1
    shipped = run("ship", log, "--to", server.url, "--create-stream", "--json")
    assert shipped.exit_code == 0, shipped.err
    on_files = verdict_of(run, log)
    assert on_files["exit_code"] == (0 if is_sound else 1)
    assert verdict_of(run, server.url) == on_files
    (record,) = shipped.objects("shipped")
    assert record["head_hash"] == on_files["objects"][-1]["head_hash"]
    (end,) = run("verify", "--json", server.url).objects("end")
    assert (end["end"], end["missing"]) == ("unknown", None)
    assert "copies and mirrors of logs have none" in end["detail"]


COMMANDS = [
    ["show"],
    ["show", "chat-17"],
    ["why", "chat-17"],
    ["stats"],
    ["show", "--at", "30"],
    ["export", "--perfetto"],
]


@pytest.mark.parametrize("command", COMMANDS)
def test_other_commands_read_a_stream_as_they_read_files(
    server: NatsServer, run: Run, log: Path, tmp_path: Path, command: list[str]
) -> None:
    """A mirror is made on the way; but for its path, the output is the same."""
    assert run("ship", log, "--to", server.url, "--create-stream").exit_code == 0
    name, *rest = command
    on_files, on_stream = run(name, log, *rest), run(name, server.url, *rest)
    assert on_stream.exit_code == on_files.exit_code, on_stream.err
    assert on_files.out
    (copy,) = (tmp_path / "cache" / "kvledger" / "nats").glob("*/KVLEDGER/*")
    printed = on_stream.out.replace(str(copy), str(log)).replace(copy.name, log.name).replace(server.url, str(log))
    assert _without_end(printed) == _without_end(on_files.out)


def _without_end(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("end  ")]


def test_every_log_of_a_stream_is_read_and_one_can_be_chosen(
    server: NatsServer, run: Run, story: Driver, tmp_path: Path
) -> None:
    """As with a directory of logs; ids are listed, and their beginnings are enough."""
    for name in ("a", "b"):
        write_log(tmp_path / "logs" / name, story.observed, story.configuration)
    assert run("ship", tmp_path / "logs", "--to", server.url, "--create-stream", "--label", "host-1").exit_code == 0
    listed = run("ship", "--list", server.url, "--json").objects("log_in_stream")
    assert len(listed) == 2
    assert {item["label"] for item in listed} == {"host-1"}
    assert str(listed[0]["log_id"]) in run("ship", "--list", server.url).out
    assert len(run("verify", "--json", server.url).objects("verdict")) >= 2
    chosen = run("verify", "--json", f"{server.url}/KVLEDGER/{str(listed[1]['log_id'])[:10]}")
    (opened,) = chosen.objects("log")
    assert str(opened["path"]).endswith(str(listed[1]["log_id"]))


def test_the_mirror_can_be_put_elsewhere(server: NatsServer, run: Run, log: Path, tmp_path: Path) -> None:
    """And is reused there."""
    assert run("ship", log, "--to", server.url, "--create-stream").exit_code == 0
    assert run("verify", server.url, "--mirror", tmp_path / "here").exit_code == 0
    (copy,) = (tmp_path / "here").iterdir()
    assert segments_of(copy) == segments_of(log)
    assert not (tmp_path / "cache").exists()


def test_shipping_says_what_it_did(server: NatsServer, run: Run, log: Path) -> None:
    """For people; a second run has nothing new."""
    first = run("ship", log, "--to", server.url, "--create-stream")
    assert "frames" in first.out
    assert "one replica" in first.err
    assert segments_in_stream(server.url) == segments_of(log)
    second = run("ship", log, "--to", server.url)
    assert "0 frames" in second.out


def test_a_damaged_log_gives_the_exit_code_of_damage(server: NatsServer, run: Run, log: Path) -> None:
    """What is intact is shipped."""
    (segment,) = log.glob("*.kvlog")
    data = bytearray(segment.read_bytes())
    data[-40] ^= 1
    segment.write_bytes(data)
    result = run("ship", log, "--to", server.url, "--create-stream")
    assert result.exit_code == 2
    assert "nothing intact follows" in result.err
    assert "stopped" in result.out


USAGE = [
    (["ship", "LOG"], 64),
    (["ship", "--to", "URL"], 64),
    (["ship", "nowhere", "--to", "URL"], 64),
    (["ship", "SEGMENT", "--to", "URL"], 64),
    (["ship", "LOG", "--to", "http://host"], 77),
    (["ship", "LOG", "--to", "URL", "--max-age", "soon"], 64),
    (["ship", "LOG", "--to", "URL/NO_SUCH_STREAM"], 77),
    (["verify", "URL/NO_SUCH_STREAM"], 77),
    (["verify", "nats://127.0.0.1:1/S"], 75),
    (["ship", "LOG", "--to", "nats://127.0.0.1:1/S", "--give-up-after", "0s"], 75),
]


@pytest.mark.parametrize(("arguments", "exit_code"), USAGE)
def test_what_cannot_be_done_has_its_exit_code_and_a_reason(
    server: NatsServer, run: Run, log: Path, arguments: list[str], exit_code: int
) -> None:
    """Wrong usage, refused, or worth another try."""
    (segment,) = log.glob("*.kvlog")
    words = {"LOG": str(log), "SEGMENT": str(segment)}
    result = run(*(words.get(word, word.replace("URL", server.url)) for word in arguments))
    assert result.exit_code == exit_code, result.err
    assert "kvledger" in result.err


def test_a_stream_can_be_followed(server: NatsServer, run: Run, log: Path) -> None:
    """`show --follow` tells what is shipped while it runs."""
    assert run("ship", log, "--to", server.url, "--create-stream").exit_code == 0
    command = [
        sys.executable,
        "-m",
        "kvledger.adapters.tools.cli.main",
        "show",
        "--follow",
        "--since",
        "1",
        "--json",
        server.url,
    ]
    with started(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while json.loads(process.stdout.readline())["request_id"] != "chat-9":
            pass
        store = reopened(log)
        store.append(encode_events([e.RequestArrived("late", 100, 7, 10**9)]), 1)
        store.close()
        assert run("ship", log, "--to", server.url).exit_code == 0
        assert json.loads(process.stdout.readline())["request_id"] == "late"
