"""The vocabulary: everything that can stand in a log, and nothing else.

Two kinds of events. An *observation* is what the connector saw: a hook call of vLLM, a report of a
worker. A *decision* is what the connector made of it; `cause` is the sequence number of the
observation that led to it, so a log can answer why. Observations alone determine the decisions:
replay feeds them to today's code and compares. An observation names a request by its id and concerns its present
life; a decision names the life.

Rules for this file
  1. An event is a fact with plain values: ints, strings, bytes, booleans and tuples of them. It never
     refers to a live object of vLLM.
  2. No token ids, no prompts, no salts. Chunk keys are hashes that already contain the salt.
  3. The wire code (`tag`) and the order of the fields are the wire format (`codec.py`); the order of the
     classes means nothing. A released event is never edited: a new version gets a new class and an upcaster.
  4. `time_ns` is monotonic time since the log was opened. It enters here and nowhere else.
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
    """Two triggers of one event; which of them it is, one of its fields decides."""

    field: str
    if_set: str
    """The trigger where the field is true, or not 0."""
    if_not: str


class Event(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What every event has: a stable string id, a version, which of the two kinds it is, and its wire code (`tag`).

    A `msgspec.Struct`, so that reading a log makes events without a line of Python; `msgspec.structs` has `replace`,
    `asdict` and `fields` for them.
    """

    id: ClassVar[str]
    version: ClassVar[int]
    is_decision: ClassVar[bool]
    handler_method: ClassVar[str]
    """The method of a state handler that decides on this event: the class name in snake case."""
    variants: ClassVar[Variants | None] = None
    """What the tables tell apart."""


class RequestEvent(Event, frozen=True):
    """An event in the life of one request; the transition table speaks about these."""

    request_id: str


class RequestDecision(RequestEvent, frozen=True):
    """A decision about one life of a request, which it names in full: an id may be used again, an ordinal never is.

    The generation counts how often that life lost what it had computed. Settlements name that of their job.
    """

    ordinal: Ordinal
    generation: Generation


NOT_RECORDED = -1
"""A number that the log does not have: an older kvledger wrote it, or an embedder does not know it."""

NO_LIFE = -1
"""The ordinal and the generation in a decision that names no request, or one that nobody knows."""
NO_SLOT = -1
"""The slot of a page that is not stored, because its group does not see it any more."""
NULL_BLOCK = 0
"""vLLM's null block. In the table of a group with a window it replaces a block that is not kept."""

_EventClass = TypeVar("_EventClass", bound=type[Event])


def field_names(event_class: type[Event]) -> tuple[str, ...]:
    """The fields of an event in wire order."""
    return event_class.__struct_fields__


def wire_code(event_class: type[Event]) -> int:
    """The number that stands for the class in what is written today."""
    return cast("int", event_class.__struct_config__.tag)


def trigger_of(event: Event) -> str:
    """What an event is to the tables: its id, or `id/variant` where it has variants."""
    variants = event.variants
    if variants is None:
        return event.id
    return variants.if_set if getattr(event, variants.field) else variants.if_not


def triggers_of(event_class: type[Event]) -> tuple[str, ...]:
    """What events of a class may be to the tables."""
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
    """Declare an event that records what the connector saw. `variants`: a field, and what it is where that is set."""
    return _declare(event_id, version, variants, is_decision=False)


def decision(
    event_id: str, *, version: int = 1, variants: tuple[str, str, str] | None = None
) -> Callable[[_EventClass], _EventClass]:
    """Declare an event that records what the connector decided."""
    return _declare(event_id, version, variants, is_decision=True)


# --- Observations: a request's life ------------------------------------------------------------


@observation("request.arrived")
class RequestArrived(RequestEvent, frozen=True, tag=0):
    """vLLM accepted a request (`on_new_request`). `ordinal` names this life of the id inside the log.

    `trace_parent` is the caller's span in a distributed trace, where it told one: the 16 bytes of the trace's id and
    the 8 of the span's. Empty where it did not.

    `skips_prefix_cache` says that vLLM takes no cached tokens for it (`Request.skip_reading_prefix_cache`), as where
    log probabilities of the prompt are asked for. `is_salted` says that it has a `cache_salt`, so that it shares no
    key with requests that have another one or none.
    """

    ordinal: LifeOrdinal
    num_prompt_tokens: NumTokens
    time_ns: TimeNs
    trace_parent: bytes = b""
    skips_prefix_cache: bool = False
    is_salted: bool = False


