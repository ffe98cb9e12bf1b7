"""Events in English, and their fields as JSON or as one line of text. This module must not depend on logs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import attrs
import msgspec

from kvledger.adapters.units import duration, plural, ranges
from kvledger.lifecycle import Core, Extension, MissReason, suppressed
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Spent
from kvledger.lifecycle.untrusted import Undecodable, from_msgpack

MISS_REASONS: dict[str, str] = {
    MissReason.COMPLETE: "nothing is missing",
    MissReason.MISSING: "the next chunk is not in the pool",
    MissReason.SAVING: "the next chunk is still being saved",
    MissReason.WINDOW: "at every later chunk, a sliding window needs tokens that were not saved",
    MissReason.SLOWER: "loads take longer than computing, as measured in this engine",
    MissReason.LOAD_FAILED: "the request's last load failed, so the request must compute first",
    MissReason.QUARANTINED: "the request is quarantined",
}

WHY_DECLINED: dict[str, str] = {
    e.POOL_FULL: "the host pool had no room",
    e.UNFILLED: "a load into blocks on which the tokens depend had failed",
}

_LONG_WAIT_NS = 100_000_000
"""Shortest wait, in nanoseconds, that a text mentions between a request's arrival and its first lookup. During such a
wait, the engine served other requests."""


def state_change(before: str | None, after: str | None) -> str:
    """Return for example `running` (no change), `running → preempted` or `finished → released`.

    `before` is None if a life begins. `after` is None if the request was released.
    """
    if before is None:
        return after or ""
    return before if before == after else f"{before} → {after or 'released'}"


def _lookup(answer: e.LookupAnswered) -> str:
    local = f", {answer.num_computed_tokens} of them computed already" if answer.num_computed_tokens else ""
    asked = f"looked up {plural(answer.num_tokens, 'token')}{local}"
    if answer.miss_reason == MissReason.RECORDED:
        return f"{asked}: the recorded connector offers {plural(answer.num_external_tokens, 'token')}"
    if answer.miss_reason == MissReason.COMPLETE and not answer.num_hit_tokens:
        return f"{asked}: fewer than one chunk, so nothing can be loaded"
    why = MISS_REASONS.get(answer.miss_reason, answer.miss_reason)
    num_saved, num_offered = answer.num_hit_tokens, answer.num_external_tokens
    if 0 < num_saved <= answer.num_computed_tokens and not num_offered:
        return f"{asked}: {num_saved} are saved, but vLLM has these itself, so 0 offered; {why}"
    return f"{asked}: {num_saved} are saved, {num_offered} offered; {why}"


def lookups_in_a_row(num_times: int, duration_ns: int, waited_ns: int) -> str:
    """Return the end of a text about equal lookups: their number, their duration, and the wait before the first one."""
    repeated = f" — {num_times} times in {duration(duration_ns)}" if num_times > 1 else ""
    return repeated + (
        f"; first looked up {duration(waited_ns)} after the request arrived" if waited_ns >= _LONG_WAIT_NS else ""
    )


def spent_text(spent: Spent, num_preemptions: int, *, has_finished: bool) -> str:
    """Return for example `took 24.9 s: 22.8 s queued, 1.2 s running, 0.9 s preempted (twice)`."""
    parts = [f"{duration(spent.queued_ns)} queued", f"{duration(spent.running_ns)} running"]
    if num_preemptions:
        times = {1: "once", 2: "twice"}.get(num_preemptions, f"{num_preemptions} times")
        parts.append(f"{duration(spent.preempted_ns)} preempted ({times})")
    return f"took {duration(spent.total_ns)}{'' if has_finished else ' so far'}: {', '.join(parts)}"


def _load(load: e.LoadIssued) -> str:
    last = load.first_token + load.num_tokens - 1
    blocks = plural(len(load.block_ids), "block")
    into = f"into {blocks} ({ranges(load.block_ids)}){_async(load)}"
    return f"load {load.job_id} starts: tokens {load.first_token}–{last} {into}"


def _async(job: e.LoadIssued | e.SaveIssued) -> str:
    return ", asynchronously" if job.is_async else ""


def _awaited(event: e.TransferAwaited) -> str:
    why = "its blocks were taken" if event.before_forward else "no rank has reported it"
    return f"the next step waits for job {event.job_id}: {why}"


def _save(save: e.SaveIssued) -> str:
    blocks = plural(len(save.block_ids), "block")
    hurry = ", before they are overwritten" if save.before_forward else _async(save)
    chunks = f"chunk{'' if len(save.chunks) == 1 else 's'} {ranges(save.chunks)}"
    return f"save {save.job_id} starts: {chunks} from {blocks} ({ranges(save.block_ids)}){hurry}"


def _tail_save(save: e.TailSaveIssued) -> str:
    blocks = plural(len(save.block_ids), "block")
    return (
        f"save {save.job_id} starts: copies out {plural(save.num_tokens, 'token')} of the request's part-filled last "
        f"chunk from {blocks} ({ranges(save.block_ids)}), before these are overwritten"
    )


def _declined(save: e.SaveDeclined) -> str:
    why = WHY_DECLINED.get(save.reason, save.reason)
    return f"{plural(save.num_chunks, 'settled chunk')} from chunk {save.first_chunk} on not saved: {why}"


def _chunks(keys: Sequence[bytes]) -> str:
    return f"chunk {keys[0].hex()}" if len(keys) == 1 else f"{len(keys)} chunks, {keys[0].hex()} first"


def _allocated(event: e.BlocksAllocated) -> str:
    taken = f", {plural(event.num_external_tokens, 'offered token')} claimed" if event.num_external_tokens else ""
    return f"got {plural(len(event.block_ids), 'block')}{taken}"


def figures_of_extension(event: e.ExtensionEvent, core: Core) -> Mapping[str, int]:
    """Return name → amount: the figures that an extension computes for its event (see `Extension.figures`)."""
    extension, payload = _read(event, core)
    with suppressed():  # an extension's code may raise
        if extension is not None and payload is not None:
            return extension.figures(payload)
    return {}


def _read(event: e.ExtensionEvent, core: Core) -> tuple[Extension | None, msgspec.Struct | None]:
    extension = next((each for each in core.extensions if each.name == event.extension), None)
    return extension, None if extension is None else extension.payload_of(event)


def _of_extension(event: e.ExtensionEvent, core: Core) -> str:
    extension, payload = _read(event, core)
    with suppressed():  # an extension's code may raise; then show the fields
        text = None if extension is None or payload is None else extension.words(payload)
        if text is not None:
            return text
    return f"{event.extension} {event.extension_version}: {event.name}{_payload_text(event.payload)}"


def _payload_text(payload: bytes) -> str:
    try:
        fields: object = from_msgpack(payload)
    except Undecodable:
        return f", {plural(len(payload), 'byte')} that cannot be decoded"
    if not isinstance(fields, dict):
        return f" ({fields})"
    return f" ({', '.join(f'{name} {value}' for name, value in fields.items())})" if fields else ""


def _exchanged(event: e.HooksExchanged) -> str:
    counts = (
        (event.num_arrivals, "arrival"),
        (event.num_answers, "answer"),
        (event.num_allocations, "allocation"),
        (event.num_handed_out, "entry of metadata"),
        (event.num_reports, "report"),
        (event.num_received, "end of a load"),
        (event.num_finished, "end of a request"),
    )
    shown = [f"{number} x {what}" for number, what in counts if number]
    shown += [f"DIFFERENT: {kind} {number}: {what}" for kind, number, what in event.differences]
    return f"hook calls compared with the log: {', '.join(shown) or 'none'}"


def _delivered(event: e.EffectsDelivered) -> str:
    reported = (
        ("jobs", event.job_ids),
        ("reminders of jobs", event.awaited),
        ("unfilled blocks", event.block_ids),
        ("failed loads of requests", event.failed),
        ("free blocks of requests", event.sent),
        ("arrived loads of requests", event.received),
        ("ends that workers reported, of requests", event.reported),
    )
    return "delivered: " + "; ".join(f"{what} {', '.join(map(str, which))}" for what, which in reported if which)


_WORDS: dict[type[e.Event], Callable[..., str]] = {
    # Observations.
    e.RequestArrived: lambda event: (
        f"arrived with {plural(event.num_prompt_tokens, 'prompt token')}"
        f"{', with a cache salt' * event.is_salted}"
        f"{', and reads no prefix cache' * event.skips_prefix_cache}"
        f"{f', of trace {event.trace_parent[:16].hex()}' if event.trace_parent else ''}"
    ),
    e.BlocksAllocated: _allocated,
    e.BlockTableObserved: lambda event: f"the block table is corrected to {plural(len(event.block_ids), 'block')}",
    e.RequestPreempted: lambda event: (
        f"preempted with {plural(event.num_settled_tokens, 'settled token')}"
        f"{', its blocks zeroed' * event.blocks_zeroed}"
    ),
    e.SessionContinued: lambda event: (
        f"next turn: {event.num_computed_tokens} of {plural(event.num_tokens, 'token')} computed"
    ),
    e.TokensRolledBack: lambda event: f"rolled back to {plural(event.num_computed_tokens, 'computed token')}",
    e.RequestFinished: lambda event: f"finished ({event.status}) with {plural(event.num_tokens, 'token')}",
    e.HookFailed: lambda event: f"hook {event.hook} FAILED: {event.error}",
    e.DecisionWithheld: lambda event: f"withheld from vLLM: {event.detail}",
    e.LoadRefused: lambda _: "vLLM claimed offered tokens that cannot be loaded, so the load was reported as failed",
    e.EffectsDelivered: _delivered,
    e.StepReported: lambda event: (
        f"the output of the step of event {event.delivered} arrived, from {plural(len(event.ranks), 'rank')}"
    ),
    e.LoadErrorsObserved: lambda event: f"{plural(len(event.block_ids), 'block')} could not be filled",
    e.CacheReset: lambda _: "cache reset: all chunks that were saved before it are stale",
    e.PrefixCacheReset: lambda _: "vLLM reset its prefix cache, not the connector's: saved chunks can still be loaded",
    e.EndRefused: lambda event: (
        f"another connector reported {event.field} too early; kvledger removed the report before vLLM acted on it"
    ),
    e.HooksExchanged: _exchanged,
    e.LogNote: lambda event: f"note: {event.text}",
    # Decisions. Progress is left out: the state shows it.
    e.LookupAnswered: _lookup,
    e.LookupDeferred: lambda event: (
        f"looked up {plural(event.num_tokens, 'token')}: deferred"
        f"{f', job {event.job_id} is in flight' * bool(event.job_id)}"
    ),
    e.LoadIssued: _load,
    e.TransferAwaited: _awaited,
    e.BlocksHeld: lambda _: "the request's blocks are held until no copy reads them",
    e.LoadCompleted: lambda event: f"load {event.job_id} has arrived",
    e.LoadFailed: lambda event: f"load {event.job_id} failed: {event.error}",
    e.SaveIssued: _save,
    e.TailSaveIssued: _tail_save,
    e.SaveCompleted: lambda event: f"save {event.job_id} is done",
    e.SaveFailed: lambda event: f"save {event.job_id} failed: {event.error}",
    e.SaveDeclined: _declined,
    e.ChunksEvicted: lambda event: f"{_chunks(event.keys)} evicted to make room for a save of {event.request_id}",
    e.ChunksTainted: lambda event: f"{_chunks(event.keys)} tainted, not offered until saved again",
    e.RequestReleased: lambda _: "released; no transfers outstanding",
    e.RequestQuarantined: lambda event: f"quarantined ({event.reason}): cache disabled for this request",
    e.ExtensionStopped: lambda event: (
        f"extension {event.extension} {event.extension_version} is STOPPED from here on: "
        f"{event.where} raised {event.error}"
    ),
    e.InvariantViolated: lambda event: f"{event.rule} BROKEN: {event.detail}",
}


_MAX_ADVANCED = 4
"""Maximum number of requests that the text of a step names."""


def _step(event: e.StepScheduled) -> str:
    named = [
        f"{plural(scheduled, 'token')} of request number {ordinal} ({computed} of {known} computed before)"
        for ordinal, computed, scheduled, known in event.advanced[:_MAX_ADVANCED]
    ]
    num_others = len(event.advanced) - len(named)
    named += [f"{plural(num_others, 'other request')}"] if num_others else []
    which = f": {', '.join(named)}" if named else ""
    return f"step {event.step} runs {plural(event.num_scheduled_tokens, 'token')}{which}"


def _reported(event: e.TransferReported) -> str:
    jobs = f"job{'' if len(event.job_ids) == 1 else 's'} {', '.join(map(str, event.job_ids))}"
    done = f" done by {_ranks(event.ranks_done)}" if event.ranks_done else ""
    failed = f" failed on {_ranks(event.ranks_failed)}: {event.error}" if event.ranks_failed else ""
    again = ", repeated" * event.is_repeated
    withheld = f"; reported by the connector, not by workers ({event.withheld})" if event.withheld else ""
    return f"{jobs} reported as{done}{' and' * bool(done and failed)}{failed}{again}{withheld}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _computed(event: e.PrefillAdvanced | e.PrefillCompleted) -> str:
    return f"computed {event.num_computed_tokens} of {plural(event.num_tokens, 'token')}"


_MORE_WORDS: dict[type[e.Event], Callable[..., str]] = {
    e.ChunkKeysObserved: lambda event: (
        f"the request's chunks from chunk {event.first_chunk} on have {plural(len(event.keys), 'key')}: "
        f"{', '.join(key.hex() for key in event.keys) or 'none'}"
    ),
    e.LookupRequested: lambda event: (
        f"vLLM looks up {plural(event.num_tokens, 'token')}, {event.num_computed_tokens} of them computed already"
    ),
    e.PagesDigested: lambda event: (
        f"rank {event.rank} hashed {plural(len(event.digests), 'block')} of group {event.group}, beginning with block "
        f"{event.first_block} of the request's table, {'after a load' if event.is_load else 'before a save'}"
    ),
    e.PrefillAdvanced: _computed,
    e.PrefillCompleted: lambda event: f"{_computed(event)}; the prompt is complete",
    e.StepScheduled: _step,
    e.TransferReported: _reported,
    e.WindowLeft: lambda event: (
        "vLLM frees blocks before the request's sliding windows, at "
        f"{plural(event.num_settled_tokens, 'settled token')}"
    ),
}


def describe(event: e.Event, core: Core) -> str:
    """Return the event in words; empty for events that commands show in another way, such as steps and reports."""
    if isinstance(event, e.ExtensionObserved | e.ExtensionNoted | e.ExtensionDecided):
        return _of_extension(event, core)
    return describe_core_event(event)


def describe_core_event(event: e.Event) -> str:
    """Return the same words as `describe`, for an event that is not an extension's."""
    say = _WORDS.get(type(event))
    return "" if say is None else say(event)


