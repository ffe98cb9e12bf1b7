"""The events that a log can contain.

An *observation* is what the connector saw: a hook call of vLLM or the report of a worker. A *decision* is what kvledger
did because of an observation. The decision's field `cause` is the sequence number of this observation. Decisions depend
on nothing but the observations, so a replay can make the decisions again with today's code. An observation about a
request names the request's id, and is about the current life of this id. A decision about a request also names the
ordinal of the life.

Rules for this file
  1. An event has plain values: ints, strings, bytes, booleans and tuples of them. It refers to no object of vLLM.
  2. No token ids, prompts or salts. Chunk keys are hashes that already contain the salt.
  3. The wire format (`codec.py`) depends on the wire code (`tag`) and the order of the fields, not on the order of the
     classes. You may append a field with a default to a released event. Any other change of its fields needs the next
     version of the event and an upcaster.
  4. `time_ns` is monotonic time since the log was opened. Time enters the core only through this field.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple, TypeVar, cast

import msgspec

from kvledger.lifecycle.ranges import (
    BlockId,
    BlockNumber,
    ChunkNumber,
    Count,
    DurationNs,
    Generation,
    Group,
    Int64,
    JobId,
    LifeOrdinal,
    NumBytes,
    NumTokens,
    Ordinal,
    Sequence,
    Slot,
    Step,
    TimeNs,
)


class Variants(NamedTuple):
    """The two triggers of an event. The value of one field decides which of them applies."""

    field: str
    if_set: str
    """The trigger if the field is true or not 0."""
    if_not: str


class Event(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all events. Each class has a stable id, a version, a kind (observation or decision) and a wire code.

    The wire code is `tag`. Events are of type `msgspec.Struct`, so that msgspec decodes logs directly into events.
    """

    id: ClassVar[str]
    version: ClassVar[int]
    is_decision: ClassVar[bool]
    handler_method: ClassVar[str]
    """Name of the state handlers' method for this event: the class name in snake case."""
    variants: ClassVar[Variants | None] = None
    """The event's two triggers in the transition tables; None if its id is the only trigger."""


class RequestEvent(Event, frozen=True):
    """An event about one request. Such events can have rows in the transition tables."""

    request_id: str


class RequestDecision(RequestEvent, frozen=True):
    """A decision about one life of a request.

    A request id may be used again, but an ordinal is unique in its log. The generation counts how often the life was
    preempted, rolled back to 0 tokens, or continued with a session's next turn. A decision that settles a job has the
    same generation as the decision that issued the job.
    """

    ordinal: Ordinal
    generation: Generation


NOT_RECORDED = -1
"""Replaces a number that the log lacks: an older kvledger wrote the log, or the embedding program lacks the number."""

NO_LIFE = -1
"""Ordinal and generation in a decision about no request, or about an unknown request."""
NO_SLOT = -1
"""Slot of a page that is not copied or not stored, because the group's window has left the page."""
NULL_BLOCK = 0
"""Id of vLLM's null block. In the table of a group with a window, it replaces blocks that vLLM does not keep."""

_EventClass = TypeVar("_EventClass", bound=type[Event])


def field_names(event_class: type[Event]) -> tuple[str, ...]:
    """Return the fields of an event in wire order."""
    return event_class.__struct_fields__


def wire_code(event_class: type[Event]) -> int:
    """Return the number that identifies the class in frames that this kvledger writes."""
    return cast("int", event_class.__struct_config__.tag)


def trigger_of(event: Event) -> str:
    """Return the trigger of an event: its id, or `id/variant` if its class has variants."""
    variants = event.variants
    if variants is None:
        return event.id
    return variants.if_set if getattr(event, variants.field) else variants.if_not


def triggers_of(event_class: type[Event]) -> tuple[str, ...]:
    """Return the triggers that events of a class can have."""
    return (event_class.id,) if event_class.variants is None else event_class.variants[1:]


def _declare(
    event_id: str, version: int, variants: tuple[str, str, str] | None, *, is_decision: bool
) -> Callable[[_EventClass], _EventClass]:
    def declare(event_class: _EventClass) -> _EventClass:
        event_class.id = event_id
        event_class.version = version
        event_class.is_decision = is_decision
        if variants is not None:
            field, if_set, if_not = variants
            event_class.variants = Variants(field, f"{event_id}/{if_set}", f"{event_id}/{if_not}")
        event_class.handler_method = re.sub(r"(?<!^)(?=[A-Z])", "_", event_class.__name__).lower()
        return event_class

    return declare


