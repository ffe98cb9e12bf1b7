"""What a seed decides before the first step. All drawing of settings stands here, each in one line."""

from __future__ import annotations

import random

import attrs

from sim.engine import BLOCK_SIZE, block_bytes

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
    )


def draw_connector(rng: random.Random, num_slots: int) -> dict[str, object]:
    """The connector's own settings. A new one is one more line here."""
    return {
        "host_bytes": block_bytes(BLOCK_SIZE) * num_slots,
        "chunk_size": rng.choice([8, 16, 32, 64]),
        "max_silent_steps": rng.choice([6, 20, 64]),
        "save_tails": rng.random() < 0.8,
        "keep_for_preempted": rng.random() < 0.8,
        "chunk_statistics": rng.random() < 0.2,
        "max_hit_share": rng.choice([1.0, 1.0, 1.0, 0.5]),
        "load_mode": rng.choice(["sync", "async", "auto"]),
        "save_mode": rng.choice(["sync", "async"]),
        "max_deferred_lookups": rng.choice([0, 8]),
        "max_silent_ms": rng.choice([0, 100]),
    }
