"""Every fact of a log, with the rules that verify it, or the reason why no rule does. A test fails if one is missing.

A fact is a field of an event. A rule is listed if it finds logs in which only that field is wrong: a test changes one
field of one event at a time, in stories and walks, until each listed rule is broken. A listed rule need not find all
wrong values; its docstring says what the rule does not verify. A rule that only relies on a fact is not listed. In
addition, the audit makes every decision again if it has the code that made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from kvledger.lifecycle import events as e

Why = tuple[str, ...] | str
"""Rules, or the reason why there is none."""

_ENGINE = "only the engine knows the value; nothing else in the log shows it"
_PEOPLE = "only people read the value; nothing else in the log depends on it"
_PASSED_ON = "describes a breach or a failed hook that kvledger noticed while serving; RECORDED reports both"
_KNOWN = ("LEGAL_TRANSITION",)
_LIFE = ("GEN_ISOLATION",)
_PROGRESS: Mapping[str, Why] = dict.fromkeys(("num_computed_tokens", "num_tokens"), ("TOKEN_CONSERVATION",))
_BY_NAME: Mapping[str, Why] = {
    "ordinal": _LIFE,
    "generation": _LIFE,
    "job_id": ("COMPLETION_ONCE",),
    "cause": ("LEGAL_TRANSITION",),
    "error": _PEOPLE,
    "time_ns": "a clock gives the value; nothing else in the log shows it. LIVENESS and LONGEST_HIT rely on such times",
    **dict.fromkeys(
        ("extension", "name", "extension_version", "payload"),
        "only rules of the extension itself can check the value",
    ),
}
"""Field → its rules or reason, in events that have no entry of their own for it."""
_OF_EVENT: Mapping[str, Mapping[str, Why]] = {
    "request.arrived": {
        "num_prompt_tokens": _ENGINE,
        "trace_parent": "the request's caller gives the value for exports; nothing else in the log depends on it",
        "skips_prefix_cache": "the client decides this, and `kvledger why` uses it; if true, vLLM claims no tokens",
        "is_salted": "the client decides this, and `kvledger why` uses it; chunk keys cover the salt itself",
    },
    "chunk.keys_observed": {
        "first_chunk": ("LONGEST_HIT",),
        **dict.fromkeys(("keys", "hash_prefixes", "are_block_hashes"), ("KEY_IDENTITY",)),
    },
    "lookup.requested": {
        "num_computed_tokens": ("LOOKUP_PURE",),
        "num_tokens": ("LOOKUP_PURE", "RESUME_COVERS_OUTPUT"),
    },
    "blocks.allocated": {
        "block_ids": ("TABLE_EQ", "SRC_BLOCK_OWNED", "SRC_BLOCK_STABLE", "LOAD_DST_EXCLUSIVE"),
        "num_external_tokens": ("ALLOC_MATCHES_LOOKUP", "EXTERNAL_ZERO_NO_LOAD", "TOKEN_CONSERVATION"),
    },
    "blocks.observed": {"block_ids": "only the scheduler knows its block table; TABLE_EQ reports every such event"},
    "request.preempted": {
        "num_settled_tokens": ("CHUNK_COMPLETE", "SETTLED_EXACT"),
        "num_tokens": ("RESUME_COVERS_OUTPUT",),
        "blocks_zeroed": ("CHUNK_COMPLETE",),
        "num_in_flight_tokens": ("SETTLED_EXACT",),
    },
    "session.continued": {
        "num_computed_tokens": ("SETTLED_EXACT",),
        **dict.fromkeys(("num_tokens", "num_prompt_tokens"), _ENGINE),
    },
    "tokens.rolled_back": {"num_computed_tokens": ("ROLLBACK_OBSERVED", "SETTLED_EXACT")},
    "request.finished": {
        "status": _PEOPLE,
        "num_settled_tokens": ("CHUNK_COMPLETE", "SETTLED_EXACT"),
        "num_tokens": ("CHUNK_COMPLETE",),
        "blocks_zeroed": ("CHUNK_COMPLETE",),
        "num_in_flight_tokens": ("SETTLED_EXACT",),
        "num_computed_tokens": ("SETTLED_EXACT",),
    },
    "step.scheduled": {
        "step": ("STEP_SUM",),
        "num_scheduled_tokens": ("STEP_SUM",),
        "advanced": (
            *("STEP_SUM", "LEGAL_TRANSITION", "TOKEN_CONSERVATION", "LAST_TOKEN", "ROLLBACK_OBSERVED"),
            "SETTLED_EXACT",
        ),
        "paused": ("STEP_SUM",),
        "extended": ("TABLE_EQ", "BLOCK_REUSE_FENCED", "SRC_BLOCK_OWNED", "NEW_BLOCK_EXCLUSIVE"),
        "settled": ("CURSOR_LE_FRONTIER", "CHUNK_COMPLETE", "SAVE_INTERVAL", "SETTLED_EXACT"),
    },
    "transfer.reported": {
        "job_ids": ("COMPLETION_ONCE",),
        "ranks_done": ("COMPLETION_ONCE", "RANK_AGREEMENT"),
        "ranks_failed": ("COMPLETION_ONCE", "RANK_AGREEMENT"),
        "is_repeated": "if true, ranks may report a job twice; no rule checks that they were asked to report it again",
        "num_bytes": "measured by the workers; nothing else in the log shows it",
        "duration_ns": "measured by the workers; nothing else in the log shows it",
        "withheld": "says why the connector reports instead of the workers; only the connector knows the reason",
        "moments": ("COPY_IN_TIME",),
    },
    "step.reported": {
        "delivered": ("COPY_IN_TIME",),
        "ranks": ("COPY_IN_TIME",),
        "under_way": ("COPY_IN_TIME",),
    },
    "load.errors_observed": {"block_ids": ("FAILED_LOAD_TAINT",)},
    "hook.failed": dict.fromkeys(("hook", "request_id", "error"), _PASSED_ON),
    "lookup.answered": {
        "num_computed_tokens": ("LOOKUP_PURE", "TOKEN_CONSERVATION"),
        "num_tokens": ("LOOKUP_PURE",),
        "num_hit_tokens": ("LONGEST_HIT", "RESET_EPOCH", "LOOKUP_PURE"),
        "num_external_tokens": ("LOOKUP_PURE", "ALLOC_MATCHES_LOOKUP", "LAST_TOKEN"),
        "is_async": ("ALLOC_MATCHES_LOOKUP", "LOOKUP_PURE"),
        "miss_reason": ("LONGEST_HIT",),
    },
    "lookup.requested_again": {"ordinal": ("LOOKUP_PURE",)},
    "lookup.answered_again": {"ordinal": ("LOOKUP_PURE",)},
    "lookup.deferred": {
        "num_computed_tokens": ("LOOKUP_PURE",),
        "num_tokens": ("LOOKUP_PURE",),
        "job_id": ("DEFER_BOUNDED",),
        "num_deferred": ("DEFER_BOUNDED",),
    },
    "load.issued": {
        "first_token": ("ALLOC_MATCHES_LOOKUP", "LOADABLE_AFTER_COMMIT"),
        "num_tokens": ("ALLOC_MATCHES_LOOKUP", "LAST_TOKEN"),
        "slots": ("LOADABLE_AFTER_COMMIT", "GROUP_AGREEMENT"),
        "block_ids": ("LOAD_DST_EXCLUSIVE",),
        "is_async": ("ALLOC_MATCHES_LOOKUP",),
    },
    "load.completed": {"request_id": _LIFE, "job_id": ("COMPLETION_ONCE", "RANK_AGREEMENT")},
    "save.issued": {
        "chunks": ("CHUNK_COMPLETE", "STORE_CONTIGUOUS", "SETTLED_SAVED", "SRC_BLOCK_OWNED"),
        "slots": ("SLOT_EXCLUSIVE", "SRC_BLOCK_OWNED", "GROUP_AGREEMENT"),
        "block_ids": ("SRC_BLOCK_OWNED", "SRC_BLOCK_STABLE"),
        "before_forward": ("SRC_BLOCK_OWNED",),
        "is_async": ("SRC_BLOCK_OWNED",),
    },
    "tail.save_issued": {
        "first_token": ("SRC_BLOCK_OWNED",),
        "num_tokens": ("CHUNK_COMPLETE", "SRC_BLOCK_OWNED"),
        "slots": ("SLOT_EXCLUSIVE", "SRC_BLOCK_OWNED"),
        "block_ids": ("SRC_BLOCK_OWNED",),
    },
    "save.completed": {"request_id": _LIFE, "job_id": ("COMPLETION_ONCE", "RANK_AGREEMENT")},
    "load.failed": {"request_id": _LIFE},
    "save.failed": {"request_id": _LIFE, "quiet": ("RANK_AGREEMENT", "SLOT_EXCLUSIVE")},
    "save.declined": {
        "first_chunk": ("SETTLED_SAVED",),
        "num_chunks": _PEOPLE,
        "reason": ("PIN_BALANCE",),
    },
    "transfer.awaited": {
        "request_id": _LIFE,
        "job_id": ("SRC_BLOCK_STABLE", "LIVENESS"),
        "before_forward": ("SRC_BLOCK_STABLE",),
    },
    "blocks.held": {"request_id": ("LEGAL_TRANSITION", "DELAY_FREE_CONTRACT")},
    "chunks.evicted": {
        "keys": ("EVICT_IDLE_ONLY", "HIT_PINNED", "WAITING_KEPT", "EVICTION_ORDER", "SLOT_EXCLUSIVE"),
        **dict.fromkeys(("request_id", "ordinal", "generation"), _LIFE),
    },
    "chunks.tainted": {"keys": ("FAILED_LOAD_TAINT", "LONGEST_HIT")},
    "prefill.advanced": _PROGRESS,
    "prefill.completed": _PROGRESS,
    "request.released": {"request_id": _KNOWN, "ordinal": ("RELEASE_ALL",), "generation": ("RELEASE_ALL",)},
    "request.quarantined": {"reason": _PEOPLE},
    "invariant.violated": dict.fromkeys(("rule", "request_id", "ordinal", "generation", "detail"), _PASSED_ON),
    "log.note": {"text": _PEOPLE},
    "window.left": dict.fromkeys(("num_settled_tokens", "num_in_flight_tokens"), ("SETTLED_EXACT",)),
    "effects.delivered": {
        **dict.fromkeys(("job_ids", "awaited", "block_ids", "failed", "sent", "received"), ("DELIVERED_ONCE",)),
        "reported": "names lives whose ends the workers reported to vLLM; only the engine knows these ends",
    },
    "load.refused": {
        "request_id": "names the request whose claimed tokens are not loaded; only the connector knows it",
        "block_ids": ("DELIVERED_ONCE",),
    },
    "decision.withheld": {
        **dict.fromkeys(
            ("request_id", "rule", "detail"),
            "tells which decision was not carried out, and why; only the connector knows this",
        ),
    },
    "hooks.exchanged": {
        **dict.fromkeys(e.field_names(e.HooksExchanged), ("TOLD_AS_DECIDED",)),
        "differences": "each difference is itself a violation of TOLD_AS_DECIDED",
    },
    "end.refused": dict.fromkeys(
        ("request_id", "ordinal", "field"),
        "tells which end another connector reported; nothing else in the log shows this end",
    ),
    "extension.decided": {
        "request_id": _KNOWN,
        **dict.fromkeys(("ordinal", "generation"), "no projection of the core uses these fields"),
    },
    "pages.digested": {
        **dict.fromkeys(
            ("request_id", "ordinal", "generation"),
            "names the life whose pages are copied; only the connector knows it",
        ),
        **dict.fromkeys(
            ("rank", "is_load", "group", "first_block"),
            "selects the bytes that are compared; a wrong value selects other bytes, or none",
        ),
        **dict.fromkeys(("digests", "stored"), ("BYTES_UNCHANGED",)),
    },
    "extension.stopped": {
        **dict.fromkeys(
            ("extension", "extension_version"),
            "names the extension that raised; its code may have changed since",
        ),
        **dict.fromkeys(("where", "error"), _PEOPLE),
    },
}


def _facts_of(event: type[e.Event]) -> Iterator[tuple[str, Why]]:
    own = _OF_EVENT.get(event.id, {})
    why = {**_BY_NAME, "request_id": (*_KNOWN, *_LIFE) if event.is_decision else _KNOWN, **own}
    yield from ((field, why[field]) for field in e.field_names(event) if field in why)
    yield from own.items()


FACTS: Mapping[str, Mapping[str, Why]] = MappingProxyType(
    {event_id: dict(_facts_of(event)) for event_id, event in e.STANDARD_EVENTS.items()}
)
"""Event id → field → the rules that verify it, or why there is none."""