def observation(
    event_id: str, *, version: int = 1, variants: tuple[str, str, str] | None = None
) -> Callable[[_EventClass], _EventClass]:
    """Declare an event that records what the connector saw.

    `variants`: (field, variant if the field is true or not 0, variant otherwise).
    """
    return _declare(event_id, version, variants, is_decision=False)


def decision(
    event_id: str, *, version: int = 1, variants: tuple[str, str, str] | None = None
) -> Callable[[_EventClass], _EventClass]:
    """Declare an event that records what the connector decided."""
    return _declare(event_id, version, variants, is_decision=True)


# --- Observations: one request -----------------------------------------------------------------


@observation("request.arrived")
class RequestArrived(RequestEvent, frozen=True, tag=0):
    """vLLM accepted a request (`on_new_request`), so a life begins. `ordinal` is the number of this life in the log.

    `trace_parent` is the caller's span in a distributed trace: 16 bytes of trace id and 8 bytes of span id; empty if
    the request belongs to no trace. `skips_prefix_cache`: whether vLLM uses no cached tokens for the request
    (`Request.skip_reading_prefix_cache`), for example because the request asks for log probabilities of the prompt.
    `is_salted`: whether the request has a `cache_salt`. A request with a salt shares no chunk key with a request that
    has another salt or no salt.
    """

    ordinal: LifeOrdinal
    num_prompt_tokens: NumTokens
    time_ns: TimeNs
    trace_parent: bytes = b""
    skips_prefix_cache: bool = False
    is_salted: bool = False


@observation("chunk.keys_observed")
class ChunkKeysObserved(RequestEvent, frozen=True, tag=1):
    """The keys of the request's chunks from `first_chunk` on. They replace all known keys from `first_chunk` on.

    Audits check each key against a hash of vLLM (`Request.block_hashes`): the hash of the last block that does not
    extend beyond the chunk. `hash_prefixes` has the first 4 bytes of this hash for each chunk, or zeros if vLLM has no
    such hash. It is empty if no hashes were recorded. `are_block_hashes`: whether each key must be the beginning of
    this hash. If not, each key must differ from the hash, because the key covers more than the hash.
    """

    first_chunk: ChunkNumber
    keys: tuple[bytes, ...]
    hash_prefixes: bytes = b""
    are_block_hashes: bool = False


@observation("lookup.requested")
class LookupRequested(RequestEvent, frozen=True, tag=2):
    """The scheduler asks how many tokens can be loaded (`get_num_new_matched_tokens`).

    `num_computed_tokens` is the number of tokens that vLLM found in its own prefix cache. `num_tokens` counts prompt
    and output.
    """

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    time_ns: TimeNs


@observation("blocks.allocated")
class BlocksAllocated(RequestEvent, frozen=True, tag=3):
    """vLLM allocated blocks to the request (`update_state_after_alloc`).

    `block_ids` are all blocks that the request has after the allocation.
    """

    block_ids: tuple[BlockId, ...]
    num_external_tokens: NumTokens
    time_ns: TimeNs


@observation("blocks.observed")
class BlockTableObserved(RequestEvent, frozen=True, tag=4):
    """The scheduler's block table of the request, if this table differs from the block table computed from the log."""

    block_ids: tuple[BlockId, ...]
    time_ns: TimeNs


@observation("request.preempted")
class RequestPreempted(RequestEvent, frozen=True, tag=5):
    """vLLM preempted the request and freed its blocks.

    When vLLM preempted the request, the KV of the first `num_settled_tokens` tokens was certainly in the blocks.
    `num_tokens` counts prompt and output. `blocks_zeroed`: whether vLLM may zero the blocks before kvledger can copy
    them.
    """

    num_settled_tokens: NumTokens
    num_tokens: NumTokens
    time_ns: TimeNs
    blocks_zeroed: bool = False
    num_in_flight_tokens: NumTokens = NOT_RECORDED
    """The request's tokens in steps that were in flight when vLLM preempted the request."""


@observation("session.continued", variants=("num_computed_tokens", "part", "all"))
class SessionContinued(RequestEvent, frozen=True, tag=6):
    """The next turn of a streaming session begins.

    vLLM keeps the request's blocks and its computed tokens, drops its other tokens, and appends new tokens.
    """

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    num_prompt_tokens: NumTokens
    time_ns: TimeNs


