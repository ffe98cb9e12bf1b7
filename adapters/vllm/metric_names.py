"""Names and meanings of the connector's metrics, for each figure that `stats.py` sends.

Names follow Prometheus: they use base units (seconds, bytes), the unit comes last, and names of counters end in
`_total`. docs/metrics.md is generated from this file. The alert rules and the dashboard are checked against it.
"""

from __future__ import annotations

from typing import Final

from kvledger.adapters.figures import MISS_REASONS, RECOMPUTE_REASONS

PREFIX: Final = "vllm:kvledger_"
BY_EXTENSION: Final = "num_extension_events"
MISSED: Final = "num_tokens_missed"
RECOMPUTED: Final = "num_tokens_recomputed"
LABELS: Final = {BY_EXTENSION: "extension", MISSED: "reason", RECOMPUTED: "reason"}
"""Counter → the label that it has in addition to vLLM's labels. `stats.py` sends the counter as "counter/value of the
label". No value has a slash."""
REASONS_OF: Final = {MISSED: MISS_REASONS, RECOMPUTED: RECOMPUTE_REASONS}
"""Counter with the label `reason` → possible values of this label."""
LAST_WRITTEN: Final = "log_last_written_unix_ns"

COUNTERS: Final = {
    "num_requests": ("requests", "Requests that vLLM accepted."),
    "num_preemptions": ("preemptions", "Preemptions: a request lost its blocks and waits to be scheduled again."),
    "num_lookups": (
        "lookups",
        "Answers to lookups. vLLM looks up a waiting request in every step, so a request may get many answers.",
    ),
    "num_admissions": (
        "admissions",
        "Admissions: a request got blocks after a lookup. The same request may be admitted several times.",
    ),
    "num_tokens_queried": ("queried_tokens", "Tokens of admitted requests that vLLM's own prefix cache did not have."),
    "num_tokens_hit": (
        "hit_tokens",
        "Tokens of admitted requests that are loaded from the host pool instead of computed.",
    ),
    MISSED: ("missed_tokens", "Tokens of admitted requests that were neither in vLLM's own prefix cache nor loaded."),
    "num_tokens_loaded": ("loaded_tokens", "Tokens whose load from the host pool is completed."),
    "num_tokens_recovered": (
        "recovered_tokens",
        "Tokens that preempted requests had computed before and loaded from the host pool after the preemption.",
    ),
    "num_tokens_retained": (
        "retained_tokens",
        "Tokens of preempted requests that vLLM's own prefix cache still had after the preemption.",
    ),
    RECOMPUTED: (
        "recomputed_tokens",
        "Tokens that a request computed before its preemption and computed again after the preemption.",
    ),
    "num_chunks_saved": ("saved_chunks", "Chunks that all ranks have copied into the host pool."),
    "num_chunks_evicted": ("evicted_chunks", "Chunks removed from the host pool to make room for other chunks."),
    "num_chunks_declined": (
        "declined_chunks",
        "Chunks that were not saved, because the host pool had no room or a load into their blocks had failed.",
    ),
    "num_chunks_tainted": (
        "tainted_chunks",
        "Chunks that kvledger stopped offering until they are saved again, because a load of them failed.",
    ),
    "num_bytes_saved": ("saved_bytes", "Bytes copied into the host pool by all ranks together."),
    "num_bytes_loaded": ("loaded_bytes", "Bytes copied out of the host pool by all ranks together."),
    "num_loads_failed": (
        "failed_loads",
        "Loads that failed. vLLM then computes the tokens or ends the request, as kv_load_failure_policy says.",
    ),
    "num_saves_failed": ("failed_saves", "Saves that failed, so that kvledger cannot offer their chunks."),
    "num_violations": (
        "violations",
        "Breaches of rules that were found while serving. A request that cannot continue safely is quarantined.",
    ),
    "num_hook_failures": (
        "hook_failures",
        "Calls of the connector's hooks in which kvledger raised an exception. vLLM got a safe answer instead.",
    ),
    "num_extensions_stopped": (
        "stopped_extensions",
        "Extensions that are off until the engine restarts, because their code raised an exception.",
    ),
    "num_log_bytes_written": ("log_written_bytes", "Bytes of frames written to the event log."),
    "num_events_lost": (
        "log_lost_events",
        "Events that are missing from the event log for good, because the log could not be written.",
    ),
    BY_EXTENSION: ("extension_events", "Events of the extension that the label `extension` names."),
}
GAUGES: Final = {
    "num_chunks_cached": ("cached_chunks", "Committed chunks in the host pool."),
    "num_slots_used": ("used_slots", "Slots of the host pool that hold a page or are reserved for one."),
    "num_slots": (
        "slots",
        "Number of slots in the host pool; 0 before the first step, because vLLM sends no figures until then.",
    ),
    "num_jobs_in_flight": ("jobs_in_flight", "Loads and saves that are not settled yet."),
    "num_log_events_waiting": (
        "log_waiting_events",
        "Events that waited in memory in the engine's latest step, because the event log could not be written.",
    ),
    LAST_WRITTEN: (
        "log_last_write_timestamp_seconds",
        "Unix time of the latest write to the event log; 0 before the first write. An idle engine writes nothing.",
    ),
    "is_disabled": (
        "disabled",
        "1 if kvledger caches nothing until the engine restarts, else 0. The server's output has the reason.",
    ),
}
INFO: Final = (
    "info",
    "Always 1. The labels are kvledger's version and the settings on which kvledger's other metrics depend.",
)
INFO_SETTINGS: Final = (
    *("chunk_size", "save_interval_tokens", "host_bytes", "share_pool", "offer", "save_tails", "keep_for_preempted"),
    *("load_mode", "save_mode", "max_deferred_lookups", "max_failed_loads", "durability", "digests"),
)
"""Labels of `INFO` besides `version`: fields of `ConnectorSettings`, as configured or by default."""
HISTOGRAMS: Final = {
    "load_times": ("load_time_seconds", "Time that the slowest rank took for a load."),
    "save_times": (
        "save_time_seconds",
        "Time that the slowest rank took for a save, or for the saves of one step if they were copied together.",
    ),
    "recovery_times": (
        "recovery_time_seconds",
        "Time from a preemption of a request until a step runs the request again.",
    ),
}
"""Figure of `stats.py` → name and meaning, as in `COUNTERS` and `GAUGES`. Prometheus's client appends `_total` to the
names of counters."""
