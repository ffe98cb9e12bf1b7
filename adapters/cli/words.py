"""Numbers and events in plain words."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvledger.adapters.reading.workers import rank_of
from kvledger.lifecycle import Core, MissReason
from kvledger.lifecycle import events as e
from kvledger.storage.events import Retirement

if TYPE_CHECKING:
    from kvledger.adapters.reading.logs import StoredLog

_NS_PER_US, _NS_PER_MS, _NS_PER_S = 1_000, 1_000_000, 1_000_000_000

MISS_REASONS: dict[str, str] = {
    MissReason.COMPLETE: "nothing is missing",
    MissReason.NEVER_SAVED: "the next chunk was never saved",
    MissReason.SAVING: "the next chunk is still being saved",
    MissReason.EVICTED: "the next chunk was evicted",
    MissReason.TAINTED: "the next chunk was tainted by a failed load",
    MissReason.RESET: "the next chunk was lost to a cache reset",
    MissReason.WINDOW: "further on, something that a sliding window sees was not saved",
    MissReason.LIMITED: "a policy allows no more",
    MissReason.LOAD_FAILED: "its last load failed, so it computes first",
    MissReason.QUARANTINED: "the request is quarantined",
}


def plural(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def retired_remarks(retired: Sequence[Retirement]) -> list[str]:
    """Which events of a log were retired, when and why; one remark for each reason in a row."""
    remarks = []
    for reason, run in itertools.groupby(retired, key=lambda each: each.reason):
        segments = list(run)
        first, last = segments[0], segments[-1]
        at = dt.datetime.fromtimestamp(last.retired_at_unix_ns / 1e9, tz=dt.UTC)
        how_many = f"{plural(len(segments), 'segment')}, the last at {at:%Y-%m-%dT%H:%M:%SZ}"
        events = f"events {first.first_sequence}–{last.last_sequence}"
        remarks.append(f"{events} were retired by {reason} ({how_many}); what is left follows from the recorded hash")
    return remarks


def written_by(log: StoredLog) -> str:
    """The versions that wrote a log, and whose it is where it is not the scheduler's."""
    header = log.header
    text = f"kvledger {header.get('kvledger_version', 'unknown')}, vLLM {header.get('vllm_version', 'unknown')}"
    rank, connector = rank_of(log), header.get("connector")
    recorded = f", recording {connector}" if connector else ""
    return text + recorded + ("" if rank is None else f", worker {rank} of engine {header.get('engine_id')}")


def decides_elsewhere(log: StoredLog) -> bool:
    """Whether another connector saves and loads: then what kvledger would count of its own copies is not in the log."""
    return any(extension.declaration().replaces for extension in log.core.extensions)


def duration(nanoseconds: int) -> str:
    """A duration in its natural unit."""
    if nanoseconds < _NS_PER_MS:
        return f"{nanoseconds / _NS_PER_US:.1f} µs"
    if nanoseconds < _NS_PER_S:
        return f"{nanoseconds / _NS_PER_MS:.1f} ms"
    return f"{nanoseconds / _NS_PER_S:.2f} s"


def size(num_bytes: int) -> str:
    """A size in its natural binary unit."""
    for unit, num_bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << num_bits:
            return f"{num_bytes / (1 << num_bits):.1f} {unit}"
    return f"{num_bytes} B"


def milliseconds(time_ns: int) -> str:
    """A moment, in milliseconds since the log was opened."""
    return f"{time_ns / _NS_PER_MS:.3f}"


def event_range(first_sequence: int, last_sequence: int) -> str:
    """`7` or `7–9`."""
    return str(first_sequence) if first_sequence == last_sequence else f"{first_sequence}–{last_sequence}"


def state_change(before: str | None, after: str | None) -> str:
    """`running`, `running → preempted`, `finished → released`; a life that begins has no state before."""
    if before is None:
        return after or ""
    return before if before == after else f"{before} → {after or 'released'}"