def sentence(event: e.Event, core: Core) -> str:
    """Return the event in words, also for an event for which `describe` returns an empty text."""
    say = _MORE_WORDS.get(type(event))
    return describe(event, core) or (event_text(event) if say is None else say(event))


def describe_decisions(decisions: Iterable[e.Event], core: Core) -> list[str]:
    """Return phrases for decisions: one for all evictions, one for all tainted chunks, one for each other decision.

    Decisions without words are left out.
    """
    phrases = []
    num_evicted = num_tainted = 0
    for decision in decisions:
        if isinstance(decision, e.ChunksEvicted):
            num_evicted += len(decision.keys)
        elif isinstance(decision, e.ChunksTainted):
            num_tainted += len(decision.keys)
        elif phrase := describe(decision, core):
            phrases.append(phrase)
    if num_evicted:
        phrases.append(f"{plural(num_evicted, 'older chunk')} evicted to make room")
    if num_tainted:
        phrases.append(f"{plural(num_tainted, 'chunk')} tainted, not offered until saved again")
    return phrases


def plain(value: object) -> object:
    """Convert to JSON values: bytes to hex, objects with fields to mappings, other iterables to lists."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    elif attrs.has(type(value)):
        value = attrs.asdict(cast("attrs.AttrsInstance", value), recurse=False)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, Iterable) else value


def event_fields(event: e.Event | None) -> dict[str, object] | None:
    """Return the event as a JSON object: id, version and fields."""
    if event is None:
        return None
    return {"event": event.id, "version": event.version, **plain_fields(event)}


def plain_fields(event: e.Event) -> dict[str, object]:
    """Return field name → JSON value. The payload of an extension's event is decoded if possible."""
    return {name: plain(value) for name, value in _fields(event).items()}


def _fields(event: e.Event) -> dict[str, object]:
    fields = msgspec.structs.asdict(event)
    if isinstance(event, e.ExtensionEvent):
        with contextlib.suppress(Undecodable):
            fields["payload"] = from_msgpack(event.payload)
    return fields


def event_text(event: e.Event) -> str:
    """Return the event's id and fields in one line."""
    fields = ", ".join(f"{name}={value_text(value)}" for name, value in _fields(event).items())
    return f"{event.id}  {fields}"


def without_numbers(text: str) -> str:
    """Replace every number in the text with 0."""
    return re.sub(r"\d+", "0", text)


def value_text(value: object) -> str:
    """Return a field's value as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return "(" + ", ".join(value_text(item) for item in value) + ")"
    return str(value)