@observation("chunk.keys_observed")
class ChunkKeysObserved(RequestEvent, frozen=True, tag=1):
    """The keys of the chunks from `first_chunk` on; they replace what was known from there.

    `hash_prefixes` is what the keys are checked with: for each chunk the first 4 bytes of vLLM's hash
    (`Request.block_hashes`) of the last block that ends within the chunk or before it, one after the other. Zeros:
    there is no such block. Empty: not recorded. `are_block_hashes` says whether each key has to be that hash itself,
    cut, or another one that covers more.
    """

    first_chunk: ChunkNumber
    keys: tuple[bytes, ...]
    hash_prefixes: bytes = b""
    are_block_hashes: bool = False


@observation("lookup.requested")
class LookupRequested(RequestEvent, frozen=True, tag=2):
    """The scheduler asks what can be loaded (`get_num_new_matched_tokens`).

    `num_computed_tokens` is the local prefix hit of *this* call, `num_tokens` prompt and output.
    """

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    time_ns: TimeNs


@observation("blocks.allocated")
class BlocksAllocated(RequestEvent, frozen=True, tag=3):
    """Blocks were given (`update_state_after_alloc`): the whole table, which replaces the old one."""

    block_ids: tuple[BlockId, ...]
    num_external_tokens: NumTokens
    time_ns: TimeNs


@observation("blocks.observed")
class BlockTableObserved(RequestEvent, frozen=True, tag=4):
    """The scheduler's own table, recorded because it differs from what the log had folded to."""

    block_ids: tuple[BlockId, ...]
    time_ns: TimeNs


@observation("request.preempted")
class RequestPreempted(RequestEvent, frozen=True, tag=5):
    """Its blocks were taken. `num_settled_tokens` is what had certainly been written by then.

    `num_tokens` is the engine's own count of its tokens then, prompt and output; `blocks_zeroed` says that its blocks
    are zeroed, or may be, before anything could be copied out of them.
    """

    num_settled_tokens: NumTokens
    num_tokens: NumTokens
    time_ns: TimeNs
    blocks_zeroed: bool = False
    num_in_flight_tokens: NumTokens = NOT_RECORDED
    """Of its computed tokens those of steps whose output the engine had not processed yet."""


@observation("session.continued", variants=("num_computed_tokens", "part", "all"))
class SessionContinued(RequestEvent, frozen=True, tag=6):
    """A streaming session's next turn: its blocks are kept, its tokens are cut and extended."""

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    num_prompt_tokens: NumTokens
    time_ns: TimeNs


@observation("tokens.rolled_back", variants=("num_computed_tokens", "part", "all"))
class TokensRolledBack(RequestEvent, frozen=True, tag=7):
    """The scheduler counts fewer computed tokens than before, as after a failed load."""

    num_computed_tokens: NumTokens
    time_ns: TimeNs


@observation("request.finished")
class RequestFinished(RequestEvent, frozen=True, tag=8):
    """No further scheduling (`request_finished`); `status` is vLLM's name for how it ended.

    `blocks_zeroed` as at a preemption.
    """

    status: str
    num_settled_tokens: NumTokens
    num_tokens: NumTokens
    time_ns: TimeNs
    blocks_zeroed: bool = False
    num_in_flight_tokens: NumTokens = NOT_RECORDED
    """Of its computed tokens those of steps whose output the engine had not processed yet."""
    num_computed_tokens: NumTokens = NOT_RECORDED
    """The engine's own count. It is below that of the steps if drafts were rejected or a load failed since."""


# --- Observations: the engine ------------------------------------------------------------------


class SettledTokens(NamedTuple):
    """What a step says of a request with chunks to be saved."""

    ordinal: Ordinal
    first_chunk: ChunkNumber
    """The first chunk that was not dealt with yet."""
    num_settled_tokens: NumTokens
    """Tokens of steps whose output was processed; without windows, at most those of the chunks whose keys are known."""
    num_in_flight_tokens: NumTokens = NOT_RECORDED
    """Of its computed tokens those of steps whose output was not processed yet."""