def ranges(numbers: Iterable[int]) -> str:
    """`0–2, 5` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


def _lookup(answer: e.LookupAnswered) -> str:
    local = f", {answer.num_computed_tokens} of them computed already" if answer.num_computed_tokens else ""
    if answer.miss_reason == MissReason.RECORDED:
        offered = plural(answer.num_external_tokens, "token")
        return f"asked what can be loaded of {answer.num_tokens} tokens{local}: the recorded connector offers {offered}"
    why = MISS_REASONS.get(answer.miss_reason, answer.miss_reason)
    if answer.miss_cause:
        why += f" (event {answer.miss_cause})"
    return (
        f"asked what can be loaded of {answer.num_tokens} tokens{local}: "
        f"{answer.num_hit_tokens} are saved, {answer.num_external_tokens} offered; {why}"
    )


def _load(load: e.LoadIssued) -> str:
    last = load.first_token + load.num_tokens - 1
    blocks = plural(len(load.block_ids), "block")
    into = f"into {blocks} ({ranges(load.block_ids)}){_beside(load)}"
    return f"load {load.job_id} starts: tokens {load.first_token}–{last} {into}"


def _beside(job: e.LoadIssued | e.SaveIssued) -> str:
    return ", beside the steps" if job.is_async else ""


def _awaited(event: e.TransferAwaited) -> str:
    why = "its blocks were taken" if event.before_forward else "nobody has said a word about it"
    return f"the next step waits for job {event.job_id}: {why}"


def _save(save: e.SaveIssued) -> str:
    blocks = plural(len(save.block_ids), "block")
    hurry = ", before they are overwritten" if save.before_forward else _beside(save)
    chunks = f"chunk{'' if len(save.chunks) == 1 else 's'} {ranges(save.chunks)}"
    return f"save {save.job_id} starts: {chunks} from {blocks} ({ranges(save.block_ids)}){hurry}"


def _tail_save(save: e.TailSaveIssued) -> str:
    blocks = plural(len(save.block_ids), "block")
    return (
        f"save {save.job_id} starts: copies out {plural(save.num_tokens, 'token')} of its part-filled last chunk "
        f"from {blocks} ({ranges(save.block_ids)}), before its blocks are overwritten"
    )


def _declined(save: e.SaveDeclined) -> str:
    return f"{plural(save.num_chunks, 'settled chunk')} from {save.first_chunk} on not saved: {save.reason}"


def _allocated(event: e.BlocksAllocated) -> str:
    taken = f", {plural(event.num_external_tokens, 'offered token')} taken up" if event.num_external_tokens else ""
    return f"got {plural(len(event.block_ids), 'block')}{taken}"


def _of_extension(event: e.ExtensionEvent, core: Core) -> str:
    extension = next((each for each in core.extensions if each.name == event.extension), None)
    payload = None if extension is None else extension.payload_of(event)
    with contextlib.suppress(Exception):  # somebody else's code; the fields say it as well
        said = None if extension is None or payload is None else extension.words(payload)
        if said is not None:
            return said
    return f"{event.extension} {event.extension_version}: {event.name}{_said(event.payload)}"


def _said(payload: bytes) -> str:
    try:
        said = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError:
        return f", {plural(len(payload), 'byte')} that are no msgpack"
    if not isinstance(said, dict):
        return f" ({said})"
    return f" ({', '.join(f'{name} {value}' for name, value in said.items())})" if said else ""


def _delivered(event: e.EffectsDelivered) -> str:
    told = (
        ("jobs", event.job_ids),
        ("reminders of jobs", event.awaited),
        ("unfilled blocks", event.block_ids),
        ("failed loads of lives", event.failed),
        ("free blocks of lives", event.sent),
        ("arrived loads of lives", event.received),
        ("heard of lives", event.heard),
    )
    return "handed over: " + "; ".join(f"{what} {', '.join(map(str, which))}" for what, which in told if which)


_WORDS: dict[type[e.Event], Callable[..., str]] = {
    # Observations.
    e.RequestArrived: lambda event: f"arrived with {plural(event.num_prompt_tokens, 'prompt token')}",
    e.BlocksAllocated: _allocated,
    e.BlockTableObserved: lambda event: f"its block table is corrected to {plural(len(event.block_ids), 'block')}",
    e.RequestPreempted: lambda event: (
        f"preempted with {plural(event.num_settled_tokens, 'settled token')}"
        f"{', its blocks zeroed' * event.blocks_zeroed}"
    ),
    e.SessionContinued: lambda event: (
        f"next turn: {event.num_computed_tokens} of {event.num_tokens} tokens are computed"
    ),
    e.TokensRolledBack: lambda event: f"rolled back to {plural(event.num_computed_tokens, 'computed token')}",
    e.RequestFinished: lambda event: f"finished ({event.status}) with {plural(event.num_tokens, 'token')}",
    e.HookFailed: lambda event: f"hook {event.hook} FAILED: {event.error}",
    e.DecisionWithheld: lambda event: f"withheld from vLLM: {event.detail}",
    e.LoadRefused: lambda _: "vLLM took up an answer whose load will not be; it is told",
    e.EffectsDelivered: _delivered,
    e.CacheReset: lambda _: "cache reset: everything saved before is stale",
    e.LogNote: lambda event: f"note: {event.text}",
    # Decisions. Progress is left out, because the state tells it.
    e.LookupAnswered: _lookup,
    e.LookupDeferred: lambda event: (
        f"asked what can be loaded of {event.num_tokens} tokens: to be asked again"
        f"{f', save {event.job_id} is under way' * bool(event.job_id)}"
    ),
    e.LoadIssued: _load,
    e.TransferAwaited: _awaited,
    e.BlocksHeld: lambda _: "its blocks are held until nothing reads them",
    e.LoadCompleted: lambda event: f"load {event.job_id} has arrived",
    e.LoadFailed: lambda event: f"load {event.job_id} failed: {event.error}",
    e.SaveIssued: _save,
    e.TailSaveIssued: _tail_save,
    e.SaveCompleted: lambda event: f"save {event.job_id} is done",
    e.SaveFailed: lambda event: f"save {event.job_id} failed: {event.error}",
    e.SaveDeclined: _declined,
    e.RequestReleased: lambda _: "released, nothing is owed any more",
    e.RequestQuarantined: lambda event: f"quarantined ({event.reason}): no more help from the cache",
    e.ExtensionStopped: lambda event: (
        f"extension {event.extension} {event.extension_version} is STOPPED, it takes no part from here on: "
        f"{event.where} raised {event.error}"
    ),
    e.InvariantViolated: lambda event: f"{event.rule} BROKEN: {event.detail}",
}


def words(event: e.Event, core: Core) -> str:
    """An event in plain words, empty where another part of the line tells it."""
    if isinstance(event, e.ExtensionObserved | e.ExtensionNoted | e.ExtensionDecided):
        return _of_extension(event, core)
    return words_of_core(event)


def words_of_core(event: e.Event) -> str:
    """The same of an event that is no extension's."""
    say = _WORDS.get(type(event))
    return "" if say is None else say(event)


def decision_words(decisions: Iterable[e.Event], core: Core) -> list[str]:
    """What was decided, one phrase each; chunks are counted."""
    decisions = tuple(decisions)
    phrases = [phrase for decision in decisions if (phrase := words(decision, core))]
    num_evicted = sum(isinstance(decision, e.ChunkEvicted) for decision in decisions)
    num_tainted = sum(isinstance(decision, e.ChunkTainted) for decision in decisions)
    if num_evicted:
        phrases.append(f"{plural(num_evicted, 'older chunk')} evicted to make room")
    if num_tainted:
        phrases.append(f"{plural(num_tainted, 'chunk')} tainted, not offered again until saved anew")
    return phrases


def other_code_remarks(log: StoredLog) -> list[str]:
    """That what was decided is decided again by other code, which is no divergence by itself."""
    other = log.core.other_code(log.header) if log.header else ""
    return [f"decided again by other code ({other}); a divergence may come from that"] if other else []
