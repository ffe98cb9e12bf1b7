"""Encodes an engine's step as `StepScheduled`, which contains only the differences from the expected step.

A request that decoded one token in its last step is expected to decode one more. A caller that knows every scheduled
request uses `encode`. An adapter that has a faster way to find the differences uses the other methods instead. This
module must not know a particular engine.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import attrs

from kvledger.lifecycle.events import NOT_RECORDED, SettledTokens, StepScheduled
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.states import TrustRegion


@attrs.frozen
class Scheduled:
    """One request in one step. All token counts except `num_scheduled_tokens` are from before the step."""

    request_id: str
    num_computed_tokens: int
    """Computed tokens, including tokens that an earlier step has scheduled."""
    num_scheduled_tokens: int
    """Tokens to compute in this step."""
    num_tokens: int
    """Known tokens: prompt and output."""
    new_block_ids: tuple[int, ...] = ()
    """Blocks appended to the request's table since its last step, without blocks that a `BlocksAllocated` contains."""
    num_in_flight_tokens: int = 0
    """The part of `num_computed_tokens` in steps in flight. vLLM may not have written them, or may take them back."""


class StepEncoder:
    """Encodes steps with the state that a ledger has folded so far. The encoder itself keeps no state."""

    def __init__(self, projections: Projections) -> None:
        self._projections = projections
        self._tracker = projections.tracker

    def encode(self, scheduled: Iterable[Scheduled], time_ns: int) -> StepScheduled:
        """Return the step that schedules these requests and no others.

        For a request that the ledger does not know, the step counts only the scheduled tokens. Record chunk keys
        (`ChunkKeysObserved`) before the step in which their chunks settle.
        """
        requests = {request.request_id: request for request in scheduled}
        known = [
            (record, request)
            for request in requests.values()
            if (record := self._tracker.get(request.request_id)) is not None
        ]
        settled = (
            self.settled(
                record, request.num_computed_tokens - request.num_in_flight_tokens, request.num_in_flight_tokens
            )
            for record, request in known
        )
        return StepScheduled(
            step=self._tracker.num_steps,
            num_scheduled_tokens=sum(request.num_scheduled_tokens for request in requests.values()),
            advanced=tuple(
                (record.ordinal, request.num_computed_tokens, request.num_scheduled_tokens, request.num_tokens)
                for record, request in known
                if not self.is_expected(record, request.num_computed_tokens, request.num_scheduled_tokens)
            ),
            paused=self.paused(requests),
            extended=tuple(
                (record.ordinal, tuple(request.new_block_ids)) for record, request in known if request.new_block_ids
            ),
            settled=tuple(entry for entry in settled if entry is not None),
            time_ns=time_ns,
        )

    def is_expected(self, record: RequestRecord, num_computed_tokens: int, num_scheduled_tokens: int) -> bool:
        """Whether the request does what the log expects in this step, so that the event leaves the request out."""
        return (
            num_scheduled_tokens == 1
            and record.ordinal in self._tracker.computed.decoding
            and self._tracker.num_computed_tokens(record) == num_computed_tokens
        )

    def paused(self, scheduled: Container[str]) -> tuple[int, ...]:
        """Return the ordinals of requests that were expected in the step and are not in `scheduled`."""
        decoding = self._tracker.computed.decoding
        return tuple(
            record.ordinal
            for record in self._tracker
            if record.ordinal in decoding and record.request_id not in scheduled
        )

    def settled(
        self, record: RequestRecord, num_settled_tokens: int, num_in_flight_tokens: int = NOT_RECORDED
    ) -> SettledTokens | None:
        """Return the request's entry in `StepScheduled.settled`; None if it needs no entry.

        A request needs an entry if enough chunks with known keys have settled, and if it is not quarantined.
        """
        threshold = self._tracker.save_threshold(record, record.num_chunks_handled)
        if num_settled_tokens < threshold or record.trust is TrustRegion.QUARANTINED:
            return None
        num_keys = len(record.keys)
        if not self._projections.geometry.windows.has_any:
            num_settled_tokens = min(num_settled_tokens, num_keys * self._projections.configuration.chunk_size)
        elif self._projections.geometry.num_chunks_in(num_settled_tokens) > num_keys:
            return None  # with windows the exact count is written, because it determines which blocks they have left
        if num_settled_tokens < threshold:
            return None
        return SettledTokens(record.ordinal, record.num_chunks_handled, num_settled_tokens, num_in_flight_tokens)
