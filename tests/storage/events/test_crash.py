"""A killed process loses nothing that it had logged, wherever it was killed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from log_torture import KillPoint, Plan, check_log, run_until_killed, write
from log_torture.run import kill_once

from kvledger.storage.events import Durability

_NUM_KILLS = 40
_TORN = b"\xf5Kthe first bytes of a frame"


@pytest.mark.parametrize("max_bytes", [None, 900])
@pytest.mark.parametrize("durability", [Durability.OS, Durability.DISK])
@pytest.mark.parametrize("moment", ["before", "middle", "after"])
def test_a_writer_killed_at_any_change_of_a_file_loses_nothing_acknowledged(
    tmp_path: Path, durability: Durability, moment: str, max_bytes: int | None
) -> None:
    """Every call that changes a file is a place to die: in creating, appending, rolling over, retiring, reopening."""
    plan = Plan(durability, max_bytes=max_bytes)
    directory = tmp_path / "log"
    whole = run_until_killed(KillPoint(), lambda acknowledge: write(directory, plan, acknowledge))
    assert not whole.was_killed
    assert check_log(directory, whole.last_acknowledged) == whole.last_acknowledged
    assert (directory / "retired.jsonl").exists() == (max_bytes is not None)
    for number in range(whole.num_calls):
        shutil.rmtree(directory, ignore_errors=True)
        killed = run_until_killed(
            KillPoint(number, moment),  # type: ignore[arg-type]
            lambda acknowledge: write(directory, plan, acknowledge),
        )
        # What retires runs in a thread: how many calls precede its own differs by a few.
        assert killed.was_killed or max_bytes is not None
        if directory.exists():
            check_log(directory, killed.last_acknowledged)


@pytest.mark.parametrize("moment", ["before", "middle", "after"])
def test_a_writer_killed_while_it_lays_a_torn_tail_aside_loses_nothing(tmp_path: Path, moment: str) -> None:
    """Opening a torn log is killed at each of its changes of a file, and the next opening finds all that was there,
    the torn bytes included.
    """
    plan = Plan(num_sessions=1)
    torn = tmp_path / "torn"
    last = run_until_killed(KillPoint(), lambda acknowledge: write(torn, plan, acknowledge)).last_acknowledged
    with max(torn.glob("*.kvlog")).open("ab") as segment:
        segment.write(_TORN)
    (torn / "00000000000000000099.unfinished").write_bytes(b"KVLED")
    directory = tmp_path / "log"
    shutil.copytree(torn, directory)
    num_calls = run_until_killed(KillPoint(), lambda acknowledge: write(directory, plan, acknowledge)).num_calls
    for number in range(num_calls):
        shutil.rmtree(directory)
        shutil.copytree(torn, directory)
        killed = run_until_killed(
            KillPoint(number, moment),  # type: ignore[arg-type]
            lambda acknowledge: write(directory, plan, acknowledge),
        )
        check_log(directory, max(last, killed.last_acknowledged))
        assert any(_TORN in path.read_bytes() for path in directory.iterdir()), "the torn bytes are gone"


def test_writers_killed_at_random_one_after_the_other_leave_one_unbroken_chain(
    tmp_path: Path, chance: random.Random
) -> None:
    """A sample of `make torture`: random plans, random moments, all on the same log."""
    directory = tmp_path / "log"
    outcomes = [kill_once(directory, chance) for _ in range(_NUM_KILLS)]
    assert any(outcome.startswith("killed") for outcome in outcomes)