@observation("step.scheduled")
class StepScheduled(Event, frozen=True, tag=9):
    """One engine step (`build_connector_meta`), written as what differs from the expected.

    Expected is that every *steady* request, one that decoded one token last time, decodes one more. So a step in
    which everybody decodes is a few bytes, whatever their number.
    """

    step: Step
    num_scheduled_tokens: NumTokens
    """All tokens of the step."""
    advanced: tuple[tuple[Ordinal, NumTokens, NumTokens, NumTokens], ...]
    """(ordinal, num_computed_tokens before the step, num_scheduled_tokens, num_tokens known)."""
    paused: tuple[Ordinal, ...]
    """Ordinals of steady requests that were not scheduled in this step."""
    extended: tuple[tuple[Ordinal, tuple[BlockId, ...]], ...]
    """(ordinal, block ids appended to its table)."""
    settled: tuple[SettledTokens, ...]
    """(ordinal, first chunk not dealt with, num_settled_tokens, num_in_flight_tokens) of requests with chunks to be
    saved; see `SettledTokens`."""
    time_ns: TimeNs


class Withheld(enum.StrEnum):
    """Why the connector reports a job in the workers' place."""

    UNWRITTEN = "unwritten"
    """The event log could not be written, so a crash would have left no trace of the job."""
    CONTRACT = "contract"
    """It would have broken vLLM's contract."""
    HOOK_FAILED = "hook_failed"
    """The hook that was to hand it out failed."""
    OVERDUE = "overdue"
    """It was handed out and nobody reported it, where nothing is decided any more."""


@observation("transfer.reported")
class TransferReported(Event, frozen=True, tag=10):
    """Workers reported how a copy went. Ranks are named, so that one that reports twice is not counted as two."""

    job_ids: tuple[JobId, ...]
    """What was copied at once, and went one way: the saves of a step, or one job."""
    ranks_done: tuple[Int64, ...]
    ranks_failed: tuple[Int64, ...]
    is_repeated: bool
    """Whether the workers were asked to tell once more; then the job may be settled already."""
    num_bytes: tuple[NumBytes, ...]
    """For each of the jobs, over all ranks."""
    duration_ns: DurationNs
    error: str
    withheld: str
    """Why the connector reports in the workers' place, one of `Withheld`. Mostly empty."""
    time_ns: TimeNs
    moments: tuple[Int64, ...] = ()
    """When these ranks began and ended the copy, see `CopyMoments.as_fields`; empty if not recorded."""

    @classmethod
    def by(cls, ranks: Iterable[int], job_id: int, time_ns: int, *, error: str = "") -> TransferReported:
        """These ranks have done the job, or with an `error` could not, and nothing was measured."""
        done, failed = ((), tuple(ranks)) if error else (tuple(ranks), ())
        return cls((job_id,), done, failed, False, (0,), 0, error, "", time_ns)  # noqa: FBT003 -- in the wire's order


@observation("load.errors_observed")
class LoadErrorsObserved(Event, frozen=True, tag=11):
    """Blocks that a worker could not fill. Whoever holds one of them may have read garbage."""

    block_ids: tuple[Int64, ...]
    time_ns: TimeNs


@observation("cache.reset")
class CacheReset(Event, frozen=True, tag=12):
    """Everything cached so far is stale (`reset_cache`), as after new weights."""

    time_ns: TimeNs


@observation("hook.failed")
class HookFailed(Event, frozen=True, tag=13):
    """A hook of ours raised. The engine was given a harmless answer instead.

    An empty `request_id` concerns the step, and with it every request that holds blocks.
    """

    hook: str
    request_id: str
    error: str
    time_ns: TimeNs


CORRUPT = "LedgerCorrupt"
"""Begins the error of a `HookFailed` after which nothing is decided any more, because a fold failed."""


# --- Decisions: lookups and loads --------------------------------------------------------------


