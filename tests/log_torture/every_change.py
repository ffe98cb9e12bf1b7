"""Killing a writer at every change of a file that it makes, one after the other, and reading what it left each time.

It is called in a process that has loaded nothing but stored logs: a fork of one with torch costs four times as much.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from kvledger.storage.events import read_log, retire, retire_logs
from kvledger.storage.events.reader import traces_of_log
from kvledger.storage.events.retirements import read_retirements
from kvledger.storage.events.segment_file import segment_paths
from log_torture.kill_points import KillPoint, run_until_killed
from log_torture.mounts import fill
from log_torture.run import kill_once
from log_torture.stored import compress_closed
from log_torture.verdict import check_log
from log_torture.writer import Plan, write

Moment = Literal["before", "middle", "after"]


def kill_at_each_change(directory: Path, plan: Plan, moment: Moment) -> int:
    """Die in creating, appending, rolling over, retiring and closing; returns how many changes there were."""
    whole = run_until_killed(KillPoint(), lambda acknowledge: write(directory, plan, acknowledge))
    assert not whole.was_killed
    assert check_log(directory, whole.last_acknowledged) == whole.last_acknowledged
    assert bool(read_retirements(directory)) == (plan.max_bytes is not None)
    for number in range(whole.num_calls):
        shutil.rmtree(directory, ignore_errors=True)
        killed = run_until_killed(KillPoint(number, moment), lambda acknowledge: write(directory, plan, acknowledge))
        # What compresses and retires runs in threads: how many calls precede theirs differs by a few.
        assert killed.was_killed or plan.max_bytes is not None
        if directory.exists():
            check_log(directory, killed.last_acknowledged)
    return whole.num_calls


def kill_at_each_change_in_retiring(whole: Path, directory: Path, max_bytes: int, moment: Moment) -> int:
    """Die in retiring from copies of a log; what is gone is recorded, once, and the next time finishes it.

    Returns how many changes there were.
    """

    def work(_acknowledge: object) -> None:
        retire(directory, max_bytes=max_bytes)

    def check() -> None:
        reader = read_log(directory)
        assert [frame.next_sequence for frame in reader][-1] == last
        assert reader.damage == [], reader.damage
        retire(directory, max_bytes=max_bytes)
        retired = read_retirements(directory)
        assert len({each.segment for each in retired}) == len(retired), "a segment is recorded twice"
        assert list(read_log(directory))

    last = list(read_log(whole))[-1].next_sequence
    return _kill_at_each_change(whole, directory, work, moment, check)


def kill_at_each_change_in_compressing(whole: Path, directory: Path, moment: Moment) -> int:
    """Die in compressing the closed segments of copies of a log; what is there is read, and the next time finishes it.

    Returns how many changes there were.
    """

    def work(_acknowledge: object) -> None:
        compress_closed(directory)

    def check() -> None:
        for _ in range(2):
            reader = read_log(directory)
            assert list(reader) == expected
            assert reader.damage == [], reader.damage
            compress_closed(directory)
        assert segment_paths(directory)[0].stat().st_size < segment_paths(whole)[0].stat().st_size
        assert not list(directory.glob("*.unfinished"))

    expected = list(read_log(whole))
    return _kill_at_each_change(whole, directory, work, moment, check)


def _kill_at_each_change(
    whole: Path, directory: Path, work: Callable[[object], None], moment: Moment, check: Callable[[], None]
) -> int:
    """Do the work in copies of a log, die at each change, and check what is left. Returns the number of changes."""
    shutil.copytree(whole, directory)
    num_calls = run_until_killed(KillPoint(), work).num_calls
    for number in range(num_calls):
        shutil.rmtree(directory)
        shutil.copytree(whole, directory)
        assert run_until_killed(KillPoint(number, moment), work).was_killed
        check()
    return num_calls


def kill_at_each_change_on_full_disk(whole: Path, disk: Path, moment: Moment, *, vanishes: bool) -> int:
    """Die in retiring from copies of a log on `disk`, which is full; a reader finds no damage, the next time finishes.

    Returns how many changes there were.
    """
    logs = disk / "logs"
    log = logs / "log"

    def work(_acknowledge: object) -> None:
        if vanishes:
            retire_logs(logs, max_bytes=0)
        else:
            retire(log, max_bytes=1500)

    def prepare() -> None:
        shutil.rmtree(disk / "logs", ignore_errors=True)
        (disk / "ballast").unlink(missing_ok=True)
        shutil.copytree(whole, log)
        fill(disk)

    prepare()
    num_calls = run_until_killed(KillPoint(), work).num_calls
    for number in range(num_calls):
        prepare()
        run_until_killed(KillPoint(number, moment), work)
        if log.exists() and segment_paths(log):
            reader = read_log(log)
            assert list(reader)
            assert reader.damage == [], reader.damage
        elif log.exists():
            assert traces_of_log(log) == ""
        work(None)
        assert log.exists() != vanishes
        if vanishes:
            assert len(read_retirements(logs)) == 1
    return num_calls


def kill_at_random(directory: Path, seed: int, num_kills: int) -> Counter[str]:
    """Random plans, random moments; returns how often each outcome came."""
    chance = random.Random(seed)
    return Counter(kill_once(directory, chance) for _ in range(num_kills))
