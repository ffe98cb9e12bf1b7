"""Everybody gets what the model says after the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.world import World


def check_outputs(world: World) -> None:
    """The tokens of every request are those of its prompt, all of them unless its client went away or vLLM ended it.

    VLLM ends it only with `kv_load_failure_policy` "fail", and only if it held what a load has not filled.

    Verifies: number and value of the tokens of every life of every id, over a restart those of the new engine.
    Does not verify: when they came, and what a real model would have made of wrong KV that nobody read.
    """
    for life in world.lives:
        expected = life.truth.output(len(life.outputs))
        assert life.outputs == expected, f"{life.request_id} got other tokens than its prompt leads to"
        if not life.is_aborted and not life.is_failed:
            num_tokens = len(life.outputs)
            assert num_tokens == life.max_tokens, f"{life.request_id} got {num_tokens} of {life.max_tokens} tokens"
