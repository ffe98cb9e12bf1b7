"""Whether vLLM's scheduler could have made these calls: tokens come from steps and loads, blocks after a lookup.

Asked of what is left of a recording; the rules of the core ask the rest. It knows events only.
"""

from __future__ import annotations

from kvledger.adapters.repro.recording import Recording
from kvledger.adapters.repro.scheduler_record import SchedulerRecord
from kvledger.lifecycle import events as e


def could_be_played(recording: Recording) -> bool:
    """Whether each call is one that vLLM could make after those before it."""
    record = SchedulerRecord(is_async=False)
    looked_up: set[int] = set()
    for sequence, event in recording.observations:
        if isinstance(event, e.StepScheduled):
            if not all(_goes_on(record, *entry[:2]) for entry in event.advanced):
                return False
            record.stepped(event, record.scheduled(event))
            continue
        if isinstance(event, e.RequestEvent) and not _is_possible(record, looked_up, event):
            return False
        if isinstance(event, e.LookupRequested):
            record.looked_up(event, sequence)
        record.fold(event, recording.configuration.chunk_size)
    return True


def _is_possible(record: SchedulerRecord, looked_up: set[int], event: e.RequestEvent) -> bool:
    """Whether the request can be told of this now; takes up what it may be told of next."""
    life = record.get(event.request_id)
    if life is None:
        return isinstance(event, e.RequestArrived)
    computed = record.num_computed_tokens(life)
    if isinstance(event, e.LookupRequested):
        looked_up.add(life.ordinal)
    elif isinstance(event, e.RequestPreempted):
        looked_up.discard(life.ordinal)
    elif isinstance(event, e.BlocksAllocated):
        return life.ordinal in looked_up
    elif isinstance(event, e.SessionContinued):
        return event.num_computed_tokens <= computed
    elif isinstance(event, e.RequestFinished):
        return event.num_settled_tokens <= max(computed, life.num_tokens_at_start)
    return True


def _goes_on(record: SchedulerRecord, ordinal: int, num_computed_tokens: int) -> bool:
    """Whether a request can be computed from there on; where all of a prompt was loaded, the last token is again."""
    life = record.by_ordinal(ordinal)
    if life is None or not life.block_ids:
        return False
    computed, start = record.num_computed_tokens(life), life.num_tokens_at_start
    return num_computed_tokens in ({computed, start, start - 1} if life.is_admitted else {computed})
