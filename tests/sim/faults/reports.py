"""What the worker reports arrives late, twice, never or in another order. The copies themselves were made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvledger.lifecycle.rules import Rule
from sim.faults.fault import Fault

if TYPE_CHECKING:
    from kvledger.adapters.vllm.metadata import JobReport
    from sim.world import World

LATE_OR_TWICE = frozenset({Rule.COMPLETION_ONCE.value})
"""A report that follows another one, or comes after its job was given up."""
SILENT = frozenset({Rule.LIVENESS.value})
"""A job that was given up."""


class DelayedReports(Fault):
    """A report is some steps late, which may be longer than the connector waits for it."""

    name = "delayed reports"
    chance = 0.3
    breaks = LATE_OR_TWICE | SILENT

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._share = self.rng.choice([0.1, 0.5, 1.0])
        self._max_steps = self.rng.choice([1, 4, 30])
        self._waiting: list[tuple[int, JobReport]] = []

    def attach(self) -> None:
        """Reports on their way to an engine that is gone do not reach the next one."""
        self._waiting.clear()

    def reports(self, reports: list[JobReport]) -> list[JobReport]:
        """Hold some back, let go what is due."""
        now = self.world.num_steps
        arriving = []
        for report in reports:
            num_steps = self.rng.randint(1, self._max_steps)
            if self.rng.random() < self._share:
                self._waiting.append((now + num_steps, report))
                self.note(f"{_jobs(report)}reported {num_steps} steps late")
            else:
                arriving.append(report)
        arriving += [report for due, report in self._waiting if due <= now]
        self._waiting = [(due, report) for due, report in self._waiting if due > now]
        return arriving


class DoubledReports(Fault):
    """A report comes once more, in the same step or in a later one."""

    name = "doubled reports"
    chance = 0.25
    breaks = LATE_OR_TWICE

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._share = self.rng.choice([0.05, 0.5])
        self._again: list[JobReport] = []

    def attach(self) -> None:
        """A repetition for an engine that is gone does not reach the next one."""
        self._again.clear()

    def reports(self, reports: list[JobReport]) -> list[JobReport]:
        """Repeat some of this step's and of the last one's."""
        arriving = [*reports, *self._again]
        self._again = []
        for report in reports:
            if self.rng.random() < self._share:
                at_once = self.rng.random() < 0.5
                self.note(f"{_jobs(report)}reported twice{' at once' if at_once else ''}")
                (arriving if at_once else self._again).append(report)
        return arriving


class DroppedReports(Fault):
    """A report never comes: after `max_silent_steps` the job is given up."""

    name = "dropped reports"
    chance = 0.25
    breaks = SILENT

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._share = self.rng.choice([0.02, 0.2])

    def reports(self, reports: list[JobReport]) -> list[JobReport]:
        """Drop some."""
        arriving = []
        for report in reports:
            if self.rng.random() < self._share:
                self.note(f"{_jobs(report)}not reported")
            else:
                arriving.append(report)
        return arriving


class ReorderedReports(Fault):
    """Reports of one step, and of neighbouring ones, change places."""

    name = "reordered reports"
    chance = 0.25
    breaks = LATE_OR_TWICE | SILENT  # the last one of all may be held back until its job is given up

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._held: list[JobReport] = []

    def attach(self) -> None:
        """What was held for an engine that is gone does not reach the next one."""
        self._held.clear()

    def reports(self, reports: list[JobReport]) -> list[JobReport]:
        """Shuffle; hold one back until the next step, where it comes last."""
        arriving = [*reports]
        self.rng.shuffle(arriving)
        arriving += self._held
        self._held = []
        if len(arriving) > 1 and self.rng.random() < 0.5:
            self._held = [arriving.pop(0)]
            self.note(f"{_jobs(self._held[0])}overtaken by other reports")
        return arriving


def _jobs(report: JobReport) -> str:
    return f"{'job' if len(report.job_ids) == 1 else 'jobs'} {', '.join(map(str, report.job_ids))}: "
