"""Short deterministic stories: each leads the connector into one situation that connectors have failed in.

Every prompt has tokens of its own, so that whatever is loaded for another one is wrong and seen to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvledger.adapters.conformance.stage import Stage, Story

_BLOCK = 16


def tokens(who: int, count: int) -> list[int]:
    """A prompt that has nothing in common with that of another number."""
    return [(who * 131 + place * 7 + place * place % 11) % 512 for place in range(count)]


def _stored(stage: Stage, who: int = 1, num_tokens: int = 5 * _BLOCK) -> list[int]:
    """A prompt that was computed, and is in the connector's hands alone."""
    prompt = tokens(who, num_tokens)
    stage.add(f"first{who}", prompt, 3)
    stage.settle()
    stage.forget_locally()
    return prompt


def plain(stage: Stage) -> None:
    """One prompt, some tokens."""
    stage.add("a", tokens(1, 50), 20)


def hit(stage: Stage) -> None:
    """A longer prompt that begins with a stored one, one that leaves its middle, and a short one."""
    prompt = _stored(stage)
    stage.add("longer", [*prompt, *tokens(2, 21)], 20)
    stage.run()
    stage.add("branch", [*prompt[:40], *tokens(3, 30)], 5)
    stage.add("short", prompt[:_BLOCK], 5)


def whole_hit(stage: Stage) -> None:
    """The very prompt again, which is whole blocks long: its last token is left to compute."""
    prompt = _stored(stage)
    stage.add("again", prompt, 5)
    stage.run()
    stage.forget_locally()
    stage.add("and again", prompt[: 4 * _BLOCK], 5)


def outputs_are_found(stage: Stage) -> None:
    """A conversation: the next prompt is the first with its answer."""
    prompt = tokens(1, 40)
    stage.add("turn1", prompt, 30)
    stage.settle()
    answer = list(stage.engine.outputs["turn1"])
    stage.forget_locally()
    stage.add("turn2", [*prompt, *answer, *tokens(2, 10)], 10)


def shared_at_once(stage: Stage) -> None:
    """Two with the same stored beginning in one step."""
    prompt = _stored(stage)
    stage.add("b", [*prompt, *tokens(2, 20)], 8)
    stage.add("c", [*prompt, *tokens(3, 20)], 8)


def in_chunks(stage: Stage) -> None:
    """A prompt of many steps, twice."""
    prompt = _stored(stage, num_tokens=11 * _BLOCK + 3)
    stage.add("again", [*prompt, *tokens(2, 40)], 4)


def preempted(stage: Stage) -> None:
    """More decode than there is room for: the last is preempted, waits, and is resumed."""
    for who in range(1, 5):
        stage.add(f"r{who}", tokens(who, 3 * _BLOCK + who), 60)
    stage.run()
    stage.forget_locally()
    stage.add("after", [*tokens(4, 3 * _BLOCK + 4), *tokens(9, 20)], 5)


def aborted_unscheduled(stage: Stage) -> None:
    """It goes before anybody looked at it; another one with the same prompt stays."""
    prompt = _stored(stage)
    stage.add("gone", prompt, 5)
    stage.abort("gone")
    stage.add("stays", prompt, 5)


def aborted_running(stage: Stage) -> None:
    """While its prompt is computed, and while it decodes."""
    stage.add("early", tokens(1, 90), 20)
    stage.step()
    stage.abort("early")
    stage.add("late", tokens(1, 90), 20)
    stage.step(7)
    stage.abort("late")
    stage.settle()
    stage.forget_locally()
    stage.add("after", tokens(1, 90), 5)


def aborted_loading(stage: Stage) -> None:
    """In the step in which its load begins; its blocks are written until that is over."""
    prompt = _stored(stage)
    stage.add("gone", [*prompt, *tokens(2, 10)], 5)
    stage.step()
    stage.abort("gone")
    stage.add("next", tokens(5, 60), 8)
    stage.add("same", [*prompt, *tokens(2, 10)], 5)


def session(stage: Stage) -> None:
    """Two turns with somebody else between them, and then a request for all that the session said."""
    request = stage.add("session", tokens(1, 45), 13, resumable=True)
    stage.step(14)
    stage.add("other", tokens(2, 100), 20)
    stage.step()
    stage.add("session", tokens(3, 40), 10, resumable=True)
    stage.step(20)
    said = list(request.all_token_ids)
    stage.abort("session")
    stage.settle()
    stage.forget_locally()
    stage.add("after", [*said, *tokens(4, 5)], 5)


def id_again(stage: Stage) -> None:
    """An id comes again with other tokens, after its end and at once after an abort."""
    prompt = _stored(stage)
    stage.add("same", [*prompt, *tokens(2, 30)], 6)
    stage.run()
    stage.add("same", tokens(3, 70), 6)
    stage.step()
    stage.abort("same")
    stage.settle()
    stage.add("same", tokens(4, 90), 6)
    stage.settle()
    stage.forget_locally()
    stage.add("same", [*tokens(4, 90), *tokens(5, 9)], 6)