@observation("tokens.rolled_back", variants=("num_computed_tokens", "part", "all"))
class TokensRolledBack(RequestEvent, frozen=True, tag=7):
    """The scheduler counts fewer computed tokens than before, for example after a failed load."""

    num_computed_tokens: NumTokens
    time_ns: TimeNs


@observation("request.finished")
class RequestFinished(RequestEvent, frozen=True, tag=8):
    """vLLM will not schedule the request again (`request_finished`). `status` is vLLM's name for how the request ended.

    `blocks_zeroed`: whether vLLM may zero the request's blocks before kvledger can copy them.
    """

    status: str
    num_settled_tokens: NumTokens
    num_tokens: NumTokens
    time_ns: TimeNs
    blocks_zeroed: bool = False
    num_in_flight_tokens: NumTokens = NOT_RECORDED
    """The request's tokens in steps that were in flight when the request ended."""
    num_computed_tokens: NumTokens = NOT_RECORDED
    """The request's computed tokens, as vLLM counts them. The steps in the log add up to more tokens if drafts were
    rejected or a load failed."""


# --- Observations: the engine ------------------------------------------------------------------


class SettledTokens(NamedTuple):
    """An entry of `StepScheduled.settled`: the settled tokens of one request that has chunks to save."""

    ordinal: Ordinal
    first_chunk: ChunkNumber
    """The first chunk that may need a save. Chunks with lower numbers were already saved or declined."""
    num_settled_tokens: NumTokens
    """The request's settled tokens. If no group has a window, tokens of chunks without a known key do not count."""
    num_in_flight_tokens: NumTokens = NOT_RECORDED
    """The request's tokens in steps in flight."""


@observation("step.scheduled")
class StepScheduled(Event, frozen=True, tag=9):
    """One engine step (`build_connector_meta`). The event has only the differences from the expected step.

    A *steady* request decoded one token in its last step and is expected to decode one more. The event takes a few
    bytes if each request of the step is steady and decodes one token.
    """

    step: Step
    num_scheduled_tokens: NumTokens
    """Number of tokens that the step schedules, added up over all requests."""
    advanced: tuple[tuple[Ordinal, NumTokens, NumTokens, NumTokens], ...]
    """(ordinal, computed tokens before the step, scheduled tokens, known tokens) of every request in the step, except
    steady requests that decode one token."""
    paused: tuple[Ordinal, ...]
    """Ordinals of steady requests that are not in the step."""
    extended: tuple[tuple[Ordinal, tuple[BlockId, ...]], ...]
    """(ordinal, block ids) of each request to whose block table vLLM has appended these blocks."""
    settled: tuple[SettledTokens, ...]
    """(ordinal, first chunk to save, settled tokens, tokens in flight) of each request with chunks to save."""
    time_ns: TimeNs


class Withheld(enum.StrEnum):
    """Why the connector itself reports a job as failed, without a report of the workers."""

    UNWRITTEN = "unwritten"
    """The event log could not be written, so a crash would leave no trace of the job."""
    CONTRACT = "contract"
    """The job would have broken vLLM's contract."""
    HOOK_FAILED = "hook_failed"
    """A hook failed before the job was handed to the workers."""
    OVERDUE = "overdue"
    """The workers did not report the job in time, and kvledger no longer decides anything."""


@observation("transfer.reported")
class TransferReported(Event, frozen=True, tag=10):
    """Ranks reported the result of a copy. The event names these ranks, so a rank that reports twice counts once."""

    job_ids: tuple[JobId, ...]
    """Jobs that were copied together and have one result: the saves of a step, or a single job."""
    ranks_done: tuple[Int64, ...]
    ranks_failed: tuple[Int64, ...]
    is_repeated: bool
    """Whether kvledger asked the workers to report the jobs again. The jobs may be settled already."""
    num_bytes: tuple[NumBytes, ...]
    """Bytes copied for each job: the sum over the ranks of this event."""
    duration_ns: DurationNs
    error: str
    withheld: str
    """Why the connector itself reports the jobs as failed, one of `Withheld`; empty if ranks reported the jobs."""
    time_ns: TimeNs
    moments: tuple[Int64, ...] = ()
    """When the ranks of this event began and ended the copy (`CopyMoments.as_fields`); empty if this was not
    recorded."""

    @classmethod
    def by(cls, ranks: Iterable[int], job_id: int, time_ns: int, *, error: str = "") -> TransferReported:
        """Return the report that these ranks have done the job, or failed with `error`."""
        done, failed = ((), tuple(ranks)) if error else (tuple(ranks), ())
        return cls((job_id,), done, failed, False, (0,), 0, error, "", time_ns)  # noqa: FBT003 -- in the wire's order


