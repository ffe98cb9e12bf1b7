"""Whatever stands in a file of a log directory, each command ends with an exit code that it states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvledger.adapters.tools.cli.commands import COMMANDS
from kvledger.storage.events import LogError
from kvledger.storage.events.nats.tail import LogTail
from log_fuzz.commands import LINES, NOT_READING, Line, lines
from log_fuzz.guarded import run_guarded, size_of
from log_fuzz.planted import IN_JSON, IN_MSGPACK, JSON, MSGPACK, plant_as_frame, plant_as_payload, story_log

pytestmark = pytest.mark.xdist_group("log_fuzz")


def test_every_command_is_run_here_or_it_is_said_why_not() -> None:
    """A new command has to be named."""
    assert {*LINES, *NOT_READING} == {*COMMANDS}


@pytest.mark.parametrize("share", [16, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
@pytest.mark.parametrize("plant", [*IN_MSGPACK, *IN_JSON], ids=lambda plant: plant.__name__)
def test_foreign_bytes_end_in_a_stated_exit_code(
    plant: Callable[[Path, bytes], None],
    share: int,
    places: dict[str, str | Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Incident: lists nested 100,000 deep in a header, `log.end` or a recorder's payload ended with exit code 70."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wrong = []
    for number, (name, value) in enumerate((JSON if plant in IN_JSON else MSGPACK).items()):
        segment_bytes = 12_000 if plant.__name__ in {"plant_as_snapshot", "plant_as_retirement"} else 1 << 20
        log = story_log(tmp_path / str(number) / "log", segment_bytes=segment_bytes)
        plant(log, value)
        num_bytes = size_of(log)
        here = {**places, "LOG": log, "DIR": log.parent}
        every = [line for line in lines() if "--follow" not in line.rest]
        ended = run_guarded(every[number % share :: share], here, num_bytes)
        wrong += [f"{name}: {each}" for each in ended if not each.is_stated]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("plant", [plant_as_frame, plant_as_payload], ids=lambda plant: plant.__name__)
def test_what_cannot_be_decoded_is_damage(
    plant: Callable[[Path, bytes], None], places: dict[str, str | Path], tmp_path: Path
) -> None:
    """Incident: `verify` called a log sound in which the recorder's own events could not be decoded."""
    for number, value in enumerate(MSGPACK.values()):
        log = story_log(tmp_path / str(number))
        plant(log, value)
        (ended,) = run_guarded([Line("verify", "LOG --jobs 1")], {**places, "LOG": log}, size_of(log))
        assert ended.exit_code == 2, ended


@pytest.mark.parametrize("plant", IN_MSGPACK, ids=lambda plant: plant.__name__)
def test_a_shipper_reads_foreign_bytes_or_refuses_them(plant: Callable[[Path, bytes], None], tmp_path: Path) -> None:
    """As `kvledger ship` reads a log."""
    for number, value in enumerate(MSGPACK.values()):
        log = story_log(tmp_path / str(number), segment_bytes=12_000)
        plant(log, value)
        try:
            tail = LogTail(log)
            while tail.read(1000, 1 << 20):
                pass
            tail.trouble()
        except LogError:
            continue
