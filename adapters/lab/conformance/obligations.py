"""The obligations of a `KVConnectorBase_V1`, and the rules and checks that test them.

docs/contract.md and the report of `kvledger conformance` are made from this module. It must not depend on code that
runs a connector. Paths are relative to the installed `vllm/`, 0.32: `base.py` is
`distributed/kv_transfer/kv_connector/v1/base.py`, `scheduler.py` is `v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs


class Seen(enum.Enum):
    """How you can see whether a connector keeps an obligation."""

    OUTSIDE = "from outside"
    """The calls and answers of the hooks show the breach, for any connector."""
    DECODER = "with a decoder"
    """The metadata for the workers shows the breach, if kvledger has a decoder for this metadata."""
    CONTENT = "in the simulation"
    """Only `kvledger conformance` shows the breach. Its simulation knows the right KV, sees the engine's blocks and can
    repeat a call."""
    NOT_AT_ALL = "not at all"
    """Neither a log nor the simulation shows the breach."""


class Check(enum.StrEnum):
    """A check of the simulation, in addition to the rules of the log."""

    KV_RIGHT = "KV_RIGHT"
    """Every request reads the KV of its own tokens, and gets the output tokens that follow from its own tokens."""
    ENGINE_LIVES = "ENGINE_LIVES"
    """The connector causes no error in vLLM's scheduler. Assertions in the scheduler check much of the contract."""
    ENDS = "ENDS"
    """Every request ends."""
    COMES_TO_REST = "COMES_TO_REST"
    """When no request is left, the engine stops stepping after a while."""
    BLOCKS_RETURNED = "BLOCKS_RETURNED"
    """After the last request and some empty steps, every block except the null block is free."""
    RESTS = "RESTS"
    """When the engine stops stepping, every block except the null block is free. If a copy still held a block, only
    another step could report that the copy is done."""
    SHUTS_DOWN = "SHUTS_DOWN"
    """The connector's scheduler side and worker side shut down without an error."""
    LOOKUP_REPEATED = "LOOKUP_REPEATED"
    """Two lookups in a row get the same answer, unless the first answer is None."""
    OUTPUT_UNCHANGED = "OUTPUT_UNCHANGED"
    """`build_connector_meta` changes no field of the scheduler's output except `new_block_ids_to_zero`."""
    HIT_SOURCES = "HIT_SOURCES"
    """The token counts of a hit's sources add up to the number of tokens in the hit."""
    RESET_HONOURED = "RESET_HONOURED"
    """After a reset that the connector reports as done, nothing that was stored before the reset is loaded."""


class Precondition(enum.StrEnum):
    """What must happen in a run, so that an obligation can be judged. If it did not happen, the value is the reason."""

    ALWAYS = ""
    LOOKUP = "no request was looked up"
    ANSWER = "the connector answered no lookup with tokens"
    LOAD = "nothing was loaded"
    COPY = "the log has no copy, because the connector made none or kvledger has no decoder for its metadata"
    SAVE = "the log has no save, because the connector made none or kvledger has no decoder for its metadata"
    KEPT = "the connector kept no blocks of an ended request"
    ASYNC_LOAD = "the connector loaded nothing asynchronously"
    FAILED_LOAD = "no load failed; give --lose to make loads fail"
    RESET = "the connector reported no reset as done"
    WORKER = "the connector's worker does not run here"


@attrs.frozen
class Obligation:
    """One demand of vLLM's contract on a connector."""

    name: str
    side: str
    """Scheduler, worker or both."""
    hook: str
    text: str
    source: tuple[str, ...]
    """Files and functions of vLLM 0.32 that state the obligation or rely on it."""
    seen: Seen
    checks: tuple[str, ...] = ()
    """Rules of the log, and members of `Check`, that test the obligation."""
    needs: Precondition = Precondition.ALWAYS
    scenarios: tuple[str, ...] = ()
    """The scenarios whose runs are judged; empty: every run is judged."""
    incidents: tuple[str, ...] = ()
    """Public issues about connectors that broke the obligation, in the form "vllm#49285"."""
    limit: str = ""
    """Breaches that the checks do not detect."""
    may_share_its_cause: bool = False
    """Whether wrong KV can also have another cause than a breach. If so, `KV_RIGHT` alone proves no breach."""