class MissReason(enum.StrEnum):
    """Why a hit ends where it ends."""

    COMPLETE = "complete"
    """Every whole chunk of the request's tokens is there."""
    MISSING = "missing"
    """The next chunk is not in the host pool. The log tells whether it was ever saved, and how it left."""
    SAVING = "saving"
    """A save of the first missing chunk is in flight."""
    WINDOW = "window"
    """A sliding window sees, before every later boundary, something that was not saved."""
    SLOWER = "slower"
    """As measured while serving, a load takes longer than computing what it brings."""
    LOAD_FAILED = "load_failed"
    """Its last load failed; it computes before it is offered another one."""
    QUARANTINED = "quarantined"
    RECORDED = "recorded"
    """Another connector answered, and its answer was only recorded; why is not in the log."""


@decision("lookup.answered")
class LookupAnswered(RequestDecision, frozen=True, tag=14):
    """What the scheduler was answered, and everything the answer was made from."""

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    num_hit_tokens: Int64
    num_external_tokens: Int64
    is_async: bool
    """Whether the request is to wait for the load outside of the steps, instead of the step for the load."""
    miss_reason: str
    """Why the hit ends where it ends; one of `MissReason`."""
    cause: Sequence


@decision("lookup.deferred")
class LookupDeferred(RequestDecision, frozen=True, tag=15):
    """The scheduler was asked to ask again, because of the job `job_id`.

    The job saves what the request lost, or loads the same chunks for another request, or is any other request's load
    where there is one load at a time.
    """

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    job_id: JobId
    num_deferred: Count
    """How often in a row, this time included; further deferrals for the same load do not count.

    Bounded by `LedgerConfiguration.max_deferred_lookups`.
    """
    cause: Sequence


@decision("load.issued")
class LoadIssued(RequestDecision, frozen=True, tag=16):
    """Host slots are copied into the request's blocks, page by page.

    Before the step's forward, or asynchronously with `is_async`; the request is in no step until it is settled.
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
    """Every rank has the loaded pages in place."""

    job_id: JobId
    cause: Sequence


@decision("load.failed")
class LoadFailed(RequestDecision, frozen=True, tag=18):
    """A rank could not load. The chunks are tainted; the scheduler recomputes or fails the request."""

    job_id: JobId
    error: str
    cause: Sequence


# --- Decisions: saves and the host pool --------------------------------------------------------


@decision("save.issued")
class SaveIssued(RequestDecision, frozen=True, tag=19):
    """Block pages are copied to host slots. One page per entry of `block_ids` and `slots`.

    With `before_forward` the blocks are already free: the copy must precede the step's forward. With `is_async` it runs
    asynchronously to this step and later ones; the blocks are the request's until it is done, or it is awaited.
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
    """The part-filled last chunk of a preempted request is copied out before the step's forward.

    `num_tokens` tokens from `first_token` on, which is where its whole chunks end; only this life of the request may
    load them. `generation` is that of the blocks.
    """

    job_id: JobId
    first_token: NumTokens
    num_tokens: NumTokens
    slots: tuple[Slot, ...]
    block_ids: tuple[BlockId, ...]
    cause: Sequence


@decision("save.completed")
class SaveCompleted(RequestDecision, frozen=True, tag=21):
    """Every rank has saved; the chunks of the job can be looked up from now on."""

    job_id: JobId
    cause: Sequence


@decision("save.failed", variants=("quiet", "quiet", "silent"))
class SaveFailed(RequestDecision, frozen=True, tag=22):
    """A rank could not save. The slots of the job are free again if every rank is known to be `quiet`.

    A job that was given up without a report may still write: its slots are used again when every rank has reported.
    """

    job_id: JobId
    error: str
    quiet: bool
    cause: Sequence


POOL_FULL = "pool_full"
UNFILLED = "unfilled"


@decision("save.declined")
class SaveDeclined(RequestDecision, frozen=True, tag=23):
    """Settled chunks were not saved, and why: a full pool, or a load failed into blocks that the request relies on."""

    first_chunk: ChunkNumber
    num_chunks: ChunkNumber
    reason: str
    cause: Sequence


@decision("transfer.awaited", variants=("before_forward", "fence", "ask"))
class TransferAwaited(RequestDecision, frozen=True, tag=24):
    """Workers are reminded of a job in flight.

    The next step waits for it, because its blocks were taken (`before_forward`), or because a rank has not reported
    about it for too long; then whoever has done it tells so once more.
    """

    job_id: JobId
    before_forward: bool
    cause: Sequence


