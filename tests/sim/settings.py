"""What a seed decides before the first step. All drawing of settings stands here, each in one line."""

from __future__ import annotations

import random
from collections.abc import Collection

import attrs

from kvledger.adapters.lab.simulation.hashed_model import BLOCK_SIZE, block_bytes
from sim.connectors import WithNeighbour

MAX_MODEL_LEN = 160
"""Fits into the smallest pool: vLLM refuses at its start a model length that its KV cache cannot hold."""


@attrs.frozen
class Settings:
    """The engine and the habits of its clients."""

    num_blocks: int
    num_slots: int
    max_num_batched_tokens: int
    max_num_seqs: int
    enable_prefix_caching: bool
    async_scheduling: bool
    model_runner_v2: bool
    policy: str
    num_steps: int
    arrival_share: float
    salts: tuple[str | None, ...]
    connector: dict[str, object]
    """Keys of `kv_connector_extra_config`."""
    load_failure_policy: str = "recompute"
    loads_fail_anywhere: bool = False
    """Whether failing copies include every load that vLLM 0.32 survives; see `faults/copies.py`."""
    large_load_bytes: int | None = None
    """From where on loads run asynchronously with `load_mode` "auto"; None: as in production."""
    long_prefill_token_threshold: int = 0
    defer_finalize: bool = False
    """Whether workers report before they save, as vLLM's with a drafter: what they saved is known a step later."""
    late_reports: bool = False
    """Whether copies that a step needs are reported when their time has come, as where a device keeps the order."""
    one_output_share: float = 0.0
    """Of the requests, those of one output token, beyond what is drawn anyway."""
    neighbour: WithNeighbour | None = None
    """Another connector in a `MultiConnector` with ours."""
    windows: tuple[int, ...] = (0,)
    """One for each group of layers, in tokens; 0: the group sees everything. Of worlds in which kvledger is not."""
    ns_per_page: int = 1000
    """What a copy is said to have taken."""
    fragile_steps: bool = False
    """Whether clients go away while a step is computed, and resets come while a load is under way and fail."""

    @property
    def recomputes_too_late(self) -> bool:
        """Whether a load that fails reaches a client as a wrong token.

        With async scheduling, `recompute` and a `load_mode` that insists on "sync", vLLM 0.32 delivers a token that the
        second step in flight computed on top of what failed (`v1/core/sched/scheduler.py`, update_from_output, skips
        the first one's only), and the connector warns of that at its start.
        """
        insists = self.connector["load_mode"] == "sync"
        return insists and self.async_scheduling and self.load_failure_policy == "recompute"


DIMENSIONS = (
    "failing loads",
    "mixed loads",
    "long prefill",
    "one output",
    "report order",
    "neighbour",
    "fragile steps",
    "late reports",
)
"""What a world may be widened by, each drawn apart; see `widen`."""

_SWITCHES = {"report order": "defer_finalize", "fragile steps": "fragile_steps", "late reports": "late_reports"}


def widen(settings: Settings, rng: random.Random, dimensions: Collection[str]) -> Settings:
    """Draw what lies beyond `draw`. A dimension that is left out changes nothing about the others."""
    *names, last = DIMENSIONS
    chosen = {name for name in names if (rng.random() < 0.5) & (name in dimensions)}
    policy, child_policy = rng.choice(["recompute", "fail"]), rng.choice(["recompute", "fail", None])
    large_load_bytes = block_bytes(BLOCK_SIZE) * rng.choice([2, 3, 5])
    threshold, share = rng.choice([5, 16, 24]), rng.choice([0.3, 0.9])
    theirs = {"num_tokens": rng.choice([20, 48, 90, 1000]), "num_steps": rng.choice([0, 0, 1, 4]), "seed": rng.random()}
    failure_share, is_first = rng.choice([0.0, 0.3, 0.3, 1.0]), rng.random() < 0.5
    if (rng.random() < 0.5) & (last in dimensions):  # drawn behind all others: the worlds of a seed stay what they were
        chosen.add(last)
    changes: dict[str, object] = {_SWITCHES[name]: True for name in chosen if name in _SWITCHES}
    if "failing loads" in chosen:
        changes |= {"loads_fail_anywhere": True, "load_failure_policy": policy}
    if "mixed loads" in chosen:
        changes |= {"large_load_bytes": large_load_bytes, "connector": {**settings.connector, "load_mode": "auto"}}
    if "long prefill" in chosen:
        changes["long_prefill_token_threshold"] = threshold
    if "one output" in chosen:
        changes["one_output_share"] = share
    if "neighbour" in chosen:
        if "failing loads" in chosen:
            theirs["failure_share"] = failure_share
            if settings.async_scheduling and policy == "recompute":
                theirs["num_steps"] = theirs["num_steps"] or 1  # see `faults/copies.py`: no hole of kvledger's
        own_policy = {} if child_policy is None else {"kv_load_failure_policy": child_policy}
        changes["neighbour"] = WithNeighbour(options=theirs, is_first=is_first, own_policy=own_policy)
    return attrs.evolve(settings, **changes)


def draw(rng: random.Random) -> Settings:
    """Settings that keep a small pool under pressure."""
    num_slots = rng.choice([8, 20, 60, 400])
    return Settings(
        num_blocks=rng.randrange(12, 40),
        num_slots=num_slots,
        max_num_batched_tokens=rng.choice([32, 64, 256]),
        max_num_seqs=rng.choice([3, 6, 12]),
        enable_prefix_caching=rng.random() < 0.5,
        async_scheduling=rng.random() < 0.4,
        model_runner_v2=rng.random() < 0.5,
        policy=rng.choice(["fcfs", "fcfs", "priority"]),
        num_steps=rng.choice([60, 120, 200]),
        arrival_share=rng.choice([0.1, 0.2, 0.4]),
        salts=rng.choice([(None,), (None, "tenant")]),
        connector=draw_connector(rng, num_slots),
        ns_per_page=rng.choice([1000, 1000, 10**7, 10**9]),
    )


def draw_connector(rng: random.Random, num_slots: int) -> dict[str, object]:
    """The connector's own settings. A new one is one more line here."""
    sizes = {
        "host_bytes": block_bytes(BLOCK_SIZE) * num_slots,
        "chunk_size": rng.choice([8, 16, 32, 64]),
        "max_silent_steps": rng.choice([6, 20, 64]),
        "save_tails": rng.random() < 0.8,
        "keep_for_preempted": rng.random() < 0.8,
    }
    sizes["save_interval_tokens"] = sizes["chunk_size"] * (0, 0, 2, 4)[int(4 * rng.random())]
    rng.randrange(4)  # once a setting; so the others of each seed stay what they were
    return sizes | {
        "load_mode": rng.choice(["sync", "async", "auto"]),
        "save_mode": rng.choice(["sync", "async"]),
        "max_deferred_lookups": rng.choice([0, 8]),
        "max_silent_ms": rng.choice([0, 100]),
        "digests": rng.choice(["all", 0.5, "off"]),
        "offer": rng.choice(["auto", "auto", "always"]),
    }
