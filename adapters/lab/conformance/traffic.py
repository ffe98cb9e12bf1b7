"""Random traffic. A seed decides the engine's settings, the arrivals and their prompts, the aborts and the resets."""

from __future__ import annotations

import random
from typing import Any

from kvledger.adapters.lab.conformance.harness import Harness

MAX_MODEL_LEN = 320
_NUM_STEPS = 120
_MAX_ALIVE = 10
_CACHED_SHARE, _OTHER_SHARE, _ARRIVAL_SHARE = 0.8, 0.4, 0.3


def settings(seed: int) -> dict[str, Any]:
    """Return the settings of a world's engine."""
    rng = random.Random(f"engine {seed}")
    return {
        "num_blocks": rng.choice((22, 26, 34, 60)),
        "max_num_batched_tokens": rng.choice((32, 64, 512)),
        "max_model_len": MAX_MODEL_LEN,
        "enable_prefix_caching": rng.random() < _CACHED_SHARE,
        "async_scheduling": rng.random() < _OTHER_SHARE,
        "model_runner_v2": rng.random() < _OTHER_SHARE,
    }


def traffic(harness: Harness, seed: int) -> None:
    """Play the traffic of a world."""
    rng = random.Random(f"clients {seed}")
    shares = [[rng.randrange(512) for _ in range(rng.randint(20, 120))] for _ in range(3)]
    abort_share, forget_share = rng.choice((0.0, 0.04)), rng.choice((0.0, 0.03))
    for number in range(_NUM_STEPS):
        alive = list(harness.engine.scheduler.requests)
        if rng.random() < _ARRIVAL_SHARE and len(alive) < _MAX_ALIVE:
            share = rng.choice(shares)
            own = [rng.randrange(512) for _ in range(rng.randint(1, 60))]
            harness.add(f"r{number}", [*share[: rng.randint(0, len(share))], *own], rng.randint(1, 60))
        if alive and rng.random() < abort_share:
            harness.abort(rng.choice(alive))
        if rng.random() < forget_share:
            harness.forget_locally()
        if harness.is_busy:
            harness.step()
    harness.run()
    harness.forget_locally()
    for number, share in enumerate(shares):
        harness.add(f"last{number}", [*share, rng.randrange(512)], 3)