def reset_idle(stage: Stage) -> None:
    """Twice, while nobody is there; then the model has other weights, and the prompts come again."""
    prompt = _stored(stage)
    stage.reset()
    stage.reset()
    stage.add("again", prompt, 6)
    stage.settle()
    stage.forget_locally()
    stage.add("and again", [*prompt, *tokens(2, 20)], 6)


def reset_at_once(stage: Stage) -> None:
    """As soon as the last one has ended: its saves may be on their way."""
    prompt = tokens(1, 5 * _BLOCK)
    stage.add("a", prompt, 5)
    stage.run()
    stage.reset()
    stage.add("b", prompt, 5)
    stage.settle()
    stage.forget_locally()
    stage.add("c", prompt, 5)


def reset_running(stage: Stage) -> None:
    """Everybody who runs is preempted, and both caches forget; twice at once, and again some steps later."""
    prompt = _stored(stage)
    stage.add("a", [*prompt, *tokens(2, 10)], 30)
    stage.add("b", tokens(3, 50), 30)
    stage.step(2)
    while stage.waits_for_load and stage.is_busy:  # vLLM refuses a reset then
        stage.step()
    stage.reset(running=True)
    stage.reset(running=True)
    stage.step(3)
    stage.reset(running=True)


def reset_twice(stage: Stage) -> None:
    """Twice in a row while saves are under way, with nobody who loads."""
    stage.add("a", tokens(1, 90), 30)
    stage.add("b", tokens(3, 50), 30)
    stage.step(2)
    stage.reset(running=True)
    stage.reset(running=True)


def own_reset(stage: Stage) -> None:
    """VLLM's cache forgets while requests run, the connector's is spared."""
    prompt = _stored(stage)
    stage.add("a", [*prompt, *tokens(2, 10)], 30)
    stage.add("b", tokens(3, 50), 30)
    stage.step(6)
    while stage.waits_for_load and stage.is_busy:
        stage.step()
    stage.forget_locally_while_running()


def empty_steps(stage: Stage) -> None:
    """Steps that schedule nobody, before the first request, between two and after the last."""
    stage.step(3)
    stage.add("a", tokens(1, 50), 5)
    stage.run()
    stage.step(10)
    stage.add("b", tokens(1, 50), 5)
    stage.run()
    stage.step(10)


def full_cache(stage: Stage) -> None:
    """Many prompts, one after the other, then the first again: part of it may be gone from every cache."""
    for who in range(1, 16):
        stage.add(f"r{who}", tokens(who, 6 * _BLOCK), 4)
        stage.step(4)
    stage.settle()
    stage.forget_locally()
    stage.add("first again", [*tokens(1, 6 * _BLOCK), *tokens(20, 10)], 5)
    stage.add("last again", [*tokens(15, 6 * _BLOCK), *tokens(20, 10)], 5)


def lost(stage: Stage) -> None:
    """What was offered is lost before it is loaded; then the prompt comes once more."""
    prompt = _stored(stage)
    stage.lose()
    stage.add("again", prompt, 6)
    stage.settle()
    stage.forget_locally()
    stage.add("and again", [*prompt, *tokens(3, 20)], 6)


@attrs.frozen
class Play:
    """A story, and the engine that it wants."""

    story: Story
    settings: Mapping[str, Any] = {}


_SMALL = {"num_blocks": 17}
_SHORT_STEPS = {"max_num_batched_tokens": 48}
_ASYNC = {"async_scheduling": True}

STORIES: Final[Mapping[str, Play]] = MappingProxyType(
    {
        "a plain prompt": Play(plain),
        "a prefix that is stored": Play(hit),
        "a prompt that is stored whole": Play(whole_hit),
        "an answer that is asked on": Play(outputs_are_found),
        "two with one prefix": Play(shared_at_once),
        "a prompt of many steps": Play(in_chunks, _SHORT_STEPS),
        "a prompt of many steps, asynchronously": Play(in_chunks, {**_SHORT_STEPS, **_ASYNC}),
        "preempted and resumed": Play(preempted, _SMALL),
        "preempted and resumed, asynchronously": Play(preempted, {**_SMALL, **_ASYNC}),
        "aborted before its first step": Play(aborted_unscheduled),
        "aborted while it runs": Play(aborted_running, _SHORT_STEPS),
        "aborted during a load": Play(aborted_loading),
        "next turn of a session": Play(session, {"num_blocks": 60}),
        "an id used again": Play(id_again),
        "reset while idle": Play(reset_idle),
        "reset at once": Play(reset_at_once),
        "reset while running": Play(reset_running),
        "reset twice in a row": Play(reset_twice),
        "reset that spares the connector": Play(own_reset),
        "empty steps": Play(empty_steps),
        "more prompts than room": Play(full_cache),
        "what is stored is lost": Play(lost),
    }
)
"""By name, as a report tells it and `--only` takes it."""
