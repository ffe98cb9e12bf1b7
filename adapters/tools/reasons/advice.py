"""What an operator can change so that requests wait less and fewer tokens are computed.

This is only for logs of kvledger's own connector, because the advice names kvledger's settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from kvledger.adapters.tools.reasons.reason import Reason
from kvledger.adapters.tools.reasons.sums import Sums
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle.reader import Spent

QUEUED: Final = "queued"
PREEMPTED: Final = "preempted"
_TEXTS: Final[Mapping[str, str]] = {
    QUEUED: (
        "vLLM starts a request if enough KV blocks are free, within `--max-num-seqs` and `--max-num-batched-tokens`. "
        "If blocks ran out, a larger `--gpu-memory-utilization` gives more blocks; if not, raise these two limits. "
        "Another replica helps in both cases"
    ),
    PREEMPTED: (
        "vLLM's KV blocks ran out; a smaller `--max-num-seqs` lets fewer requests run at the same time, "
        "and a larger `--gpu-memory-utilization` gives them more blocks"
    ),
    Reason.EVICTED: (
        "a larger `host_bytes` keeps more chunks; `kvledger stats` estimates how many more tokens would be loaded"
    ),
    Reason.DECLINED: "a larger `host_bytes` makes room, if the host pool was full",
    Reason.UNSAVED: "a smaller `save_interval_tokens` saves decoded tokens earlier",
    Reason.DEFERRAL_EXHAUSTED: "with a larger `max_deferred_lookups`, requests wait longer for saves",
    Reason.LOAD_FAILED: "the worker's message `copy failed` has the error",
    Reason.SAVE_FAILED: "the worker's message `copy failed` has the error",
    Reason.QUARANTINED: "`kvledger verify` names the broken rule; please report it",
    Reason.NOT_DELIVERED: "`kvledger verify` names the broken rule; please report it",
    Reason.WITHHELD: "the event log could not be written; check the disk of the log",
    Reason.RESET: "reset the connector's cache together with vLLM's only if the weights have changed",
}
_SMALLER_CHUNKS = "a smaller `chunk_size` leaves fewer tokens after the last whole chunk"
_BY_RESETS: Final = frozenset({Reason.RESET, Reason.STALE})
"""Reasons of tokens whose request was preempted by a cache reset, and not because blocks ran out."""
_LEAST_SHARE: Final = 0.1
"""Smallest share of the computed tokens with which a reason gets advice. Preemptions get advice if requests spent at
least this share of the time preempted."""
_LEAST_QUEUED: Final = 0.5
"""The queue gets advice if requests spent at least this share of their time in it."""
_LEAST_WAIT_NS: Final = 100_000_000
"""The queue gets advice if requests spent at least this time in it, in nanoseconds per request. A shorter time may be
the load before the first step, which counts as queued time, too."""


def advice(
    sums: Sums, configuration: LedgerConfiguration, spent: Spent | None, num_requests: int = 1
) -> dict[str, str]:
    """Return reason → what to change. Reasons that cost time come first, the most time first.

    The reasons that cost tokens follow, the most tokens first.

    Args:
        sums: the token counts of one life, or of several lives.
        configuration: the configuration of the log that has these lives.
        spent: the time that these lives took in total; None: unknown.
        num_requests: number of these lives that were queued.
    """
    computed = sums.misses() + sums.computed_twice  # recomputed tokens were missed at the admission before
    again = +sums.recomputed
    num_again = sum(num_tokens for reason, num_tokens in again.items() if reason not in _BY_RESETS)
    times: Counter[str] = Counter()
    if spent is not None:
        if spent.queued_ns >= max(_LEAST_QUEUED * spent.total_ns, _LEAST_WAIT_NS * num_requests):
            times[QUEUED] = spent.queued_ns
        if spent.preempted_ns >= _LEAST_SHARE * spent.total_ns and (num_again or not again):
            times[PREEMPTED] = spent.preempted_ns
    tokens = Counter({**{str(reason): count for reason, count in computed.items()}, PREEMPTED: num_again})
    least = max(1, _LEAST_SHARE * computed.total())
    texts = dict(_TEXTS)
    if configuration.chunk_size > configuration.block_size:
        texts[Reason.PARTIAL_CHUNK] = _SMALLER_CHUNKS
    found: dict[str, str] = {}
    names = [name for name, _ in (+times).most_common()]
    names += [name for name, count in tokens.most_common() if count >= least]
    for name in names:
        text = texts.get(name)
        if text is not None and text not in found.values():
            found[name] = text
    return found