@observation("load.errors_observed")
class LoadErrorsObserved(Event, frozen=True, tag=11):
    """Blocks that a worker could not fill. A request that holds one of them may have read garbage."""

    block_ids: tuple[Int64, ...]
    time_ns: TimeNs


@observation("cache.reset")
class CacheReset(Event, frozen=True, tag=12):
    """The connector's cache was reset (`reset_cache`), for example after a change of weights. All saved KV is stale."""

    time_ns: TimeNs


@observation("hook.failed")
class HookFailed(Event, frozen=True, tag=13):
    """A hook of kvledger raised an error. vLLM got a safe answer from the hook.

    If `request_id` is empty, the failure affects the whole step and every request that holds blocks.
    """

    hook: str
    request_id: str
    error: str
    time_ns: TimeNs


CORRUPT = "LedgerCorrupt"
"""Beginning of `HookFailed.error` if a fold failed. After such an event, kvledger decides nothing."""


# --- Decisions: lookups and loads --------------------------------------------------------------


class MissReason(enum.StrEnum):
    """Why a hit ends."""

    COMPLETE = "complete"
    """Every whole chunk of the request's tokens is in the host pool."""
    MISSING = "missing"
    """The chunk after the hit is not in the host pool. The log shows whether this chunk was ever saved, and why it was
    removed."""
    SAVING = "saving"
    """The chunk after the hit is not in the host pool yet. A save of this chunk is in flight."""
    WINDOW = "window"
    """More tokens are in the host pool, but a longer load would lack a page that a sliding window reads."""
    SLOWER = "slower"
    """According to measurements while serving, loading the tokens takes longer than computing them."""
    LOAD_FAILED = "load_failed"
    """A load of the request failed. The request must compute tokens before kvledger offers it another load."""
    QUARANTINED = "quarantined"
    """The request is quarantined."""
    RECORDED = "recorded"
    """Another connector answered; the log does not contain its reason."""


@decision("lookup.answered")
class LookupAnswered(RequestDecision, frozen=True, tag=14):
    """The answer to a lookup, with the numbers of tokens from which kvledger computed the answer."""

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    num_hit_tokens: Int64
    num_external_tokens: Int64
    is_async: bool
    """Whether the offered load is asynchronous, so that the request is in no step until the load is over. If not, the
    request's next step waits for the load."""
    miss_reason: str
    """Why the hit ends where it does: a value of `MissReason`."""
    cause: Sequence


@decision("lookup.deferred")
class LookupDeferred(RequestDecision, frozen=True, tag=15):
    """The scheduler was asked to repeat the lookup later, because the copy `job_id` is in flight.

    This copy saves tokens that the request could load, or loads chunks of the same prefix for another request. With
    sliding windows, the copy may be any load of another request, because only one load runs at a time.
    """

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    job_id: JobId
    num_deferred: Count
    """Number of consecutive deferrals, including this one: at most `LedgerConfiguration.max_deferred_lookups`. All
    deferrals for one load of the same chunks by another request count as one."""
    cause: Sequence


@decision("load.issued")
class LoadIssued(RequestDecision, frozen=True, tag=16):
    """Pages are copied from host slots to the request's blocks: from `slots[i]` to `block_ids[i]`.

    Without `is_async`, the copy precedes the step's forward pass. With `is_async`, the copy runs outside of the steps,
    and the request is in no step until the copy is settled.
    """

    job_id: JobId
    first_token: NumTokens
    num_tokens: NumTokens
    slots: tuple[Slot, ...]
    block_ids: tuple[BlockId, ...]
    is_async: bool
    cause: Sequence


@decision("load.completed")
class LoadCompleted(RequestDecision, frozen=True, tag=17):
    """Every rank has loaded its part of the job's pages."""

    job_id: JobId
    cause: Sequence


