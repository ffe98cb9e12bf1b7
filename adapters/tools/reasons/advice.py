"""What an operator can change so that fewer tokens are computed, by reason.

For logs of kvledger's own connector only, because it names kvledger's settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvledger.adapters.tools.reasons.reason import Reason
from kvledger.adapters.tools.reasons.sums import Sums
from kvledger.lifecycle import LedgerConfiguration

PREEMPTED: Final = "preempted"
_BY_REASON: Final[Mapping[Reason, str]] = {
    Reason.EVICTED: "a larger `host_bytes` keeps more; `kvledger stats` estimates how many more tokens would be loaded",
    Reason.DECLINED: "a larger `host_bytes` makes room, if the host pool was full",
    Reason.UNSAVED: "a smaller `save_interval_tokens` saves decoded tokens earlier",
    Reason.DEFERRAL_EXHAUSTED: "a larger `max_deferred_lookups` waits longer for saves",
    Reason.LOAD_FAILED: "the worker's message `copy failed` has the error",
    Reason.SAVE_FAILED: "the worker's message `copy failed` has the error",
    Reason.QUARANTINED: "`kvledger verify` names the broken rule; please report it",
    Reason.NOT_DELIVERED: "`kvledger verify` names the broken rule; please report it",
    Reason.WITHHELD: "the event log could not be written: check its disk",
    Reason.RESET: "reset the connector's cache together with vLLM's only if the weights have changed",
}
_SMALLER_CHUNKS = "a smaller `chunk_size` leaves fewer tokens after the last whole chunk"
_FEWER_PREEMPTIONS = (
    "its GPU blocks ran out; a smaller `--max-num-seqs` lets fewer requests run at once, "
    "and a larger `--gpu-memory-utilization` gives them more blocks"
)
_BY_RESETS: Final = frozenset({Reason.RESET, Reason.STALE})
"""Reasons of tokens preempted by a reset of vLLM's cache and not for lack of blocks."""
_LEAST_SHARE: Final = 10
"""Least share of the computed tokens, in percent, for which a reason gets advice."""


def advice(sums: Sums, configuration: LedgerConfiguration, num_preemptions: int) -> dict[str, str]:
    """Reason, or `PREEMPTED` → what to change, the reason with the most tokens first."""
    computed = sums.misses() + sums.computed_twice  # recomputed tokens were missed at the admission before
    least = computed.total() * _LEAST_SHARE / 100
    texts = dict(_BY_REASON)
    if configuration.chunk_size > configuration.block_size:
        texts[Reason.PARTIAL_CHUNK] = _SMALLER_CHUNKS
    found: dict[str, str] = {}
    for reason, num_tokens in computed.most_common():
        text = texts.get(reason)
        if text is not None and num_tokens >= least and text not in found.values():
            found[reason.value] = text
    if num_preemptions and not _BY_RESETS.issuperset(sums.recomputed):
        found[PREEMPTED] = _FEWER_PREEMPTIONS
    return found
