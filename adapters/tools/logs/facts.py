"""Properties and totals of a log as labelled lines in English, for the terminal and for the HTML page."""

from __future__ import annotations

import datetime as dt

from kvledger.adapters.figures import Figures
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.units import duration, plural, size
from kvledger.lifecycle import LedgerConfiguration

_NS_PER_S = 1_000_000_000


def facts_of(log: StoredLog, duration_ns: int) -> dict[str, str]:
    """Return label → text for the log's writer, opening time, duration and sizes, and for how much was read."""
    facts = {"log": str(log.path), "written by": log.written_by}
    opened_at = log.header.get("opened_at_unix_ns")
    if isinstance(opened_at, int):
        opened = dt.datetime.fromtimestamp(opened_at / 1e9, tz=dt.UTC)
        facts["opened"] = f"{opened:%Y-%m-%d %H:%M:%S} UTC, covers {duration(duration_ns)}"
    if log.header:
        facts |= _sizes(log.configuration, has_own_copies=not log.decides_elsewhere)
    else:
        facts["sizes"] = "not known: no copy of the log's header is intact"
    facts["events"] = f"{log.num_events} in {plural(log.num_frames, 'frame')}, {size(log.num_bytes)}"
    return facts


def _sizes(configuration: LedgerConfiguration, *, has_own_copies: bool) -> dict[str, str]:
    sizes = [f"block {configuration.block_size} tokens"]
    if has_own_copies:
        sizes += [f"chunk {configuration.chunk_size} tokens", plural(configuration.num_slots, "slot")]
        sizes += [plural(configuration.num_ranks, "rank")]
    facts = {"sizes": ", ".join(sizes)}
    if len(configuration.windows) > 1:
        seen = ", ".join("all tokens" if not tokens else f"{tokens} tokens" for tokens in configuration.windows)
        facts["groups"] = f"{len(configuration.windows)}, which see {seen}"
    return facts


UNKNOWN_TOTALS = "not known: reading begins at a snapshot that has no totals of the events before it"


def figures_in_words(figures: Figures, *, has_own_copies: bool, num_deferrals: int | None = None) -> dict[str, str]:
    """Return label → text for what the cache did. Of another connector's copies, only the loaded tokens are shown."""
    offered = f"{plural(figures.num_tokens_offered, 'token')} offered"
    deferred = "" if num_deferrals is None else f", {plural(num_deferrals, 'deferral')}"
    lines = {
        "lookups": f"{figures.num_lookups} answered, repeats included{deferred}; {offered}",
        "preempted": f"{plural(figures.num_preemptions, 'time')}; tokens recovered {figures.num_tokens_recovered}, "
        f"retained {figures.num_tokens_retained}, recomputed {figures.num_tokens_recomputed}",
    }
    saved, loaded = plural(figures.num_chunks_saved, "chunk"), plural(figures.num_tokens_loaded, "token")
    if has_own_copies:
        lines |= {
            "saved": f"{saved}, {_rate(figures.num_bytes_saved, figures.save_duration_ns)}",
            "loaded": f"{loaded}, {_rate(figures.num_bytes_loaded, figures.load_duration_ns)}",
            "not saved": f"{plural(figures.num_chunks_declined, 'chunk')} declined, "
            f"{plural(figures.num_saves_failed, 'save')} failed",
            "lost": f"{plural(figures.num_chunks_evicted, 'chunk')} evicted, {figures.num_chunks_tainted} tainted, "
            f"{plural(figures.num_loads_failed, 'load')} failed",
        }
    else:
        lines["loaded"] = loaded
    broken, failed = plural(figures.num_violations, "broken rule"), plural(figures.num_hook_failures, "failed hook")
    return lines | {"faults": f"{broken} and {failed} recorded by the connector"}


def _rate(num_bytes: int, duration_ns: int) -> str:
    per_second = f" in {duration(duration_ns)} ({size(num_bytes * _NS_PER_S // duration_ns)}/s)" if duration_ns else ""
    return size(num_bytes) + per_second