@decision("load.failed")
class LoadFailed(RequestDecision, frozen=True, tag=18):
    """A load failed. The chunks of the load are tainted, and vLLM recomputes the tokens or fails the request.

    Either a rank could not load the pages, or a rank did not report the load in time, or the load was not handed to the
    workers.
    """

    job_id: JobId
    error: str
    cause: Sequence


# --- Decisions: saves and the host pool --------------------------------------------------------


@decision("save.issued")
class SaveIssued(RequestDecision, frozen=True, tag=19):
    """Pages are copied from blocks to host slots: from `block_ids[i]` to `slots[i]`.

    With `before_forward`, vLLM has already freed some of these blocks, so the copy precedes the step's forward pass.
    With `is_async`, the copy may outlast the step. The request then keeps the blocks until the copy is done or a step
    waits for the copy.
    """

    job_id: JobId
    chunks: tuple[ChunkNumber, ...]
    slots: tuple[Slot, ...]
    block_ids: tuple[BlockId, ...]
    before_forward: bool
    is_async: bool
    cause: Sequence


@decision("tail.save_issued")
class TailSaveIssued(RequestDecision, frozen=True, tag=20):
    """The tail of a preempted request is copied to host slots before the step's forward pass.

    The tail begins at `first_token`, where the whole chunks end, and has `num_tokens` tokens. Only this life may load
    the tail. `generation` is the generation that computed the tail.
    """

    job_id: JobId
    first_token: NumTokens
    num_tokens: NumTokens
    slots: tuple[Slot, ...]
    block_ids: tuple[BlockId, ...]
    cause: Sequence


@decision("save.completed")
class SaveCompleted(RequestDecision, frozen=True, tag=21):
    """Every rank has saved its part of the job's pages.

    From now on, lookups find the job's chunks, and lookups of the same request find its tail. If the cache was reset
    while the save was in flight, the saved pages are discarded.
    """

    job_id: JobId
    cause: Sequence


@decision("save.failed", variants=("quiet", "quiet", "silent"))
class SaveFailed(RequestDecision, frozen=True, tag=22):
    """A save failed.

    `quiet`: whether no rank writes the save's slots any more, so that the slots are free again. If not, kvledger gave
    up the save before every rank had reported it. The slots become free when every rank has reported the save.
    """

    job_id: JobId
    error: str
    quiet: bool
    cause: Sequence


POOL_FULL = "pool_full"
UNFILLED = "unfilled"


@decision("save.declined")
class SaveDeclined(RequestDecision, frozen=True, tag=23):
    """kvledger decided not to save some settled chunks.

    `reason`: `pool_full`, or `unfilled` (a load into the request's blocks failed).
    """

    first_chunk: ChunkNumber
    num_chunks: ChunkNumber
    reason: str
    cause: Sequence


@decision("transfer.awaited", variants=("before_forward", "fence", "ask"))
class TransferAwaited(RequestDecision, frozen=True, tag=24):
    """Workers are reminded of a job in flight, and the next step waits for the job.

    `before_forward`: whether the reason is that the step may overwrite the job's blocks. If not, the reason is that a
    rank has not reported the job in time; all ranks then report the job again.
    """

    job_id: JobId
    before_forward: bool
    cause: Sequence


@decision("blocks.held")
class BlocksHeld(RequestDecision, frozen=True, tag=25):
    """`request_finished` answered True: vLLM keeps the request's blocks as long as a copy reads them."""

    cause: Sequence


@decision("chunks.evicted")
class ChunksEvicted(Event, frozen=True, tag=26):
    """Chunks were evicted from the host pool to make room for a save."""

    keys: tuple[bytes, ...]
    """Keys of the evicted chunks, in the order of eviction."""
    request_id: str
    """The request whose save needed the slots."""
    ordinal: Ordinal
    generation: Generation
    cause: Sequence


@decision("chunks.tainted")
class ChunksTainted(Event, frozen=True, tag=27):
    """Chunks that could not be loaded. They are not offered again until they have been saved again."""

    keys: tuple[bytes, ...]
    cause: Sequence


# --- Decisions: the state of a request ---------------------------------------------------------


@decision("prefill.advanced")
class PrefillAdvanced(RequestDecision, frozen=True, tag=28):
    """Some of the request's known tokens are computed or in a step in flight. The others wait for a later step."""

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    cause: Sequence


@decision("prefill.completed")
class PrefillCompleted(RequestDecision, frozen=True, tag=29):
    """Every known token of the request is computed or in a step in flight."""

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    cause: Sequence