_SCHEDULER, _WORKER, _BOTH = "scheduler", "worker", "both"

_ALL: Final = (
    Obligation(
        "hooks-do-not-raise",
        _BOTH,
        "every hook",
        "No hook raises an error, and no hook makes vLLM itself fail. Either failure ends the engine and every request "
        "in it.",
        ("v1/engine/core.py, run_busy_loop",),
        Seen.OUTSIDE,
        ("RECORDED", Check.ENGINE_LIVES),
        incidents=("LMCache#2158", "vllm#49285", "vllm#52211", "vllm#43884", "vllm#55209", "vllm#39732"),
    ),
    Obligation(
        "answer-in-range",
        _SCHEDULER,
        "get_num_new_matched_tokens",
        "The first element of the answer to a lookup is the number of tokens that can be loaded, beginning with the "
        "first token that is not computed. The number is not negative. The sum of this number and the computed tokens "
        "is at most the number of known tokens. If the load is synchronous, the last known token is not loaded. The "
        "answer's second element \"must be 'False' if the first element is 0\".",
        ("base.py, get_num_new_matched_tokens", "scheduler.py, schedule"),
        Seen.OUTSIDE,
        ("LAST_TOKEN", "TOKEN_CONSERVATION"),
        Precondition.ANSWER,
        incidents=("LMCache#2158", "LMCache#3322", "vllm#50864", "vllm#55113"),
    ),
    Obligation(
        "loaded-kv-is-right",
        _BOTH,
        "get_num_new_matched_tokens, start_load_kv",
        'The answer to a lookup counts only tokens "for which KV cache is actually available at the time of the call". '
        "These tokens are still available when the load begins, and the load fills the request's blocks with the KV of "
        "exactly these tokens.",
        ("base.py, get_num_new_matched_tokens", "base.py, start_load_kv"),
        Seen.CONTENT,
        (Check.KV_RIGHT,),
        Precondition.LOAD,
        incidents=("vllm#39702", "vllm#53498", "LMCache#5151"),
    ),
    Obligation(
        "lookup-is-pure",
        _SCHEDULER,
        "get_num_new_matched_tokens",
        'The lookup hook "might be called multiple times for a given request and should be side-effect free". vLLM '
        "repeats a lookup in every step in which too few blocks are free for the request. vLLM calls no hook to cancel "
        "the earlier lookup.",
        ("base.py, module docstring", "scheduler.py, schedule"),
        Seen.CONTENT,
        (Check.LOOKUP_REPEATED, "ALLOC_MATCHES_LOOKUP"),
        Precondition.ANSWER,
        incidents=("LMCache#4508", "LMCache#2158", "LMCache#4512", "vllm#44100"),
        limit="if the second lookup protects a chunk from eviction forever, this is not detected",
    ),
    Obligation(
        "deferral-ends",
        _SCHEDULER,
        "get_num_new_matched_tokens",
        "If the answer to a lookup is None, vLLM repeats the lookup in the next step. At some point, the connector "
        "must give another answer.",
        ("base.py, get_num_new_matched_tokens", "scheduler.py, schedule"),
        Seen.OUTSIDE,
        (Check.ENDS,),
        Precondition.LOOKUP,
        incidents=("vllm#49829", "vllm#48090"),
        limit="too many deferrals in a log are not detected, because no rule limits their number; `kvledger why` shows "
        "deferrals",
    ),
    Obligation(
        "allocation-decides",
        _SCHEDULER,
        "update_state_after_alloc",
        'The connector decides whether to load "based on num_external_tokens, not on whether blocks is empty". If '
        "`num_external_tokens` is 0, the connector loads nothing, whatever it answered to the lookup.",
        ("base.py, update_state_after_alloc", "scheduler.py, schedule"),
        Seen.OUTSIDE,
        ("COMPLETION_ONCE", "EXTERNAL_ZERO_NO_LOAD"),
        Precondition.ASYNC_LOAD,
        incidents=("LMCache#4355", "LMCache#4762", "vllm#55209", "vllm#51805"),
        limit="a synchronous load that vLLM did not ask for is not detected if kvledger cannot decode the metadata",
    ),
    Obligation(
        "allocation-comes-twice",
        _SCHEDULER,
        "update_state_after_alloc",
        'For an asynchronous load, `update_state_after_alloc` "may be called twice for that same request": first with '
        "the blocks to load into, and again after the load has ended. At the second call, the connector must not begin "
        "another load.",
        ("base.py, update_state_after_alloc", "scheduler.py, _update_waiting_for_remote_kv"),
        Seen.OUTSIDE,
        ("COMPLETION_ONCE",),
        Precondition.ASYNC_LOAD,
        incidents=("vllm#18232",),
    ),
    Obligation(
        "metadata-leaves-the-output",
        _SCHEDULER,
        "build_connector_meta",
        '`build_connector_meta` "should NOT modify fields in the scheduler_output", with one exception: a connector '
        "with synchronous loads may remove blocks from `new_block_ids_to_zero`.",
        ("base.py, build_connector_meta", "scheduler.py, _build_kv_connector_meta"),
        Seen.CONTENT,
        (Check.OUTPUT_UNCHANGED,),
    ),
    Obligation(
        "metadata-in-empty-steps",
        _SCHEDULER,
        "build_connector_meta",
        "vLLM calls `build_connector_meta` once in each step, even if the step schedules nothing. The connector "
        "must accept the call in such an empty step, and can give work to the workers in it.",
        ("scheduler.py, schedule",),
        Seen.OUTSIDE,
        ("RECORDED", Check.ENGINE_LIVES, Check.ENDS),
        scenarios=("empty steps",),
        incidents=("vllm#42611",),
    ),
    Obligation(
        "table-is-the-requests",
        _SCHEDULER,
        "build_connector_meta",
        "A copy uses the blocks that the request's block table has for the copied tokens. vLLM replaces the table, "
        "instead of extending it, when vLLM resumes the request after a preemption, admits the request after an "
        "asynchronous load, or begins the next turn of its session.",
        ("scheduler.py, schedule", "scheduler.py, _make_cached_request_data"),
        Seen.DECODER,
        ("TABLE_EQ",),
        Precondition.COPY,
        incidents=("vllm#46595", "vllm#57816", "vllm#54853", "LMCache#2336"),
    ),
    Obligation(
        "saves-own-their-source",
        _SCHEDULER,
        "build_connector_meta",
        "A save reads only blocks that its request holds, or that the request lost in the step of the save.",
        ("scheduler.py, _preempt_request",),
        Seen.DECODER,
        ("SRC_BLOCK_OWNED",),
        Precondition.SAVE,
        incidents=("vllm#52360", "vllm#46951"),
    ),
    Obligation(
        "saves-are-computed",
        _SCHEDULER,
        "build_connector_meta",
        "A saved token is computed before the step of the save, or in this step. A save never includes the last "
        "sampled token, or tokens that were not computed because the request finished or was aborted. If a step "
        "filled only a part of a block, a save never includes the empty rest.",
        ("scheduler.py, _update_after_schedule",),
        Seen.DECODER,
        ("CHUNK_COMPLETE",),
        Precondition.SAVE,
        incidents=("vllm#54193", "vllm#49285", "vllm#49118", "vllm#16928"),
    ),
    Obligation(
        "loads-own-their-destination",
        _BOTH,
        "update_state_after_alloc, build_connector_meta",
        "A load fills only blocks that vLLM allocated for this load, and fills each of them once. Until the load ends, "
        "nothing else fills these blocks, and no save reads them.",
        ("base.py, update_state_after_alloc", "scheduler.py, schedule"),
        Seen.DECODER,
        ("LOAD_DST_EXCLUSIVE", "LOAD_XOR_STORES"),
        Precondition.COPY,
        incidents=("vllm#46014", "vllm#32255", "vllm#56104", "vllm#50696"),
    ),
    Obligation(
        "loads-bring-what-was-claimed",
        _BOTH,
        "build_connector_meta, get_block_ids_with_load_errors",
        "The connector fills each block that vLLM allocated for the offered tokens. If the connector cannot fill a "
        "block, it reports this block or an earlier block of the request as failed. vLLM does not compute the tokens "
        "before the first block that is reported as failed.",
        ("base.py, get_block_ids_with_load_errors", "scheduler.py, _update_requests_with_invalid_blocks"),
        Seen.DECODER,
        ("LOAD_COMPLETE",),
        Precondition.COPY,
    ),
    Obligation(
        "keys-tell-requests-apart",
        _SCHEDULER,
        "get_num_new_matched_tokens, build_connector_meta",
        "A request gets only KV that was saved under its own keys. A key covers the tokens and everything else that "
        "vLLM's block hashes cover: the LoRA adapter, the media and the cache salt.",
        ("v1/core/kv_cache_utils.py, generate_block_hash_extra_keys",),
        Seen.DECODER,
        ("SAVED_UNDER_KEY",),
        Precondition.COPY,
        incidents=("vllm#53495", "vllm#44250", "LMCache#2961"),
        limit="wrong keys in a store that outlives the engine are not detected if the log has no digests of pages",
    ),
    Obligation(
        "saved-tokens-are-offered",
        _SCHEDULER,
        "get_num_new_matched_tokens, build_connector_meta",
        "The saved tokens of a request have no hole, because a lookup finds nothing after a hole. The connector offers "
        "a preempted request its saved tokens. A breach costs only time: vLLM computes the tokens again.",
        ("scheduler.py, schedule",),
        Seen.DECODER,
        ("STORE_CONTIGUOUS", "RESUME_COVERS_OUTPUT"),
        Precondition.SAVE,
        incidents=("LMCache#4508", "LMCache#1969", "LMCache#4612", "vllm#46971", "vllm#53498"),
    ),
    Obligation(
        "preemption-loses-the-blocks",
        _BOTH,
        "build_connector_meta, handle_preemptions",
        "A preempted request has lost its blocks before any hook reports the preemption. In the step of the "
        "preemption, `preempted_req_ids` names the request, and other requests may get the blocks. In "
        '`handle_preemptions`, workers finish the copies that read these blocks, "before they are overwritten".',
        ("base.py, handle_preemptions", "scheduler.py, _preempt_request"),
        Seen.CONTENT,
        (Check.KV_RIGHT, "RECORDED"),
        Precondition.LOAD,
        scenarios=("preempted and resumed", "preempted and resumed, asynchronously"),
        incidents=("vllm#29870", "vllm#52360", "vllm#51637", "LMCache#4955"),
    ),
    Obligation(
        "abort-from-everywhere",
        _SCHEDULER,
        "request_finished",
        "A request may finish or be aborted before it was scheduled, or while it waits, loads or is preempted. It may "
        "then have no blocks. The connector must accept the call in all of these cases.",
        ("scheduler.py, finish_requests",),
        Seen.OUTSIDE,
        ("RECORDED", Check.ENGINE_LIVES, Check.ENDS),
        scenarios=("aborted before its first step", "aborted while it runs", "aborted during a load"),
        incidents=("vllm#49285", "vllm#44100", "vllm#25067", "LMCache#4512"),
    ),
    Obligation(
        "load-is-reported-once",
        _BOTH,
        "get_transfer_results, update_connector_output",
        "Each asynchronous load ends with one `finished_recving` from every rank, even if the request was aborted "
        "during the load. An assertion in vLLM fails if a report names a request that vLLM does not know.",
        ("base.py, get_finished", "scheduler.py, _update_from_kv_xfer_finished"),
        Seen.OUTSIDE,
        ("COMPLETION_ONCE",),
        Precondition.ASYNC_LOAD,
        incidents=("LMCache#4355", "vllm#43226", "vllm#55286", "vllm#54518"),
    ),
    Obligation(
        "load-comes-to-its-end",
        _BOTH,
        "get_transfer_results",
        "The connector reports each asynchronous load sooner or later, as done or as failed. Until then, the request "
        "waits and vLLM keeps its blocks.",
        ("base.py, get_block_ids_with_load_errors", "scheduler.py, _update_waiting_for_remote_kv"),
        Seen.OUTSIDE,
        ("LIVENESS", Check.ENDS),
        Precondition.ASYNC_LOAD,
        incidents=("vllm#46283", "vllm#56640", "LMCache#5047", "vllm#52838"),
    ),
    Obligation(
        "kept-blocks-are-let-go",
        _BOTH,
        "request_finished, get_transfer_results",
        'If `request_finished` returns True, the connector "assumes responsibility": vLLM keeps the request\'s blocks '
        "until `finished_sending` names the request. `finished_sending` names each such request once, and no other "
        "request.",
        ("base.py, request_finished", "scheduler.py, _free_request"),
        Seen.OUTSIDE,
        ("COMPLETION_ONCE", "LIVENESS"),
        Precondition.KEPT,
        incidents=("vllm#46240", "vllm#43226", "vllm#48616", "vllm#58188", "vllm#50754", "vllm#52954"),
    ),
    Obligation(
        "blocks-come-back",
        _SCHEDULER,
        "bind_gpu_block_pool",
        "The connector releases all references that it takes on blocks, so that in an idle engine all blocks are free.",
        ("base.py, bind_gpu_block_pool", "v1/core/block_pool.py, free_blocks"),
        Seen.CONTENT,
        (Check.BLOCKS_RETURNED,),
        incidents=("vllm#46283", "vllm#43433", "vllm#49796"),
    ),
    Obligation(
        "steps-while-pending",
        _SCHEDULER,
        "has_pending_push_work",
        "If no request is left and the connector still has work that needs steps, `has_pending_push_work` returns "
        "True. If the hook returned False, the engine would sleep, and the work would wait for the next request. The "
        "work must end at some point, or the engine steps forever.",
        ("base.py, has_pending_push_work", "scheduler.py, has_requests"),
        Seen.CONTENT,
        (Check.RESTS, Check.COMES_TO_REST),
        incidents=("vllm#43433", "vllm#42611"),
        limit="pending work that holds no block is not detected",
    ),
    Obligation(
        "pending-frees-are-true",
        _SCHEDULER,
        "has_pending_block_frees",
        "If `has_pending_block_frees` returns True, vLLM preempts no request to get blocks, because a transfer is "
        "about to release blocks. The connector must then release blocks.",
        ("base.py, has_pending_block_frees", "scheduler.py, schedule"),
        Seen.OUTSIDE,
        (Check.ENDS,),
        scenarios=("preempted and resumed", "preempted and resumed, asynchronously"),
        incidents=("vllm#49674",),
    ),
    Obligation(
        "session-table-is-replaced",
        _SCHEDULER,
        "update_state_after_alloc, build_connector_meta",
        "The next turn of a session comes without `on_new_request` and without a lookup. vLLM allocates blocks. In "
        "`NewRequestData`, it passes the whole block table and the number of tokens that are already computed. In the "
        "connector, this table must replace the table of the previous turn.",
        ("scheduler.py, _update_request_as_session", "scheduler.py, _handle_stopped_request"),
        Seen.DECODER,
        ("TABLE_EQ", "SRC_BLOCK_OWNED", Check.KV_RIGHT, "RECORDED"),
        scenarios=("next turn of a session",),
        incidents=("vllm#53861",),
    ),
    Obligation(
        "id-is-no-identity",
        _SCHEDULER,
        "on_new_request, request_finished",
        "vLLM may use the id of an ended request again, with other tokens. No KV, copy or report of the ended request "
        "may reach the new one.",
        ("scheduler.py, add_request",),
        Seen.CONTENT,
        (Check.KV_RIGHT, "RECORDED", "COMPLETION_ONCE"),
        scenarios=("an id used again",),
        incidents=("vllm#10583", "vllm#27987", "vllm#49796", "vllm#51637"),
    ),
    Obligation(
        "reset-forgets",
        _SCHEDULER,
        "reset_cache",
        "After `reset_cache` has returned True, the connector serves nothing that was stored before the reset or was "
        "in flight at the reset. If the hook returns False, vLLM's `reset_prefix_cache` returns False, too. The "
        "value None counts as success.",
        ("base.py, reset_cache", "scheduler.py, reset_connector_cache"),
        Seen.CONTENT,
        (Check.RESET_HONOURED,),
        Precondition.RESET,
        incidents=("vllm#57727", "vllm#42695"),
    ),
    Obligation(
        "reset-at-any-time",
        _SCHEDULER,
        "reset_cache",
        "vLLM may call `reset_cache` twice in a row, and while copies are in flight. The connector must still accept "
        "the reports of these copies, which come after the reset.",
        ("scheduler.py, reset_prefix_cache",),
        Seen.OUTSIDE,
        ("RECORDED", Check.ENGINE_LIVES, Check.ENDS),
        scenarios=(
            "reset while idle",
            "reset while running",
            "reset twice in a row",
            "reset that spares the connector",
        ),
        incidents=("vllm#48090", "vllm#41956"),
    ),
    Obligation(
        "failed-loads-are-reported",
        _WORKER,
        "get_block_ids_with_load_errors, get_transfer_results",
        "If a load leaves blocks unfilled, the worker reports these blocks no later than the step in which it reports "
        'the load as finished. A request in `failed_recving` must "also appear in finished_recving".',
        ("base.py, get_block_ids_with_load_errors", "base.py, KVConnectorTransferResults"),
        Seen.CONTENT,
        (
            *(Check.KV_RIGHT, "RECORDED", Check.ENGINE_LIVES, Check.ENDS),
            *("LIVENESS", "COMPLETION_ONCE", "ROLLBACK_OBSERVED"),
        ),
        Precondition.FAILED_LOAD,
        scenarios=("what is stored is lost",),
        incidents=("vllm#52234", "LMCache#3388", "vllm#39732", "vllm#52838"),
        limit="a failed load that is reported as done is not detected if no request reads the KV of this load",
    ),
    Obligation(
        "load-precedes-the-read",
        _WORKER,
        "start_load_kv, wait_for_layer_load",
        "If a load is synchronous, it has filled the blocks of a layer when `wait_for_layer_load` returns for that "
        "layer.",
        ("base.py, start_load_kv", "base.py, wait_for_layer_load"),
        Seen.CONTENT,
        (Check.KV_RIGHT,),
        Precondition.LOAD,
        incidents=("vllm#34616", "vllm#50696"),
        limit="a wrong order of streams on a device is not detected",
        may_share_its_cause=True,
    ),
    Obligation(
        "saves-keep-their-source",
        _WORKER,
        "wait_for_save",
        '"Async saves must retain their source blocks until completion is reported to the scheduler. Otherwise, '
        'wait for saves to finish before returning."',
        ("base.py, wait_for_save",),
        Seen.DECODER,
        ("SRC_BLOCK_STABLE", "BLOCK_REUSE_FENCED", Check.KV_RIGHT),
        Precondition.SAVE,
        incidents=("vllm#52360", "vllm#45704", "vllm#54193"),
        limit="wrong KV that is saved and never loaded is not detected",
        may_share_its_cause=True,
    ),
    Obligation(
        "hit-sources-add-up",
        _SCHEDULER,
        "get_external_cache_hit_sources",
        'The counts that `get_external_cache_hit_sources` returns "must sum to num_external_tokens". Otherwise, '
        "vLLM counts the source of the hit as unspecified.",
        ("base.py, get_external_cache_hit_sources",),
        Seen.CONTENT,
        (Check.HIT_SOURCES,),
        Precondition.LOAD,
    ),
    Obligation(
        "shutdown-completes",
        _BOTH,
        "shutdown",
        "`shutdown` completes asynchronous work, cleans up everything, and does not raise.",
        ("base.py, shutdown",),
        Seen.OUTSIDE,
        (Check.SHUTS_DOWN,),
        limit="resources that are not released are not detected",
    ),
    Obligation(
        "events-are-true",
        _SCHEDULER,
        "take_events",
        "The connector announces a block as stored when it can serve the block, and as removed when it can no longer "
        "serve the block.",
        ("base.py, take_events",),
        Seen.NOT_AT_ALL,
        incidents=("vllm#57159",),
    ),
    Obligation(
        "device-order",
        _WORKER,
        "start_load_kv, save_kv_layer, finish_forward",
        "Copies on a device run in the right order relative to the model's reads and writes of the same blocks.",
        ("base.py, finish_forward", "base.py, save_kv_layer"),
        Seen.NOT_AT_ALL,
        incidents=("vllm#45704", "vllm#47282", "vllm#50696"),
        limit="the order of copies is not tested; digests of pages in production show only that bytes changed",
    ),
)

OBLIGATIONS: Final[Mapping[str, Obligation]] = MappingProxyType({each.name: each for each in _ALL})
"""Name → obligation, roughly in the order of a request's life."""
