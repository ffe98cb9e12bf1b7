"""Who else is in a world's engine: kvledger beside another cache, and all whose worlds are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvledger.adapters.simulation.contenders import LEDGER, LEDGER_CONTENDER, Contender, NoConnector, Offloading


@attrs.frozen
class BesideNeighbour(Contender):
    """kvledger in a `MultiConnector`, with another cache before or behind it."""

    name: str = "KVLedgerConnector beside a neighbour"
    options: Mapping[str, Any] = {}
    """Of the neighbour, see `neighbour.py`."""
    is_first: bool = False
    """Whether the neighbour is asked first."""
    own_policy: Mapping[str, str] = {}
    """`kv_load_failure_policy` as our child sees it; vLLM's scheduler obeys the parent's."""

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """A parent with two children."""
        ours = {name: value for name, value in LEDGER.items() if name != "kv_load_failure_policy"}
        children = [
            {**ours, **self.own_policy, "kv_connector_extra_config": extra_config},
            {
                "kv_connector": "Neighbour",
                "kv_connector_module_path": "sim.neighbour",
                "kv_role": "kv_both",
                "kv_connector_extra_config": dict(self.options),
            },
        ]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": LEDGER["kv_load_failure_policy"],
            **kv_transfer,
            "kv_connector_extra_config": {"connectors": children[::-1] if self.is_first else children},
        }


CONTENDERS: tuple[Contender, ...] = (LEDGER_CONTENDER, NoConnector(), Offloading())