@decision("blocks.held")
class BlocksHeld(RequestDecision, frozen=True, tag=25):
    """`request_finished` answered True: vLLM keeps the blocks until `RequestReleased`, for the copies out of them."""

    cause: Sequence


@decision("chunks.evicted")
class ChunksEvicted(Event, frozen=True, tag=26):
    """Committed chunks gave up their slots for a request's save."""

    keys: tuple[bytes, ...]
    """In the order in which they leave."""
    request_id: str
    """Whose save needed the slots."""
    ordinal: Ordinal
    generation: Generation
    cause: Sequence


@decision("chunks.tainted")
class ChunksTainted(Event, frozen=True, tag=27):
    """Chunks that could not be loaded are not offered again until they are saved anew."""

    keys: tuple[bytes, ...]
    cause: Sequence


# --- Decisions: the state of a request ---------------------------------------------------------


@decision("prefill.advanced")
class PrefillAdvanced(RequestDecision, frozen=True, tag=28):
    """Some known tokens are computed or in flight, more are to come."""

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    cause: Sequence


@decision("prefill.completed")
class PrefillCompleted(RequestDecision, frozen=True, tag=29):
    """Every known token is computed or in flight."""

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    cause: Sequence


@decision("request.released")
class RequestReleased(RequestDecision, frozen=True, tag=30):
    """Nothing is owed to or by the request any more; every projection forgets it, and held blocks are freed."""

    cause: Sequence


@decision("request.quarantined")
class RequestQuarantined(RequestDecision, frozen=True, tag=31):
    """The request gets no more help from the cache: no hits, no saves. It recomputes."""

    reason: str
    cause: Sequence


@decision("invariant.violated")
class InvariantViolated(Event, frozen=True, tag=32):
    """A rule of `docs/invariants.md` was broken; `rule` is its name there."""

    rule: str
    request_id: str
    """Empty where it concerns no single request; then ordinal and generation are `NO_LIFE`."""
    ordinal: Ordinal
    generation: Generation
    detail: str
    cause: Sequence


@observation("log.note")
class LogNote(Event, frozen=True, tag=33):
    """A word of the connector to the reader of the log, such as a start, a shutdown or lost events."""

    text: str
    time_ns: TimeNs


SHUT_DOWN = "connector shut down"
"""The last note of a connector that was shut down."""
DECLINED = "declined: "
"""Begins the note of a connector that serves nobody; the reason follows."""
LOG_BEFORE = "the log before, "
"""Begins the note of a start which did not find the log before closed and whole."""


@observation("window.left")
class WindowLeft(RequestEvent, frozen=True, tag=34):
    """Recorded before a step or the request's end: what its windows see no more is freed now, intact until the forward.

    Freed before that was only what they did not see when `num_settled_tokens` were settled. Only for models with
    sliding windows, and only where the request was in the step before.
    """

    num_settled_tokens: NumTokens
    time_ns: TimeNs
    num_in_flight_tokens: NumTokens = NOT_RECORDED
    """Those of steps in flight that the count leaves out."""


@observation("decision.withheld")
class DecisionWithheld(Event, frozen=True, tag=35):
    """What was decided for a request did not leave: vLLM was given the safe answer, or a job was not handed out.

    `rule` is the one it would have broken; empty where nothing was wrong with it and the log could not be written.
    """

    request_id: str
    rule: str
    detail: str
    time_ns: TimeNs


@observation("effects.delivered")
class EffectsDelivered(Event, frozen=True, tag=39):
    """What was owed outside was handed over, and is owed no more. Only where something was.

    To the workers with a step: jobs, reminders, blocks, and the ends that they tell vLLM. To vLLM: the other ends.
    """

    job_ids: tuple[JobId, ...]
    """Copies that the workers were given; those of a step go with it or never."""
    awaited: tuple[JobId, ...]
    """Jobs that they were reminded of."""
    block_ids: tuple[BlockId, ...]
    """Blocks that they report as not filled."""
    failed: tuple[Ordinal, ...]
    """Ordinals of lives whose asynchronous load failed, which every worker reports to vLLM."""
    sent: tuple[Ordinal, ...]
    """Ordinals of ended lives whose blocks no copy reads any more, which every worker reports to vLLM."""
    received: tuple[Ordinal, ...]
    """Ordinals of lives whose asynchronous load is in place, as was reported to vLLM."""
    reported: tuple[Ordinal, ...]
    """Ordinals of those whose end vLLM has by now from the workers."""


