"""What a preemption costs with kvledger, without a connector and with vLLM's OffloadingConnector, counted alike."""

from __future__ import annotations

import pytest

from sim.shares import measure

pytestmark = [pytest.mark.scheduler, pytest.mark.long]


def test_kvledger_computes_least_again_and_nothing_where_there_is_room() -> None:
    """The same worlds for all three; `make sim ARGS=--compare` prints the figures."""
    all_worlds, _, roomy = measure(range(30))
    ledger, nobody, offloading = all_worlds.meters.values()
    assert min(meter.num_preemptions for meter in all_worlds.meters.values()) > 50
    assert ledger.share_recomputed < offloading.share_recomputed < nobody.share_recomputed
    assert roomy.meters["KVLedgerConnector"].num_tokens_lost > 0
    assert roomy.meters["KVLedgerConnector"].num_tokens_recomputed == 0
