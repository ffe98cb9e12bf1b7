"""Cases: a log, what is changed of it, the commands that read it, and how they ended."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from log_fuzz.commands import Line, lines
from log_fuzz.guarded import Ended, run_guarded, size_of, warm_up
from log_fuzz.mutations import KINDS, Mutation, Spot, one_integer, other_snapshot, spots_of
from log_fuzz.seeds import Log

NUM_LINES = 5
"""Command lines of a case, besides one of `verify`."""


@attrs.frozen
class Case:
    """One log that is changed in one way."""

    name: str
    """Repeats it: `SEED:NUMBER`."""
    log: Log
    mutation: Mutation
    lines: tuple[Line, ...]
    has_index: bool

    def __str__(self) -> str:
        return f"case {self.name}, log of {self.log.name}: {self.mutation.text}"


@attrs.frozen
class Failure:
    """A command that ended otherwise than it says."""

    case: Case
    ended: Ended

    def __str__(self) -> str:
        return f"{self.ended}\n    {self.case}"


class Fuzz:
    """Runs cases; commands are imported once."""

    def __init__(self, logs: Sequence[Log], scratch: Path, *, only_snapshots: bool = False) -> None:
        """With `only_snapshots`, nothing else is changed."""
        self._logs = [log for log in logs if log.snapshot is not None] if only_snapshots else logs
        self._only_snapshots = only_snapshots
        self._spots: list[tuple[Log, Spot]] = []
        known = set()
        for log in self._logs:
            for spot in spots_of(log):
                if only_snapshots and spot.kind[0] != "snapshot":
                    continue
                # What every header has is changed in one log only, each event in each.
                if spot.kind[0] in {"event", "snapshot"} or spot.kind not in known:
                    self._spots.append((log, spot))
                known.add(spot.kind)
        random.Random(0).shuffle(self._spots)
        self._scratch = scratch
        out = scratch / "out"
        out.mkdir()
        sound = logs[0].write(scratch / "sound" / "log")
        self._places: dict[str, str | Path] = {"OTHER": sound, "OUT": out}
        warm_up({**self._places, "LOG": sound, "DIR": sound.parent, "REQUEST": logs[0].request_id})

    @property
    def num_spots(self) -> int:
        """Integers that mean something else."""
        return len(self._spots)

    def case(self, seed: int, number: int) -> Case:
        """Even ones change one integer, each of them in turn; odd ones anything."""
        chance = random.Random(f"{seed}:{number}")
        if number % 2 == 0:
            log, spot = self._spots[(number // 2 + seed) % len(self._spots)]
            mutation = one_integer(log, spot, chance)
        else:
            log = chance.choice(self._logs)
            kinds = (*KINDS, other_snapshot, other_snapshot) if log.snapshot is not None else KINDS
            mutation = other_snapshot(log, chance) if self._only_snapshots else chance.choice(kinds)(log, chance)
        every = [line for line in lines() if mutation.has_end or "--follow" not in line.rest]
        verify = chance.choice([line for line in every if line.command == "verify"])
        chosen = (verify, *chance.sample(every, NUM_LINES))
        return Case(f"{seed}:{number}", log, mutation, chosen, has_index=chance.random() < 0.2)

    def run(self, case: Case, *, every_line: bool = False) -> list[Failure]:
        """Write the log and read it."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            log = case.mutation.write(folder / "logs" / "log")
            places = {**self._places, "LOG": log, "DIR": log.parent, "REQUEST": case.log.request_id}
            chosen = lines() if every_line else case.lines
            ended = run_guarded(chosen, places, size_of(log), cache=folder / "cache", indexes=case.has_index)
            return [Failure(case, each) for each in ended if not each.is_stated]
        finally:
            shutil.rmtree(folder)

    def failures(self, seed: int, numbers: Sequence[int]) -> Iterator[list[Failure]]:
        """Of each case, in order."""
        for number in numbers:
            yield self.run(self.case(seed, number))


def kept(failure: Failure, folder: Path) -> Path:
    """Write the log of a failure where it can be looked at."""
    place = folder / failure.case.name.replace(":", "-") / "log"
    shutil.rmtree(place.parent, ignore_errors=True)
    place.parent.mkdir(parents=True)
    return failure.case.mutation.write(place)
