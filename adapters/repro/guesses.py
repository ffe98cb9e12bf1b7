"""Calls that failed before anything was recorded of them: what they were about, as far as their surroundings tell.

A log has only the name of the hook and of the request then. What came before and what follows says the rest, mostly:
the next step tells what a lost one computed, jobs that were never reported were in the report that was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs

from kvledger.adapters.repro.calls import HookCall, hook_calls
from kvledger.adapters.repro.recording import Recorded, Recording, report
from kvledger.adapters.repro.scheduler_record import Life, SchedulerRecord, runs_async
from kvledger.lifecycle import events as e

_FIRST_UNKNOWN_BLOCK = 1 << 19
"""Blocks whose numbers nobody recorded get numbers that nobody has."""


def with_guesses(recording: Recording) -> Recording:
    """The recording with guesses in the places of failures, before anything is left out of it."""
    if not any(isinstance(event, e.HookFailed) for _, event in recording.observations):
        return recording
    calls, left_over = hook_calls(recording.observations)
    record = SchedulerRecord(is_async=runs_async(recording.observations, recording.configuration.chunk_size))
    reported = {event.job_id for _, event in recording.observations if isinstance(event, e.TransferReported)}
    around = _Surroundings(recording, record, reported)
    observations = [entry for entry in recording.observations if isinstance(entry[1], e.LogNote)]
    observations += [entry for entry in left_over if not isinstance(entry[1], e.LogNote)]
    guessed: list[int] = []
    for number, call in enumerate(calls):
        observed = [entry for entry in _with_guess(call, calls[number + 1 :], around) if entry[0] not in around.dropped]
        guessed += [sequence for sequence, event in observed if (sequence, event) not in call.observed]
        for sequence, event in observed:
            _fold(around, sequence, event)
        observations += [entry for entry in observed if not isinstance(entry[1], e.LogNote)]
    observations.sort(key=lambda entry: entry[0])
    return attrs.evolve(recording, observations=tuple(observations), guessed=tuple(dict.fromkeys(guessed)))


def _with_guess(call: HookCall, later: Sequence[HookCall], around: _Surroundings) -> list[Recorded]:
    failures = [
        entry for entry in call.observed if isinstance(entry[1], e.HookFailed) and entry[1].hook != "chunk_keys"
    ]
    if not failures:
        return [entry for entry in call.observed if not isinstance(entry[1], e.HookFailed)]
    observed = [entry for entry in call.observed if not isinstance(entry[1], e.HookFailed)]
    if isinstance(call.main, e.RequestFinished):  # recorded in a second attempt, which has nothing to save
        return [entry for entry in observed if entry[1] is not call.main] + [
            (failures[0][0], event) for event in _end(call, later, around)
        ]
    if isinstance(call.main, e.HookFailed) or call.hook == "update_connector_output":
        guess = _GUESSES.get(call.hook)
        events = [] if guess is None else list(guess(call, later, around))
        if not events and isinstance(call.main, e.HookFailed):
            return list(call.observed)
        # Of an output everything is lost that came behind the report at which it failed.
        return [*observed, *((failures[0][0], event) for event in events)]
    return observed


def _fold(around: _Surroundings, sequence: int, event: e.Event) -> None:
    """What is guessed counts like what was observed."""
    record = around.record
    if isinstance(event, e.StepScheduled):
        record.stepped(event, record.scheduled(event))
    else:
        record.fold(event, around.recording.configuration.chunk_size)
    if isinstance(event, e.LookupRequested):
        record.looked_up(event, sequence)
    elif isinstance(event, e.TransferReported):
        around.reported.add(event.job_id)


@attrs.frozen
class _Surroundings:
    recording: Recording
    record: SchedulerRecord
    reported: set[int]
    """Jobs that are reported anywhere in the log, or guessed to have been."""
    dropped: set[int] = attrs.field(factory=set)
    """Sequence numbers of what is guessed to have been observed earlier."""


def _time_ns(call: HookCall) -> int:
    return int(getattr(call.main, "time_ns", 0))


def _of_request(later: Sequence[HookCall], request_id: str) -> Iterator[HookCall]:
    """Calls about a request until its id is used again."""
    for call in later:
        if call.request_id == request_id:
            if isinstance(call.main, e.RequestArrived):
                return
            yield call


def _arrival(call: HookCall, later: Sequence[HookCall], _around: _Surroundings) -> Iterator[e.Event]:
    lookups = (of.main for of in _of_request(later, call.request_id) if isinstance(of.main, e.LookupRequested))
    first = next(lookups, None)
    num_prompt_tokens = 1 if first is None else first.num_tokens
    yield e.RequestArrived(call.request_id, -call.sequence, num_prompt_tokens, _time_ns(call))


def _lookup(call: HookCall, later: Sequence[HookCall], around: _Surroundings) -> Iterator[e.Event]:
    life = around.record.get(call.request_id)
    if life is None:
        return
    for of in _of_request(later, call.request_id):
        if isinstance(of.main, e.LookupRequested):
            counts = of.main.num_computed_tokens, of.main.num_tokens
            break
    else:
        counts = 0, around.record.num_known_tokens(life)
    yield e.LookupRequested(call.request_id, *counts, _time_ns(call))


def _allocation(call: HookCall, later: Sequence[HookCall], around: _Surroundings) -> Iterator[e.Event]:
    life = around.record.get(call.request_id)
    if life is None:
        return
    configuration = around.recording.configuration
    num_blocks = -(-around.record.num_known_tokens(life) // configuration.block_size) * len(configuration.windows)
    first_block = _FIRST_UNKNOWN_BLOCK + call.sequence
    starts = [start for of in later for ordinal, start, _, _ in _advanced(of) if ordinal == life.ordinal]
    num_external_tokens = (
        max(0, starts[0] - life.num_local_tokens) if starts else around.recording.answers.get(life.last_lookup) or 0
    )
    block_ids = tuple(range(first_block, first_block + num_blocks))
    yield e.BlocksAllocated(call.request_id, block_ids, num_external_tokens, _time_ns(call))


def _advanced(call: HookCall) -> tuple[tuple[int, int, int, int], ...]:
    return call.main.advanced if isinstance(call.main, e.StepScheduled) else ()


def _step(call: HookCall, later: Sequence[HookCall], around: _Surroundings) -> Iterator[e.Event]:
    """Everybody with blocks goes on: by one token, or by all that it lacks, but not beyond what a later step says."""
    following = next((of.main for of in later if isinstance(of.main, e.StepScheduled)), None)
    counted = {} if following is None else {ordinal: computed for ordinal, computed, _, _ in following.advanced}
    advanced = []
    for life in around.record:
        if not life.block_ids or not (life.is_admitted or life.was_scheduled):
            continue
        if _is_looked_up_next(life, later):
            yield _preemption(call, life, later, around)
            continue
        start = life.num_tokens_at_start if life.is_admitted else around.record.num_computed_tokens(life)
        known = around.record.num_known_tokens(life)
        num_tokens = min(max(1, known - start), counted.get(life.ordinal, start + known) - start)
        if num_tokens > 0:
            advanced.append((life.ordinal, start, num_tokens, known))
    number = 0 if following is None else following.step
    yield e.StepScheduled(number, sum(entry[2] for entry in advanced), tuple(advanced), (), (), (), _time_ns(call))


def _is_looked_up_next(life: Life, later: Sequence[HookCall]) -> bool:
    """VLLM looks up nobody who runs, so it must have been preempted."""
    following = next(_of_request(later, life.request_id), None)
    return following is not None and following.hook == "get_num_new_matched_tokens" and not life.is_admitted


def _preemption(call: HookCall, life: Life, later: Sequence[HookCall], around: _Surroundings) -> e.RequestPreempted:
    """It is not noticed a second time, where a later call has noticed it."""
    for of in _of_request(later, life.request_id):
        noticed = [
            entry
            for entry in of.observed
            if isinstance(entry[1], e.RequestPreempted) and entry[1].request_id == life.request_id
        ]
        around.dropped.update(sequence for sequence, _ in noticed[:1])
        if noticed or isinstance(of.main, e.BlocksAllocated):
            break
    known = around.record.num_known_tokens(life)
    settled = min(around.record.num_computed_tokens(life), known)
    return e.RequestPreempted(life.request_id, settled, known, _time_ns(call))


def _reports(call: HookCall, _later: Sequence[HookCall], around: _Surroundings) -> Iterator[e.Event]:
    """Jobs that nobody ever reports were reported then."""
    ranks = tuple(range(around.recording.configuration.num_ranks))
    for job_id, (cause, _) in sorted(around.recording.jobs.items()):
        if cause < call.sequence and job_id not in around.reported:
            yield report(job_id, _time_ns(call), ranks_done=ranks)


def _end(call: HookCall, _later: Sequence[HookCall], around: _Surroundings) -> Iterator[e.Event]:
    life = around.record.get(call.request_id)
    if life is None:
        return
    told = call.main if isinstance(call.main, e.RequestFinished) else None
    known = around.record.num_known_tokens(life) if told is None else told.num_tokens
    status = "FINISHED_ABORTED" if told is None else told.status
    settled = min(around.record.num_computed_tokens(life), known)
    yield e.RequestFinished(call.request_id, status, settled, known, _time_ns(call))


def _reset(call: HookCall, _later: Sequence[HookCall], _around: _Surroundings) -> Iterator[e.Event]:
    yield e.CacheReset(_time_ns(call))


_Guess = Callable[[HookCall, Sequence[HookCall], _Surroundings], Iterator[e.Event]]
_GUESSES: dict[str, _Guess] = {
    "on_new_request": _arrival,
    "get_num_new_matched_tokens": _lookup,
    "update_state_after_alloc": _allocation,
    "build_connector_meta": _step,
    "update_connector_output": _reports,
    "request_finished": _end,
    "reset_cache": _reset,
}
