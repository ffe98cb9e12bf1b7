"""Reads one `SchedulerOutput` and writes it as one `StepScheduled`: only what differs from the expected.

A request that decodes one token more, as the log expects, needs no entry; one comparison shows that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from kvledger.adapters.vllm import versions
from kvledger.lifecycle import BlocksRegion, RequestRecord, RequestState, StepEncoder, TrustRegion
from kvledger.lifecycle import events as e

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.request import Request

    from kvledger.lifecycle import Projections


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
        self._due: dict[int, list[str]] = {}
        self._processed: dict[str, tuple[int, int]] = {}
        """With windows: the count by which the step that is read has freed what they left, and the tokens in flight."""
        self._processed_before: dict[str, tuple[int, int]] = {}
        self._time_ns = 0

    def read(self, scheduler_output: SchedulerOutput, time_ns: int) -> e.StepScheduled:
        """Everything this step says about the requests that are known.

        A count that went back is observed on its own, before the step.
        """
        self._time_ns = time_ns
        self._processed_before, self._processed = self._processed, {}
        num_scheduled = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        # Resumed requests stand among the cached ones (model runner V1) or among the new ones (V2); either way
        # their whole table has come with the allocation and replaced the old one.
        new = [(data.req_id, data.num_computed_tokens) for data in scheduler_output.scheduled_new_reqs]
        unexpected = self._unexpected(scheduler_output)
        advanced = self._advanced([*new, *unexpected], num_scheduled)
        num_expected = len(cached.req_ids) - len(unexpected)
        is_complete = len(self._tracker.computed.decoding) == num_expected
        event = e.StepScheduled(
            step=self._step,
            num_scheduled_tokens=scheduler_output.total_num_scheduled_tokens,
            advanced=tuple(advanced),
            paused=() if is_complete else self._encoder.paused(num_scheduled),
            extended=tuple(self._extended(cached)),
            settled=self._settled(advanced),
            time_ns=time_ns,
        )
        self._step += 1
        return event

    def _unexpected(self, scheduler_output: SchedulerOutput) -> list[tuple[str, int]]:
        """Ids and counts of those that are not new and do something else than decode one more token."""
        cached, num_scheduled = scheduler_output.scheduled_cached_reqs, scheduler_output.num_scheduled_tokens
        unexpected = self._encoder.unexpected(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        # Each is scheduled for a token at least, so the sum says whether anybody expected is for more: with drafts.
        num_others = sum([num_scheduled[data.req_id] for data in scheduler_output.scheduled_new_reqs])
        num_others += sum([num_scheduled[request_id] for request_id, _ in unexpected])
        if scheduler_output.total_num_scheduled_tokens - num_others != len(cached.req_ids) - len(unexpected):
            found = dict(unexpected)
            rows = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            unexpected = [row for row in rows if row[0] in found or num_scheduled[row[0]] != 1]
        return unexpected

    def _extended(self, cached: CachedRequestData) -> list[tuple[int, tuple[int, ...]]]:
        """Life and blocks of those whose tables have grown."""
        extended = []
        entries = cached.new_block_ids
        for request_id, entry in compress(zip(cached.req_ids, entries, strict=True), entries):
            record, block_ids = self._tracker.get(request_id), versions.new_block_ids(entry)
            if record is not None and block_ids and request_id not in cached.resumed_req_ids:
                extended.append((record.ordinal, tuple(block_ids)))
        return extended

    def _advanced(
        self, counts: Sequence[tuple[str, int]], num_scheduled: Mapping[str, int]
    ) -> list[tuple[int, int, int, int]]:
        """How each of these is scheduled; with drafts that is everybody in every step."""
        record_of, request_of = self._tracker.get, self._requests.get
        for request_id, count in () if self._speculates else counts:
            record = record_of(request_id)
            if record is None or request_id not in self._requests:
                continue
            if count < self._tracker.num_computed_tokens(record):
                self._observe(e.TokensRolledBack(request_id, count, self._time_ns))
        return [
            (record.ordinal, count, num_scheduled[request_id], request.num_tokens)
            for request_id, count in counts
            if (record := record_of(request_id)) is not None and (request := request_of(request_id)) is not None
        ]

    # --- settled chunks ----------------------------------------------------------------------

    def _settled(self, advanced: Sequence[tuple[int, int, int, int]]) -> tuple[e.SettledTokens, ...]:
        """Requests that filled enough chunks with settled tokens; their keys are made known on the way.

        A steady request fills its next chunks at a step that is known in advance, so it is looked at then.
        """
        if self._sync_keys is None:
            return ()
        now = self._tracker.num_steps
        forgets = self._projections.geometry.windows.forget
        settled: list[e.SettledTokens] = []
        for ordinal, num_computed_tokens, num_tokens, _ in advanced:
            record = self._tracker.of(ordinal)
            if record is None:
                continue
            threshold = self._tracker.save_threshold(record, record.num_chunks_handled)
            if num_tokens > 1 and num_computed_tokens < threshold and not forgets:
                continue  # as nearly everybody with drafts
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

    def _settle(self, settled: list[e.SettledTokens], record: RequestRecord, num_computed_tokens: int) -> int:
        """Note what has settled; returns the number of settled tokens from which to look at the request again."""
        threshold = self._tracker.save_threshold(record, record.num_chunks_handled)
        request = self._requests.get(record.request_id)
        if request is None or record.trust is TrustRegion.QUARANTINED:
            return threshold
        num_in_flight_tokens = request.num_in_flight_tokens
        num_settled_tokens = num_computed_tokens - num_in_flight_tokens
        if self._projections.geometry.windows.forget:
            self._processed[record.request_id] = num_settled_tokens, num_in_flight_tokens
        if num_settled_tokens < threshold:
            return threshold
        if self._sync_keys is not None:
            self._sync_keys(request)
        entry = self._encoder.settled(record, num_settled_tokens, num_in_flight_tokens)
        if entry is None:
            return threshold
        self._window_left(record, self._processed_before.get(record.request_id), self._time_ns)
        settled.append(entry)
        geometry = self._projections.geometry
        # It does not count until a load has arrived; and what windows leave in the next step is to be seen then.
        if record.blocks is BlocksRegion.LOADING or geometry.windows.forget:
            return threshold
        return self._tracker.save_threshold(record, geometry.num_chunks_in(entry.num_settled_tokens))

    def window_left_at_end(self, record: RequestRecord, time_ns: int) -> None:
        """Before a request's end: what its windows leave now was not freed in the last step."""
        self._window_left(record, self._processed.get(record.request_id), time_ns)

    def _window_left(self, record: RequestRecord, processed: tuple[int, int] | None, time_ns: int) -> None:
        """Observe by which count pages were freed before, where that was in the very last step.

        In a step in which the request was skipped, vLLM may have freed more on the way to finding no room for it.
        """
        computing = record.state in {RequestState.CHUNKED_PREFILL, RequestState.RUNNING}
        if processed is not None and computing:
            num_settled_tokens, num_in_flight_tokens = processed
            self._observe(e.WindowLeft(record.request_id, num_settled_tokens, time_ns, num_in_flight_tokens))