@decision("request.released")
class RequestReleased(RequestDecision, frozen=True, tag=30):
    """The ended request has no copy in flight. kvledger forgets the request, and its kept blocks are freed."""

    cause: Sequence


@decision("request.quarantined")
class RequestQuarantined(RequestDecision, frozen=True, tag=31):
    """From now on, the request gets no hits and no saves. It computes its tokens."""

    reason: str
    cause: Sequence


@decision("invariant.violated")
class InvariantViolated(Event, frozen=True, tag=32):
    """A rule was broken. `rule` is the rule's name in `docs/invariants.md`."""

    rule: str
    request_id: str
    """Request that the breach concerns. Empty if the breach does not concern a single request. In that case, `ordinal`
    and `generation` are `NO_LIFE`."""
    ordinal: Ordinal
    generation: Generation
    detail: str
    cause: Sequence


@observation("log.note")
class LogNote(Event, frozen=True, tag=33):
    """A note for people who read the log, for example about a start, a shutdown or lost events."""

    text: str
    time_ns: TimeNs


SHUT_DOWN = "connector shut down"
"""Text of the last note that a connector writes when it is shut down."""
DECLINED = "declined: "
"""Beginning of the note that the connector does not serve the model. The reason follows."""
LOG_BEFORE = "the log before, "
"""Beginning of the note that the previous log was not closed or is incomplete."""


@observation("window.left")
class WindowLeft(RequestEvent, frozen=True, tag=34):
    """vLLM frees blocks that the request's sliding windows have moved past.

    The event is recorded before a step or before `RequestFinished`, and only if the request was in the previous step.
    Until this event, vLLM had freed only blocks that the windows had moved past when `num_settled_tokens` tokens were
    settled. The blocks that vLLM frees now keep their contents until the step's forward pass.
    """

    num_settled_tokens: NumTokens
    time_ns: TimeNs
    num_in_flight_tokens: NumTokens = NOT_RECORDED
    """The request's tokens in steps in flight. `num_settled_tokens` leaves these tokens out."""


@observation("decision.withheld")
class DecisionWithheld(Event, frozen=True, tag=35):
    """A decision was not carried out: vLLM got the safe answer, or a job was not handed to the workers.

    `rule` is the rule that the decision would have broken; empty if the log could not be written.
    """

    request_id: str
    rule: str
    detail: str
    time_ns: TimeNs


@observation("effects.delivered")
class EffectsDelivered(Event, frozen=True, tag=39):
    """kvledger delivered pending jobs and notifications. Nothing is recorded if none were pending.

    An *end* notifies vLLM that an asynchronous load is over or that kept blocks are free. The workers get jobs,
    reminders, blocks to report as not filled, and the ends that workers report to vLLM. kvledger's scheduler side
    reports all other ends.
    """

    job_ids: tuple[JobId, ...]
    """Jobs given to the workers. A job is given with the first step after its decision, or never."""
    awaited: tuple[JobId, ...]
    """Jobs about which the workers got a reminder."""
    block_ids: tuple[BlockId, ...]
    """Blocks that the workers report as not filled."""
    failed: tuple[Ordinal, ...]
    """Ordinals of lives whose asynchronous load failed. Every worker reports these failures to vLLM."""
    sent: tuple[Ordinal, ...]
    """Ordinals of ended lives whose kept blocks no copy reads any more. Every worker reports to vLLM that these blocks
    are free."""
    received: tuple[Ordinal, ...]
    """Ordinals of lives whose asynchronous load is complete. kvledger's scheduler side reports these loads to vLLM."""
    reported: tuple[Ordinal, ...]
    """Ordinals of lives for which the workers have given vLLM an *end*."""


@observation("load.refused")
class LoadRefused(Event, frozen=True, tag=40):
    """vLLM claimed offered tokens, but no load is issued: a hook of kvledger failed, or no load was decided.

    If the answer offered an asynchronous load, kvledger reports that load as failed. If the load was to run within a
    step, kvledger reports the blocks `block_ids` as not filled.
    """

    request_id: str
    block_ids: tuple[BlockId, ...]
    time_ns: TimeNs


# --- Of extensions -------------------------------------------------------------------------------