@observation("load.refused")
class LoadRefused(Event, frozen=True, tag=40):
    """VLLM claimed an answer, and its load will not be issued: a hook of ours failed, or nothing was decided.

    An asynchronous one is reported as failed; of one within the step these blocks are reported as not filled.
    """

    request_id: str
    block_ids: tuple[BlockId, ...]
    time_ns: TimeNs


# --- Of extensions -------------------------------------------------------------------------------


@observation("extension.observed")
class ExtensionObserved(RequestEvent, frozen=True, tag=36):
    """Something that only an extension understands was seen. `payload` is msgpack of what its event `name` says."""

    extension: str
    name: str
    extension_version: Count
    payload: bytes
    time_ns: TimeNs


@decision("extension.decided")
class ExtensionDecided(RequestDecision, frozen=True, tag=37):
    """A handler of an extension decided something of its own. `payload` is msgpack of what its event `name` says."""

    extension: str
    name: str
    extension_version: Count
    payload: bytes
    cause: Sequence


@decision("extension.stopped")
class ExtensionStopped(Event, frozen=True, tag=38):
    """Code of an extension raised. From here on it takes no part: it decides, folds and keeps nothing.

    Its projections have their state before the first event, its sub-states lead to their phases. Whoever reads
    this does likewise, also where the extension's code would not raise any more.
    """

    extension: str
    extension_version: Count
    where: str
    """What raised: a method of a handler, a projection, or `keeps`."""
    error: str
    """Its class and the line it comes from; never its message, which may quote anything."""
    cause: Sequence


@observation("extension.noted")
class ExtensionNoted(Event, frozen=True, tag=41):
    """Something that only an extension understands was seen, and concerns the engine or several requests.

    Nothing is decided upon it. `payload` is msgpack of what its event `name` says.
    """

    extension: str
    name: str
    extension_version: Count
    payload: bytes
    time_ns: TimeNs


ExtensionEvent = ExtensionObserved | ExtensionDecided | ExtensionNoted


@observation("pages.digested")
class PagesDigested(Event, frozen=True, tag=42):
    """A worker has made digests of whole blocks: of what a save was about to read, or of what a load has brought.

    `digests[i]` is of block `first_block + i` of the request's table, over its bytes in all layers of a group: 64 bits,
    signed. `stored[i]` is what the host held of it before the load; empty of a save, and where nobody looked.
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
    """Another connector reported an end too early, and kvledger removed it from what vLLM is given.

    Under `MultiConnector` every child may report ends of any request, and vLLM cannot tell whose they are. It would use
    or free blocks that a copy still fills or reads, or an assertion would fail (`v1/core/sched/scheduler.py`,
    _update_from_kv_xfer_finished, 0.32).
    """

    request_id: str
    ordinal: Ordinal
    """Of the life; `NO_LIFE` if kvledger owes no end of it."""
    field: str
    """Of vLLM's `KVConnectorOutput`: `finished_recving` or `finished_sending`."""
    time_ns: TimeNs


@observation("prefix_cache.reset")
class PrefixCacheReset(Event, frozen=True, tag=44):
    """VLLM reset its own prefix cache and did not reset the connector (`reset_prefix_cache()`).

    What was saved before stays and can still be loaded, so it is wrong if the weights have changed. After a change of
    weights call `reset_prefix_cache(reset_connector=True)`, which is recorded as `cache.reset`. vLLM calls no hook, so
    this is recorded in the next one, after the preemptions that came with the reset. A reset that vLLM refuses changes
    nothing and is not recorded.
    """

    time_ns: TimeNs


