"""FAILED_LOAD_TAINT: what failed to load is not offered again as it is, and not for ever; its blocks hold no KV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import JobsInFlight
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.start import Start


@attrs.frozen
class _Failure:
    sequence: int
    request_id: str
    keys: tuple[bytes, ...]


class FailedLoadTaint:
    """A failed load taints its chunks at once; a request whose loads keep failing gets no more of them.

    Verifies: when the next observation comes, no chunk of a failed load is committed any more; no load is issued for a
    request that has `max_failed_loads` failed ones behind it; a block that could not be filled is neither given to
    anybody as computed nor saved from until it is written or loaded again; what a request saved on top of its own load
    is not committed when that fails.
    Does not verify: loads from tainted chunks (LOADABLE_AFTER_COMMIT), and tails, which are dropped with the load;
    blocks that others computed on top of one that could not be filled; blocks that a failure before the audit's start
    left unfilled.
    """

    rule: ClassVar[str] = "FAILED_LOAD_TAINT"

    def __init__(self) -> None:
        self._keys: dict[int, tuple[bytes, ...]] = {}
        self._failures: list[_Failure] = []
        self._unfilled: dict[int, int] = {}
        """Block id -> sequence of the failure."""
        self._num_local_tokens: dict[str, int] = {}
        """While a block is unfilled: what each request has of vLLM's prefix cache, by its last lookup."""
        self._hits: list[tuple[str, int, Sequence[int]]] = []
        """(request id, sequence of the allocation, blocks given as computed), until the step that they are for."""
        self._spoilt: dict[int, int] = {}
        """Job id of a save in flight -> sequence of the failure that its source blocks were concerned by."""
        self._jobs: JobsInFlight
        self._model: Model

    def begin(self, start: Start) -> None:
        """Take over the loads in flight. Which blocks were unfilled is not known: the ledger doubts more than those."""
        self._keys = {job.job_id: job.keys for job in start.jobs if job.is_load}

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._jobs, self._model = model.jobs, model
        return [
            (e.StepScheduled, self._observed),
            (e.StepScheduled, self._step_scheduled),
            (e.LoadErrorsObserved, self._load_errors_observed),
            (e.LookupRequested, self._lookup_requested),
            (e.BlocksAllocated, self._blocks_allocated),
            (e.SaveIssued, self._save_issued),
            (e.TailSaveIssued, self._save_issued),
            (e.SaveCompleted, self._save_completed),
            (e.SaveFailed, self._save_failed),
            (e.LookupRequested, self._observed),
            (e.TransferReported, self._observed),
            (e.LoadIssued, self._issued),
            (e.LoadCompleted, self._completed),
            (e.LoadFailed, self._failed),
        ]

    def _observed(self, _event: e.Event, moment: Moment) -> Iterator[Violation] | None:
        return self._check_failures(moment) if self._failures else None

    def _check_failures(self, moment: Moment) -> Iterator[Violation]:
        failures, self._failures = self._failures, []
        for failure in failures:
            if any(key in self._model.chunks for key in failure.keys):
                detail = "its load failed, but chunks of that load can still be looked up"
                yield violation(self.rule, moment, detail, failure.sequence, request_id=failure.request_id)

    def _issued(self, event: e.LoadIssued, moment: Moment) -> list[Violation] | None:
        self._keys[event.job_id] = () if self._jobs.current is None else self._jobs.current.keys
        for block_id in event.block_ids if self._unfilled else ():
            self._unfilled.pop(block_id, None)
        maximum = self._model.configuration.max_failed_loads
        if moment.life is None or moment.life.num_failed_loads < maximum:
            return None
        detail = f"load {event.job_id} is issued after {moment.life.num_failed_loads} failed ones, {maximum} may be"
        return [violation(self.rule, moment, detail, event.cause)]

    def _completed(self, event: e.LoadCompleted, _moment: Moment) -> None:
        self._keys.pop(event.job_id, None)

    def _failed(self, event: e.LoadFailed, moment: Moment) -> None:
        keys = self._keys.pop(event.job_id, ())
        self._failures.append(_Failure(moment.sequence, event.request_id, keys))
        load = self._jobs.current
        for job_id, save in self._jobs:  # the id may have been used again before the load was reported
            is_of_its_life = load is not None and save.life == load.life
            if is_of_its_life and not save.is_load and job_id > event.job_id:
                self._spoilt[job_id] = moment.sequence

    # --- blocks ------------------------------------------------------------------------------

    def _load_errors_observed(self, event: e.LoadErrorsObserved, moment: Moment) -> None:
        self._unfilled.update(dict.fromkeys(event.block_ids, moment.sequence))
        for job_id, save in self._jobs:
            if not save.is_load and not self._unfilled.keys().isdisjoint(save.block_ids):
                self._spoilt[job_id] = moment.sequence

    def _step_scheduled(self, event: e.StepScheduled, moment: Moment) -> Iterator[Violation] | None:
        if not self._unfilled:
            self._hits.clear()  # given as computed while blocks were unfilled that have been given anew since
            return None
        for ordinal, num_computed_tokens, num_scheduled_tokens, _ in event.advanced:
            table = self._model.tables.of(ordinal) or ()
            first = self._model.geometry.pages_spanning(0, num_computed_tokens).stop
            end = self._model.geometry.pages_spanning(num_computed_tokens, num_scheduled_tokens).stop
            self._fill(table[first:end])
        for _, block_ids in event.extended:
            self._fill(block_ids)
        hits, self._hits = self._hits, []
        return self._check_hits(hits, moment)

    def _check_hits(self, hits: list[tuple[str, int, Sequence[int]]], moment: Moment) -> Iterator[Violation]:
        for request_id, sequence, block_ids in hits:
            unfilled = [block_id for block_id in block_ids if block_id in self._unfilled]
            if unfilled:
                detail = f"it was given blocks {unfilled} as computed, to which nobody has written since a load failed"
                evidence = (sequence, self._unfilled[unfilled[0]])
                yield violation(self.rule, moment, detail, *evidence, request_id=request_id)

    def _fill(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._unfilled.pop(block_id, None)

    def _lookup_requested(self, event: e.LookupRequested, _moment: Moment) -> None:
        if self._unfilled:
            self._num_local_tokens[event.request_id] = event.num_computed_tokens

    def _blocks_allocated(self, event: e.BlocksAllocated, moment: Moment) -> None:
        num_tokens = self._num_local_tokens.pop(event.request_id, None) if self._num_local_tokens else None
        if num_tokens is not None:  # who hits what another one writes in this very step is right: see the step first
            num_hit = self._model.geometry.pages_spanning(0, num_tokens).stop
            self._hits.append((event.request_id, moment.sequence, event.block_ids[:num_hit]))
            self._fill(event.block_ids[num_hit:])  # new ones; another connector may fill them, of which nothing is told

    def _save_issued(self, event: e.SaveIssued | e.TailSaveIssued, moment: Moment) -> list[Violation] | None:
        if not self._unfilled or self._unfilled.keys().isdisjoint(event.block_ids):
            return None
        unfilled = [block_id for block_id in event.block_ids if block_id in self._unfilled]
        detail = f"save {event.job_id} reads blocks {unfilled}, to which nobody has written since a load failed"
        return [violation(self.rule, moment, detail, self._unfilled[unfilled[0]], event.cause)]

    def _save_completed(self, event: e.SaveCompleted, moment: Moment) -> list[Violation] | None:
        failed_at = self._spoilt.pop(event.job_id, None) if self._spoilt else None
        if failed_at is None:
            return None
        detail = f"save {event.job_id} is committed, but a load failed that its blocks rely on"
        return [violation(self.rule, moment, detail, failed_at)]

    def _save_failed(self, event: e.SaveFailed, _moment: Moment) -> None:
        self._spoilt.pop(event.job_id, None)
