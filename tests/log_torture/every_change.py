"""Killing a writer at every change of a file that it makes, one after the other, and reading what it left each time.

It is called in a process that has loaded nothing but stored logs: a fork of one with torch costs four times as much.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Literal

from kvledger.storage.events import read_log, retire
from kvledger.storage.events.retention import read_retirements
from log_torture.kill_points import KillPoint, run_until_killed
from log_torture.run import kill_once
from log_torture.verdict import check_log
from log_torture.writer import Plan, write

Moment = Literal["before", "middle", "after"]


def kill_at_each_change(directory: Path, plan: Plan, moment: Moment) -> int:
    """Die in creating, appending, rolling over, retiring and closing; returns how many changes there were."""
    whole = run_until_killed(KillPoint(), lambda acknowledge: write(directory, plan, acknowledge))
    assert not whole.was_killed
    assert check_log(directory, whole.last_acknowledged) == whole.last_acknowledged
    assert (directory / "retired.jsonl").exists() == (plan.max_bytes is not None)
    for number in range(whole.num_calls):
        shutil.rmtree(directory, ignore_errors=True)
        killed = run_until_killed(KillPoint(number, moment), lambda acknowledge: write(directory, plan, acknowledge))
        # What retires runs in a thread: how many calls precede its own differs by a few.
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

    last = list(read_log(whole))[-1].next_sequence
    shutil.copytree(whole, directory)
    num_calls = run_until_killed(KillPoint(), work).num_calls
    for number in range(num_calls):
        shutil.rmtree(directory)
        shutil.copytree(whole, directory)
        assert run_until_killed(KillPoint(number, moment), work).was_killed
        reader = read_log(directory)
        assert [frame.next_sequence for frame in reader][-1] == last
        assert reader.damage == [], reader.damage
        retire(directory, max_bytes=max_bytes)
        retired = read_retirements(directory)
        assert len({each.segment for each in retired}) == len(retired), "a segment is recorded twice"
        assert list(read_log(directory))
    return num_calls


def kill_at_random(directory: Path, seed: int, num_kills: int) -> Counter[str]:
    """Random plans, random moments; returns how often each outcome came."""
    chance = random.Random(seed)
    return Counter(kill_once(directory, chance) for _ in range(num_kills))
