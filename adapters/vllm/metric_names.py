"""Names and meanings of the connector's metrics, for each figure that `stats.py` sends.

Names follow Prometheus: base units (seconds, bytes), the unit last, and `_total` after a counter's. docs/metrics.md is
generated from this file; alert rules and dashboard are checked against it.
"""

from __future__ import annotations

from typing import Final

from kvledger.adapters.figures import MISS_REASONS, RECOMPUTE_REASONS

PREFIX: Final = "vllm:kvledger_"
BY_EXTENSION: Final = "num_extension_events"
MISSED: Final = "num_tokens_missed"
RECOMPUTED: Final = "num_tokens_recomputed"
LABELS: Final = {BY_EXTENSION: "extension", MISSED: "reason", RECOMPUTED: "reason"}
"""Counter → its label besides vLLM's. A counter is sent as "counter/value of the label"; no value has a slash."""
REASONS_OF: Final = {MISSED: MISS_REASONS, RECOMPUTED: RECOMPUTE_REASONS}
"""Counter with the label `reason` → its values."""
LAST_WRITTEN: Final = "log_last_written_unix_ns"

COUNTERS: Final = {
    "num_requests": ("requests", "Requests that vLLM accepted."),
    "num_preemptions": ("preemptions", "Preemptions: a request lost its blocks and waits to be scheduled again."),
    "num_lookups": ("lookups", "Answers to lookups; vLLM looks up a waiting request in every step."),
    "num_admissions": ("admissions", "Requests that got blocks after a lookup, once each time that they are admitted."),
    "num_tokens_queried": ("queried_tokens", "Tokens of admissions that vLLM's own prefix cache did not have."),
    "num_tokens_hit": ("hit_tokens", "Tokens of admissions that are loaded from the host pool instead of computed."),
    MISSED: ("missed_tokens", "Tokens of admissions that are left to compute: the queried ones that are not hits."),
    "num_tokens_loaded": ("loaded_tokens", "Tokens whose load from the host pool has arrived."),
    "num_tokens_recovered": ("recovered_tokens", "Tokens of preempted requests, loaded back from the host pool."),
    "num_tokens_retained": ("retained_tokens", "Tokens of preempted requests that vLLM's prefix cache still had."),
    RECOMPUTED: ("recomputed_tokens", "Tokens computed before a preemption and again after it."),
    "num_chunks_saved": ("saved_chunks", "Chunks copied into the host pool, by all ranks."),
    "num_chunks_evicted": ("evicted_chunks", "Chunks that left the host pool to make room."),
    "num_chunks_declined": ("declined_chunks", "Chunks that were not saved, because there was no room for them."),
    "num_chunks_tainted": ("tainted_chunks", "Chunks that are no longer offered, because a load of them failed."),
    "num_bytes_saved": ("saved_bytes", "Bytes copied into the host pool, of all ranks."),
    "num_bytes_loaded": ("loaded_bytes", "Bytes copied out of the host pool, of all ranks."),
    "num_loads_failed": (
        "failed_loads",
        "Loads that failed; their requests recompute or end (kv_load_failure_policy).",
    ),
    "num_saves_failed": ("failed_saves", "Saves that failed; their chunks are not offered."),
    "num_violations": ("violations", "Rules found broken while serving; each concerns one request, which recomputes."),
    "num_hook_failures": ("hook_failures", "Hooks of the connector that raised; vLLM got the safe answer."),
    "num_extensions_stopped": (
        "stopped_extensions",
        "Extensions that are off until the engine restarts, because their code raised.",
    ),
    "num_log_bytes_written": ("log_written_bytes", "Bytes of frames written to the event log."),
    "num_events_lost": ("log_lost_events", "Events that were lost, because the log could not be written."),
    BY_EXTENSION: ("extension_events", "Events of an extension."),
}
GAUGES: Final = {
    "num_chunks_cached": ("cached_chunks", "Chunks in the host pool."),
    "num_slots_used": ("used_slots", "Slots of the host pool that hold a chunk or wait for one."),
    "num_slots": ("slots", "Slots of the host pool; 0 until the first step, before which vLLM sends no figures."),
    "num_jobs_in_flight": ("jobs_in_flight", "Copies that the workers have not reported yet."),
    "num_log_events_waiting": (
        "log_waiting_events",
        "Events that wait in memory because the log cannot be written, as of the engine's last step.",
    ),
    LAST_WRITTEN: (
        "log_last_write_timestamp_seconds",
        "When the event log was written last, in Unix time; 0 before that. An idle engine writes nothing.",
    ),
    "is_disabled": (
        "disabled",
        "1 if nothing is cached until the engine restarts, else 0; the server's output has the reason.",
    ),
}
INFO: Final = ("info", "1, labelled with kvledger's version and the settings that its figures depend on.")
INFO_SETTINGS: Final = (
    *("chunk_size", "save_interval_tokens", "host_bytes", "share_pool", "offer", "save_tails", "keep_for_preempted"),
    *("load_mode", "save_mode", "max_deferred_lookups", "max_failed_loads", "durability", "digests"),
)
"""Labels of `INFO` besides `version`: fields of `ConnectorSettings`, as configured or by default."""
HISTOGRAMS: Final = {
    "load_times": ("load_time_seconds", "Time of a copy out of the host pool, of the slowest rank."),
    "save_times": ("save_time_seconds", "Time of a copy into the host pool, of the slowest rank."),
    "recovery_times": (
        "recovery_time_seconds",
        "Time from a preemption until the first step that runs the request again, waiting included.",
    ),
}
"""Figure of `stats.py` → name and meaning; a counter's name gets `_total` appended."""
