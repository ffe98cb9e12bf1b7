"""SRC_BLOCK_STABLE: blocks that an asynchronous copy reads stay as they are until it is done or waited for."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import InFlight
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.windows import blocks_at


class SrcBlockStable(Checker):
    """At every step, each asynchronous save reads blocks that its request has, that are held, or is awaited.

    Verifies: the request has the save's blocks in its table, in the generation it was saved in; or it has finished
    and its blocks are held; or the step waits for the save.
    Does not verify: saves within a step, which are over when the next one begins; blocks that another connector
    gives away; that the workers do wait.
    """

    rule = "SRC_BLOCK_STABLE"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._held: dict[str, int] = {}
        """Request id -> sequence of the event that held its blocks."""
        self._named: set[int] = set()
        model.forgotten.at((e.RequestReleased,), self._held)

    def begin(self, start: Start) -> None:
        """What a finished request is still saved from is held: had it not been, it was found before."""
        for life in start.lives:
            if life.state is RequestState.FINISHED and self.jobs.reads_blocks_of(life.ordinal):
                self._held[life.request_id] = 0

    @on(e.BlocksHeld)
    def _blocks_held(self, event: e.BlocksHeld) -> None:
        self._held[event.request_id] = self.moment.sequence

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        if not self.jobs.async_saves and not self._named:
            return
        saves = [job for job_id in sorted(self.jobs.async_saves) if (job := self.jobs.get(job_id)) is not None]
        self._check_saves(saves)

    def _check_saves(self, saves: list[InFlight]) -> None:
        """Look at every save under way."""
        self._named &= {job.job_id for job in saves}
        for job in saves:
            why = self._why_unstable(job)
            if why and not job.is_fenced and job.job_id not in self._named:
                self._named.add(job.job_id)
                detail = f"save {job.job_id} reads blocks {list(job.block_ids)} asynchronously, but {why}"
                self.broken(detail, request_id=job.request_id)

    def _why_unstable(self, job: InFlight) -> str:
        life = self.lives.of(job.ordinal)
        if life is None:
            return "its request is gone"
        if life.state is RequestState.FINISHED:
            return "" if job.request_id in self._held else "its request has finished and the blocks are not held"
        if not self.jobs.is_own(job):
            return "its request has lost them"
        table = self.tables.held_by(life)
        pages = self.geometry.pages_of(job.chunks)
        is_in_place = len(pages) > 0 and pages[-1] < len(table) and blocks_at(pages, table) == job.block_ids
        if is_in_place or set(job.block_ids) <= set(table):
            return ""
        return "they are not in the request's table"
