"""The workers of a small world: they make copies as late as they may, and report them late, badly or not at all."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.lifecycle import events as e
from lifecycle_driver.choices import Choices
from lifecycle_driver.device import Device

UNRELIABLE = 0.03
"""The chance that a report is lost, and that it comes twice."""


@attrs.frozen
class _Report:
    """What ranks will report about a job, and when."""

    due_step: int
    job_id: int
    ranks: tuple[int, ...]
    good: bool
    is_repeated: bool = False


@attrs.define
class _Copy:
    """An asynchronous job; its bytes move as late as possible, at the end of `due_step`."""

    event: e.LoadIssued | e.SaveIssued
    due_step: int


class Workers:
    """All ranks: each copies the same, and reports the same, though not always in the same step.

    If they are `reliable`, every copy is reported, and once.
    """

    def __init__(self, choices: Choices, device: Device, num_ranks: int, *, reliable: bool) -> None:
        self._choices = choices
        self._device = device
        self._ranks = tuple(range(num_ranks))
        self._is_reliable = reliable
        self.step = 0
        """Number of the step that is played."""
        self._reports: list[_Report] = []
        self._copies: list[_Copy] = []
        self._outcomes: dict[int, bool] = {}

    def copy_out(self, save: e.SaveIssued | e.TailSaveIssued) -> None:
        """Make a save, and report it later."""
        self._device.save(save.block_ids, save.slots)
        good = self._outcomes[save.job_id] = not self._choices.chance(0.1)
        if not good:
            self._device.slots[save.slots[-1]] = [("torn",)] * self._device.block_size
        if self._misreports():
            return
        self.report_later(save.job_id, good=good)
        if self._misreports():
            self.report_later(save.job_id, good=good)

    def begin_copies(self, new: Iterable[e.Event]) -> None:
        """Begin the asynchronous copies among new events, and make those that are due."""
        self._copies += [
            _Copy(event, self.step + self._choices.randint(0, 4))
            for event in new
            if isinstance(event, e.LoadIssued | e.SaveIssued) and event.is_async
        ]
        for copy in [copy for copy in self._copies if copy.due_step <= self.step]:
            self._make(copy)

    def finish_awaited(self, job_ids: list[int]) -> None:
        """Make the copies that the ledger waits for, and report again what was reported."""
        for copy in [copy for copy in self._copies if copy.event.job_id in job_ids]:
            self._make(copy)
        if self._is_reliable:
            return
        for job_id in job_ids:
            if job_id in self._outcomes and self._choices.chance(0.7):
                self.report_later(job_id, good=self._outcomes[job_id], is_repeated=True)

    def give_up(self, job_id: int) -> None:
        """Make no copy of a load that has ended."""
        self._copies = [copy for copy in self._copies if copy.event.job_id != job_id]

    def report_later(self, job_id: int, *, good: bool, max_delay: int = 4, is_repeated: bool = False) -> None:
        """Let each rank report a job in one of the next steps."""
        for ranks in [(rank,) for rank in self._ranks] if self._choices.chance(0.3) else [self._ranks]:
            due_step = self.step + self._choices.randint(0, max_delay)
            self._reports.append(_Report(due_step, job_id, ranks, good, is_repeated))

    def due(self) -> list[_Report]:
        """Reports that arrive with the output of this step."""
        due = [report for report in self._reports if report.due_step <= self.step]
        self._reports = [report for report in self._reports if report.due_step > self.step]
        return due

    def _make(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        if isinstance(copy.event, e.SaveIssued):
            self.copy_out(copy.event)
            return
        good = self._outcomes[copy.event.job_id] = not self._choices.chance(0.15)
        if good:
            self._device.load(copy.event.slots, copy.event.block_ids)
        if not self._misreports():
            self.report_later(copy.event.job_id, good=good)

    def _misreports(self) -> bool:
        return self._choices.chance(UNRELIABLE) and not self._is_reliable