@observation("extension.observed")
class ExtensionObserved(RequestEvent, frozen=True, tag=36):
    """An extension's own observation about one request.

    `payload`: the fields of the extension's event `name`, as msgpack.
    """

    extension: str
    name: str
    extension_version: Count
    payload: bytes
    time_ns: TimeNs


@decision("extension.decided")
class ExtensionDecided(RequestDecision, frozen=True, tag=37):
    """An extension's own decision, by one of its handlers.

    `payload`: the fields of the extension's event `name`, as msgpack.
    """

    extension: str
    name: str
    extension_version: Count
    payload: bytes
    cause: Sequence


@decision("extension.stopped")
class ExtensionStopped(Event, frozen=True, tag=38):
    """Code of an extension raised an error. From this event on, the extension makes no decisions and folds no events.

    The extension's projections return to their initial state, requests leave its sub-states, and it no longer affects
    which chunks are evicted. Readers stop the extension too, even if their version of the extension does not raise.
    """

    extension: str
    extension_version: Count
    where: str
    """The code that raised: a method of a handler, a projection, or `keeps`."""
    error: str
    """Class of the error, and the line of the extension that raised the error. If a decision was refused, also the
    reason. Messages of other errors are left out, because they may quote a request."""
    cause: Sequence


@observation("extension.noted")
class ExtensionNoted(Event, frozen=True, tag=41):
    """An extension's own observation about the engine or several requests. No decision depends on it.

    `payload`: the fields of the extension's event `name`, as msgpack.
    """

    extension: str
    name: str
    extension_version: Count
    payload: bytes
    time_ns: TimeNs


ExtensionEvent = ExtensionObserved | ExtensionDecided | ExtensionNoted


@observation("pages.digested")
class PagesDigested(Event, frozen=True, tag=42):
    """A worker has hashed whole blocks, before a save or after a load.

    `digests[i]` is a signed 64-bit hash of block `first_block + i` of the request's table, over the block's bytes in
    all layers of the group. `stored[i]` is the hash of the same page in host memory before the load. `stored` is empty
    for a save, or if the pages in host memory were not hashed.
    """

    request_id: str
    ordinal: Ordinal
    generation: Generation
    rank: Int64
    is_load: bool
    group: Group
    first_block: BlockNumber
    digests: tuple[Int64, ...]
    stored: tuple[Int64, ...]
    time_ns: TimeNs


@observation("end.refused")
class EndRefused(Event, frozen=True, tag=43):
    """Another connector reported an end too early. kvledger removed this end before vLLM acted on it.

    Under `MultiConnector` every child may report ends of any request, and vLLM cannot see which child reported. With
    this end, vLLM would use blocks that a copy is filling, free blocks that a copy is reading, or fail
    an assertion (`v1/core/sched/scheduler.py`, _update_from_kv_xfer_finished, 0.32).
    """

    request_id: str
    ordinal: Ordinal
    """Ordinal of the life for which kvledger itself has yet to report this end; `NO_LIFE` if there is none."""
    field: str
    """Field of vLLM's `KVConnectorOutput` that contained the end: `finished_recving` or `finished_sending`."""
    time_ns: TimeNs


@observation("prefix_cache.reset")
class PrefixCacheReset(Event, frozen=True, tag=44):
    """vLLM reset its own prefix cache, but not the connector (`reset_prefix_cache()`).

    kvledger goes on loading saved chunks, which is wrong if the weights have changed. After a change of weights call
    `reset_prefix_cache(reset_connector=True)`, which is recorded as `cache.reset`. If vLLM resets only its own prefix
    cache, it calls no hook. kvledger then records this event in the next hook, after the preemptions that came with the
    reset. A reset that vLLM refuses is not recorded.
    """

    time_ns: TimeNs


@observation("step.reported")
class StepReported(Event, frozen=True, tag=45):
    """Ranks sent the output of a step that has something to report.

    A step has something to report if it makes copies that are not asynchronous, if kvledger asked about a copy, or if
    there are ends or unfilled blocks. The log has this event after the reports of the same output. The ranks
    did not make a copy that they had to report if it is neither in their reports nor in `under_way`.
    """

    delivered: Sequence
    """Sequence number of the event `effects.delivered` that lists what the workers got with this step."""
    ranks: tuple[Int64, ...]
    under_way: tuple[JobId, ...]
    """Jobs whose copies have begun on these ranks and are not over. Work that the device gets later runs after these
    copies."""


