"""Reads one `SchedulerOutput` and writes it as one `StepScheduled`: only what differs from the expected.

In a step where everybody decodes one token more, a comparison of ids and of a sum decides that there is nothing to
say: a step of 256 decoding requests costs about as much as one of 16. What is kept for that is taken from the last
step's output; dropping it would cost time, not truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from kvledger.adapters.vllm import versions
from kvledger.lifecycle import BlocksRegion, RequestRecord, RequestState, StepEncoder, TrustRegion
from kvledger.lifecycle import events as e

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvledger.lifecycle import Projections


_INCOMPARABLE = [""]
"""No request has an empty id, so no step compares equal to this."""


class StepReader:
    """Turns scheduler outputs into observations, one per engine step."""

    def __init__(
        self,
        projections: Projections,
        requests: dict[str, Request],
        sync_keys: Callable[[Request], None] | None,
        observe: Callable[[e.Event], object],
        *,
        speculates: bool,
    ) -> None:
        """`sync_keys` makes the keys of a request's whole chunks known; None: nobody asks which chunks have settled."""
        self._projections = projections
        self._tracker = projections.tracker
        self._encoder = StepEncoder(projections)
        self._requests = requests
        self._sync_keys = sync_keys
        self._observe = observe
        self._speculates = speculates
        self._step = 0
        self._steady_ids: list[str] = []
        self._steady_ordinals: list[int] = []
        self._steady_sum = 0
        self._due: dict[int, list[str]] = {}
        self._processed: dict[str, int] = {}
        """With windows: the count by which the step that is read has freed what they left."""
        self._processed_before: dict[str, int] = {}
        self._time_ns = 0

    def read(self, scheduler_output: SchedulerOutput, time_ns: int) -> e.StepScheduled:
        """Everything this step says about the requests that are known.

        A count that went back is observed on its own, before the step.
        """
        self._time_ns = time_ns
        self._processed_before, self._processed = self._processed, {}
        cached = scheduler_output.scheduled_cached_reqs
        num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens
        advanced: list[tuple[int, int, int, int]] = []
        paused: tuple[int, ...] = ()
        extended: list[tuple[int, tuple[int, ...]]] = []
        if (
            cached.req_ids == self._steady_ids
            # Preempted by a reset and resumed at once, a request may look steady; its table has been replaced.
            and not cached.resumed_req_ids
            and num_scheduled_tokens == len(self._steady_ids) == len(scheduler_output.num_scheduled_tokens)
            # Nobody can have gained more than the one token it was scheduled for, so the sum says as much of each.
            and sum(cached.num_computed_tokens) == self._steady_sum
        ):
            self._steady_sum += num_scheduled_tokens
            entries = cached.new_block_ids
            extended += [
                (ordinal, tuple(versions.new_block_ids(entry)))
                for ordinal, entry in compress(zip(self._steady_ordinals, entries, strict=True), entries)
            ]
        else:
            paused = self._read_each(scheduler_output, advanced, extended, time_ns)
        event = e.StepScheduled(
            step=self._step,
            num_scheduled_tokens=num_scheduled_tokens,
            advanced=tuple(advanced),
            paused=paused,
            extended=tuple(extended),
            settled=self._settled(advanced),
            time_ns=time_ns,
        )
        self._step += 1
        return event

    def _extend(
        self, extended: list[tuple[int, tuple[int, ...]]], request_id: str, entry: tuple[list[int], ...]
    ) -> None:
        record = self._tracker.get(request_id)
        block_ids = versions.new_block_ids(entry)
        if record is not None and block_ids:
            extended.append((record.ordinal, tuple(block_ids)))

    def _read_each(
        self,
        scheduler_output: SchedulerOutput,
        advanced: list[tuple[int, int, int, int]],
        extended: list[tuple[int, tuple[int, ...]]],
        time_ns: int,
    ) -> tuple[int, ...]:
        num_scheduled = scheduler_output.num_scheduled_tokens
        # Resumed requests stand among the cached ones (model runner V1) or among the new ones (V2); either way
        # their whole table has come with the allocation and replaced the old one.
        for data in scheduler_output.scheduled_new_reqs:
            self._advance(advanced, data.req_id, data.num_computed_tokens, num_scheduled[data.req_id], time_ns)
        cached = scheduler_output.scheduled_cached_reqs
        all_steady = True
        ordinals: list[int] = []
        for request_id, num_computed_tokens, entry in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if entry is not None and request_id not in cached.resumed_req_ids:
                self._extend(extended, request_id, entry)
            num_tokens = num_scheduled[request_id]
            record = self._tracker.get(request_id)
            ordinals.append(-1 if record is None else record.ordinal)
            if record is None or not self._encoder.is_expected(record, num_computed_tokens, num_tokens):
                all_steady &= self._advance(advanced, request_id, num_computed_tokens, num_tokens, time_ns)
        # Only where every request decodes will the next step be worth a comparison. A new request is not among the
        # cached ones yet, so a step that skips it would look the same.
        comparable = all_steady and not scheduler_output.scheduled_new_reqs
        self._steady_ids = cached.req_ids if comparable else _INCOMPARABLE
        self._steady_ordinals = ordinals
        self._steady_sum = sum(cached.num_computed_tokens) + len(cached.req_ids)
        return self._encoder.paused(num_scheduled)

    def _advance(
        self,
        advanced: list[tuple[int, int, int, int]],
        request_id: str,
        num_computed_tokens: int,
        num_tokens: int,
        time_ns: int,
    ) -> bool:
        """Note how a request is scheduled; returns whether it is steady from now on."""
        record = self._tracker.get(request_id)
        request = self._requests.get(request_id)
        if record is None or request is None:
            return False
        if num_computed_tokens < self._tracker.num_computed_tokens(record) and not self._speculates:
            self._observe(e.TokensRolledBack(request_id, num_computed_tokens, time_ns))
        advanced.append((record.ordinal, num_computed_tokens, num_tokens, request.num_tokens))
        return num_tokens == 1 and num_computed_tokens + 1 >= request.num_tokens

    # --- settled chunks ----------------------------------------------------------------------

    def _settled(self, advanced: Sequence[tuple[int, int, int, int]]) -> tuple[tuple[int, int, int], ...]:
        """Requests that filled another chunk with settled tokens; their keys are made known on the way.

        A steady request fills its next chunk at a step that is known in advance, so it is looked at then.
        """
        if self._sync_keys is None:
            return ()
        now = self._tracker.num_steps
        settled: list[tuple[int, int, int]] = []
        for ordinal, num_computed_tokens, num_tokens, _ in advanced:
            record = self._tracker.of(ordinal)
            if record is not None:
                threshold = self._settle(settled, record, num_computed_tokens)
                if num_tokens == 1:
                    self._schedule(record, now + 1, num_computed_tokens + 1, threshold)
        for request_id in self._due.pop(now, ()):
            record = self._tracker.get(request_id)
            if record is not None and self._encoder.is_decoding(record):
                num_computed_tokens = self._tracker.num_computed_tokens(record)
                threshold = self._settle(settled, record, num_computed_tokens)
                self._schedule(record, now + 1, num_computed_tokens + 1, threshold)
        return tuple(dict.fromkeys(settled))

    def _schedule(self, record: RequestRecord, next_step: int, num_computed_tokens: int, threshold: int) -> None:
        if record.request_id in self._requests:
            # Where a token is in flight by then, it is not settled yet and the request is looked at once more.
            due = next_step + max(0, threshold - num_computed_tokens)
            self._due.setdefault(due, []).append(record.request_id)

    def _settle(self, settled: list[tuple[int, int, int]], record: RequestRecord, num_computed_tokens: int) -> int:
        """Note what has settled; returns the number of settled tokens from which to look at the request again."""
        threshold = self._projections.save_cursor.next_threshold(record.ordinal)
        request = self._requests.get(record.request_id)
        if request is None or record.trust is TrustRegion.QUARANTINED:
            return threshold
        num_settled_tokens = num_computed_tokens - request.num_in_flight_tokens
        if self._projections.geometry.windows.forget:
            self._processed[record.request_id] = num_settled_tokens
        if num_settled_tokens < threshold:
            return threshold
        if self._sync_keys is not None:
            self._sync_keys(request)
        entry = self._encoder.settled(record, num_settled_tokens)
        if entry is None:
            return threshold
        self._window_left(record, self._processed_before.get(record.request_id), self._time_ns)
        settled.append(entry)
        geometry = self._projections.geometry
        # It does not count until a load has arrived; and what windows leave in the next step is to be seen then.
        if record.blocks is BlocksRegion.LOADING or geometry.windows.forget:
            return threshold
        return (geometry.num_chunks_in(entry[2]) + 1) * geometry.chunk_size

    def window_left_at_end(self, record: RequestRecord, time_ns: int) -> None:
        """Before a request's end: what its windows leave now was not freed in the last step."""
        self._window_left(record, self._processed.get(record.request_id), time_ns)

    def _window_left(self, record: RequestRecord, num_processed_tokens: int | None, time_ns: int) -> None:
        """Observe by which count pages were freed before, where that was in the very last step.

        In a step in which the request was skipped, vLLM may have freed more on the way to finding no room for it.
        """
        computing = record.state in {RequestState.CHUNKED_PREFILL, RequestState.RUNNING}
        if num_processed_tokens is not None and computing:
            self._observe(e.WindowLeft(record.request_id, num_processed_tokens, time_ns))