@observation("step.reported")
class StepReported(Event, frozen=True, tag=45):
    """Ranks sent the output of a step that has something to report.

    That is copies that it waits for, copies asked after, ends, or blocks that no copy fills. It follows their reports
    of that output, so a copy that is missing among them was not made.
    """

    delivered: Sequence
    """Sequence number of the step's `EffectsDelivered`."""
    ranks: tuple[Int64, ...]
    under_way: tuple[JobId, ...]
    """Copies that have begun, that everything given to the device later comes after, and that are not over yet."""


class Difference(enum.StrEnum):
    """What differed between a hook and the log, in `HooksExchanged`."""

    ARRIVAL = "arrival"
    """A request arrived that the log does not have. The number is -1."""
    ANSWER = "answer"
    """A lookup was not answered as decided. The number is the life's ordinal, as in the following ones."""
    SAFE_ANSWER = "safe answer"
    """A lookup was answered with 0 tokens although more were decided."""
    ALLOCATION = "allocation"
    """Blocks were allocated, and the log does not have it, or has another number of tokens."""
    FINISH = "finish"
    """The answer at a request's end is not the one decided, or the log does not have the end."""
    OPEN = "open"
    """vLLM has finished the request, and the log has no end of it."""
    END = "end"
    """An end was reported to vLLM, or by the workers, and the log has it otherwise."""
    JOB = "job"
    """A copy was not handed to the workers as decided. The number is the job's id, as in the following two."""
    REMINDER = "reminder"
    """The workers were not asked about a copy as decided."""
    REPORT = "report"
    """A report of a worker was not recorded as it arrived."""
    BLOCK = "block"
    """A block was not reported as not filled as decided. The number is the block, as in the following one."""
    LOAD_ERROR = "load error"
    """A block that vLLM named as not filled was not recorded, or another one was; or a rank reported it to vLLM without
    a failed load, or did not report it in spite of one."""
    RESET = "reset"
    """The answer to a reset is not what the log has."""
    PENDING_WORK = "pending work"
    """vLLM was told that no step is needed although a copy is in flight. The number is its job id."""
    PENDING_FREES = "pending frees"
    """vLLM was told to wait for blocks that no copy holds. The number is -1."""
    EDGE_FAILED = "edge failed"
    """The comparison itself failed. Nothing is compared from here on."""


@observation("hooks.exchanged")
class HooksExchanged(Event, frozen=True, tag=46):
    """What left the hooks and what arrived in them since the last such event.

    Counted where the hook returns to vLLM, or vLLM calls it, by code that does not decide. What equals the decision
    in the log is counted. What does not is in `differences`. Recorded before a step and at shutdown, if there is
    anything to count: a step in which every request only decodes has no such event.
    """

    num_arrivals: Count = 0
    """Requests that arrived (`on_new_request`)."""
    num_answers: Count = 0
    """Lookups that were answered as decided, deferred ones included (`get_num_new_matched_tokens`)."""
    num_deferred: Count = 0
    """Of these, those that vLLM repeats."""
    num_async: Count = 0
    """Of these, those with an asynchronous load."""
    num_tokens: Count = 0
    """Tokens that these answers offer, in total."""
    num_allocations: Count = 0
    """Allocations (`update_state_after_alloc`)."""
    num_handed_out: Count = 0
    """Jobs, reminders, blocks and ends in the metadata of steps (`build_connector_meta`)."""
    num_reports: Count = 0
    """Reports of workers, one for each job and rank (`update_connector_output`)."""
    num_load_errors: Count = 0
    """Blocks that vLLM named as not filled."""
    num_received: Count = 0
    """Ends of loads that were added to what vLLM acts on."""
    num_finished: Count = 0
    """Ends of requests (`request_finished`)."""
    num_held: Count = 0
    """Of these, those that were answered with True."""
    num_resets: Count = 0
    """Resets that were answered with True (`reset_cache`)."""
    differences: tuple[tuple[str, Int64, str], ...] = ()
    """(one of `Difference`, ordinal, job id or block, what happened instead)."""


_DECLARED = [
    each
    for each in vars().values()
    if isinstance(each, type) and issubclass(each, Event) and hasattr(each, "handler_method")
]
STANDARD_EVENTS: Mapping[str, type[Event]] = MappingProxyType(
    {event.id: event for event in sorted(_DECLARED, key=wire_code)}
)
"""Id -> every event that is declared above, in the order of the wire codes."""