class Difference(enum.StrEnum):
    """How a hook and the log differed. Each value is the first item of an entry of `HooksExchanged.differences`.

    The entry's second item is a number. It is the ordinal of the life, unless the description of the value here says
    what else it is.
    """

    ARRIVAL = "arrival"
    """The log lacks the arrival of a request. The number is -1."""
    ANSWER = "answer"
    """A lookup was not answered as decided."""
    SAFE_ANSWER = "safe answer"
    """A lookup was answered with 0 tokens instead of the decided answer."""
    ALLOCATION = "allocation"
    """The log lacks an allocation, or has another number of tokens for it."""
    FINISH = "finish"
    """`request_finished` was not answered as decided, or the log lacks the request's end."""
    OPEN = "open"
    """vLLM has finished the request without calling `request_finished`, so the log lacks the request's end."""
    END = "end"
    """An end that the workers got, that they reported, or that vLLM got differs from the log."""
    JOB = "job"
    """A copy was not handed to the workers as decided. The number is its job id."""
    REMINDER = "reminder"
    """The workers were not asked about a copy as decided. The number is the copy's job id."""
    REPORT = "report"
    """A report of a worker was not recorded as it arrived. The number is the job id of the reported copy."""
    BLOCK = "block"
    """The blocks that the workers had to report as not filled differ from the log. The number is a block id."""
    LOAD_ERROR = "load error"
    """The log lacks a block that vLLM named as not filled, or has a block that vLLM did not name. Or a rank reported a
    block to vLLM without a failed load, or did not report a block after a failed load. The number is the block id."""
    RESET = "reset"
    """The answer to a reset differs from the log. The number is -1."""
    PENDING_WORK = "pending work"
    """vLLM got the answer that no step is needed, although a copy is in flight. The number is the copy's job id."""
    PENDING_FREES = "pending frees"
    """vLLM was asked to wait for kept blocks, but keeps none. The number is -1."""
    EDGE_FAILED = "edge failed"
    """The comparison itself failed, and stops. The number is 0."""


@observation("hooks.exchanged")
class HooksExchanged(Event, frozen=True, tag=46):
    """Counts of the values that kvledger's hooks received and returned since the previous event of this kind.

    Code that decides nothing looks at these values when vLLM calls a hook and when the hook returns. It counts the
    values that equal the log, and puts the others into `differences`. The event is recorded before a step, at shutdown,
    and at once if something differs. It is not recorded if there is nothing to count, as in a step in which requests
    only decode.
    """

    num_arrivals: Count = 0
    """Requests that arrived (`on_new_request`)."""
    num_answers: Count = 0
    """Lookups answered as decided, including deferred ones (`get_num_new_matched_tokens`)."""
    num_deferred: Count = 0
    """Deferred lookups among `num_answers`. vLLM repeats them."""
    num_async: Count = 0
    """Answers among `num_answers` that offer an asynchronous load."""
    num_tokens: Count = 0
    """Tokens that the answers in `num_answers` offer in total."""
    num_allocations: Count = 0
    """Allocations (`update_state_after_alloc`)."""
    num_handed_out: Count = 0
    """Jobs, reminders, unfilled blocks and ends that the workers got with steps (`build_connector_meta`)."""
    num_reports: Count = 0
    """Reports of workers, one for each job and rank (`update_connector_output`)."""
    num_load_errors: Count = 0
    """Blocks that vLLM named as not filled."""
    num_received: Count = 0
    """Loads whose end kvledger reported to vLLM (in the output of `update_connector_output`)."""
    num_finished: Count = 0
    """Ends of requests (`request_finished`)."""
    num_held: Count = 0
    """Ended requests whose blocks vLLM keeps, because kvledger answered `request_finished` with True."""
    num_resets: Count = 0
    """Resets answered with True (`reset_cache`)."""
    differences: tuple[tuple[str, Int64, str], ...] = ()
    """(value of `Difference`, number, description) for each difference from the log. What the number means depends on
    the value: for example, it is a job id for `job` and a block id for `block`."""


_DECLARED = [
    each
    for each in vars().values()
    if isinstance(each, type) and issubclass(each, Event) and hasattr(each, "handler_method")
]
STANDARD_EVENTS: Mapping[str, type[Event]] = MappingProxyType(
    {event.id: event for event in sorted(_DECLARED, key=wire_code)}
)
"""Event id → class, in the order of the wire codes."""
