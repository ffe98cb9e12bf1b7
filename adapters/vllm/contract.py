"""VLLM_CONTRACT: what vLLM demands of what leaves towards it, held against every answer and job, whatever was decided.

Where a demand is not met, vLLM's scheduler asserts, or computes upon what is not there. So an answer that breaks one is
replaced by the safe one, a job is not handed out and what it promised is reported as failed; the log has
`decision.withheld`, which names the breach, and the request is quarantined. In vLLM 0.32
(S: `v1/core/sched/scheduler.py`; `distributed/kv_transfer/kv_connector/`: B: `v1/base.py`, U: `utils.py`):

`get_num_new_matched_tokens` (S, schedule)
  - a number of tokens, 0 or more, or None, which asks to be asked again; the number answers this very call
  - with what is computed at most `num_tokens` (S: `assert num_computed_tokens <= request.num_tokens`); by our own bound
    one less, for of a load within the step a token must be left to compute (S: `assert num_new_tokens > 0`)
  - asynchronous only with tokens to load (S: `assert num_external_computed_tokens > 0`)
  - asynchronous where there are several groups: failed blocks cannot be reported there (S, `_handle_invalid_blocks`)
  - a load begins with a block, for whole pages are copied, and ends where what is saved ends: a load that is promised
    and fails may end its request (`kv_load_failure_policy`). Both are demands of our own
`update_state_after_alloc` (B)
  - all that was accepted is loaded, once, into the blocks that were given; or it is reported as failed
`build_connector_meta` (B, start_load_kv and request_finished)
  - a load only where vLLM has accepted one; asynchronous where it waits for its end, and only there
  - a save only out of blocks that the request holds, or, where it lost them, before the forward or while they are kept
  - as many slots as blocks, all of them in the pool
`request_finished` (B; S, `_connector_finished`)
  - True where a copy still reads the blocks, and then one `finished_sending`; else False, and none
`finished_recving`, `finished_sending`, `failed_recving` (S, `_update_from_kv_xfer_finished`; U, KVOutputAggregator)
  - once for each request that waits for a load, or whose end was answered True; for nobody else. A failed load is in
    the first and the last of them
`get_block_ids_with_load_errors` (S, `_handle_invalid_blocks`)
  - only blocks of a table that vLLM gave, and none where there are several groups
`reset_cache`, `has_pending_push_work` (S)
  - a bool; the latter True for no longer than a copy may be silent

The ends are kept to in `lifecycle/projections/owed.py`; what is decided is judged by the functions below. They
look at observations and at what is saved, and return the breach in words, or "".
"""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.lifecycle import Projections, RequestRecord, TrustRegion
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT, NULL_BLOCK


def breach_of_answer(answer: e.LookupAnswered, asked: e.LookupRequested, projections: Projections) -> str:
    """What a number of tokens would break as the answer to `asked`."""
    computed, promised = asked.num_computed_tokens, answer.num_external_tokens
    record = projections.tracker.get(asked.request_id)
    num_saved = 0
    if (answer.num_computed_tokens, answer.num_tokens) != (computed, asked.num_tokens):
        return f"computed were {computed} of {asked.num_tokens} tokens, the answer is for {answer.num_computed_tokens}"
    if promised == 0:
        return "asynchronous, with nothing to load" if answer.is_async else ""
    if promised < 0 or computed + promised > asked.num_tokens - 1:
        return f"{computed} tokens are computed, {promised} were promised, {asked.num_tokens} are known"
    if record is not None and record.trust is TrustRegion.TRUSTED:
        num_saved = _num_saved_tokens(record, projections)
    if computed + promised > num_saved:
        return f"tokens to {computed + promised} were promised, {num_saved} can be had"
    return _breach_of_mode(answer, projections)


def _breach_of_mode(answer: e.LookupAnswered, projections: Projections) -> str:
    if answer.num_computed_tokens % projections.geometry.block_size:
        return f"a load was promised from token {answer.num_computed_tokens} on, which is inside of a block"
    if projections.geometry.windows.num_groups > 1 and not answer.is_async:
        return "a load within the step was promised, and there are several groups"
    return ""


def _num_saved_tokens(record: RequestRecord, projections: Projections) -> int:
    # Counted by the projection, never taken from an answer: a handler may have answered anything before.
    num_chunks = projections.lookups.num_committed_chunks(record)
    num_tokens = num_chunks * projections.geometry.chunk_size
    tail = record.saved_tail
    return num_tokens if tail is None or tail.first_token > num_tokens else max(num_tokens, tail.end_token)


def breach_of_load(job: e.LoadIssued, observed: e.Event, projections: Projections) -> str:
    """What a load would break that was issued upon `observed`."""
    if not isinstance(observed, e.BlocksAllocated) or not observed.num_external_tokens:
        return "a load was issued, and vLLM has accepted none"
    record = projections.tracker.get(job.request_id)
    answer = None if record is None else record.claimed
    if answer is None or observed.request_id != job.request_id:
        return "a load was issued that no lookup promised"
    expected = (answer.num_computed_tokens, observed.num_external_tokens, answer.is_async)
    if (job.first_token, job.num_tokens, job.is_async) != expected:
        return f"a load of {job.num_tokens} tokens from {job.first_token} on was issued, accepted were {expected}"
    pages = projections.geometry.pages_spanning(job.first_token, job.num_tokens)
    return _breach_of_pages(job, pages, observed.block_ids, projections) or _breach_of_missing(job, projections)


def _breach_of_missing(job: e.LoadIssued, projections: Projections) -> str:
    forget = projections.geometry.windows.forget
    if NO_SLOT in job.slots and not (
        forget
        and all(block == NULL_BLOCK for block, slot in zip(job.block_ids, job.slots, strict=True) if slot == NO_SLOT)
    ):
        return "a block that was given is not loaded"
    return ""


def breach_of_save(job: e.SaveIssued | e.TailSaveIssued, decided: Sequence[e.Event], projections: Projections) -> str:
    """What a save would break that is one of the decisions `decided`."""
    if isinstance(job, e.SaveIssued):
        pages = projections.geometry.pages_of(job.chunks)
        before_forward, is_async = job.before_forward, job.is_async
    else:
        pages = projections.geometry.pages_spanning(job.first_token, job.num_tokens)
        before_forward, is_async = True, False
    record = projections.tracker.of(job.ordinal)
    if record is not None and record.block_ids:
        return _breach_of_pages(job, pages, record.block_ids, projections)
    is_kept = is_async and any(isinstance(decision, e.BlocksHeld) for decision in decided)
    if not before_forward and not is_kept:
        return "a save was issued out of blocks that are not kept until it is done"
    lost = () if record is None else record.lost_block_ids or ()
    return _breach_of_pages(job, pages, lost, projections)


def _breach_of_pages(
    job: e.LoadIssued | e.SaveIssued | e.TailSaveIssued,
    pages: Sequence[int],
    table: Sequence[int],
    projections: Projections,
) -> str:
    num_slots, num_blocks = projections.configuration.num_slots, len(table)
    if not len(pages) == len(job.block_ids) == len(job.slots):
        return f"{len(pages)} pages, {len(job.block_ids)} blocks and {len(job.slots)} slots do not belong together"
    for page, block, slot in zip(pages, job.block_ids, job.slots, strict=True):
        if slot == NO_SLOT:
            continue
        if not 0 <= slot < num_slots:
            return f"slot {slot} is outside of the pool of {num_slots}"
        if page >= num_blocks or table[page] != block:
            return f"block {block} is not page {page} of the request's table"
    return ""
