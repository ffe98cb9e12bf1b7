"""Short deterministic scenarios: each leads the connector into one situation that connectors have failed in.

Every prompt has tokens of its own, so that whatever is loaded for another one is wrong and seen to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvledger.adapters.lab.conformance.harness import Harness, Play

_BLOCK = 16


def tokens(who: int, count: int) -> list[int]:
    """A prompt that has nothing in common with that of another number."""
    return [(who * 131 + place * 7 + place * place % 11) % 512 for place in range(count)]


def _stored(harness: Harness, who: int = 1, num_tokens: int = 5 * _BLOCK) -> list[int]:
    """A prompt that was computed, and that now only the connector has."""
    prompt = tokens(who, num_tokens)
    harness.add(f"first{who}", prompt, 3)
    harness.settle()
    harness.forget_locally()
    return prompt


def plain(harness: Harness) -> None:
    """One prompt, some tokens."""
    harness.add("a", tokens(1, 50), 20)


def hit(harness: Harness) -> None:
    """A longer prompt that begins with a stored one, one that leaves its middle, and a short one."""
    prompt = _stored(harness)
    harness.add("longer", [*prompt, *tokens(2, 21)], 20)
    harness.run()
    harness.add("branch", [*prompt[:40], *tokens(3, 30)], 5)
    harness.add("short", prompt[:_BLOCK], 5)


def whole_hit(harness: Harness) -> None:
    """The very prompt again, which is whole blocks long: its last token is left to compute."""
    prompt = _stored(harness)
    harness.add("again", prompt, 5)
    harness.run()
    harness.forget_locally()
    harness.add("and again", prompt[: 4 * _BLOCK], 5)


def outputs_are_found(harness: Harness) -> None:
    """The next prompt is the first with its answer."""
    prompt = tokens(1, 40)
    harness.add("turn1", prompt, 30)
    harness.settle()
    answer = list(harness.engine.outputs["turn1"])
    harness.forget_locally()
    harness.add("turn2", [*prompt, *answer, *tokens(2, 10)], 10)


def shared_at_once(harness: Harness) -> None:
    """Two with the same stored beginning in one step."""
    prompt = _stored(harness)
    harness.add("b", [*prompt, *tokens(2, 20)], 8)
    harness.add("c", [*prompt, *tokens(3, 20)], 8)


def in_chunks(harness: Harness) -> None:
    """A prompt of many steps, twice."""
    prompt = _stored(harness, num_tokens=11 * _BLOCK + 3)
    harness.add("again", [*prompt, *tokens(2, 40)], 4)


def preempted(harness: Harness) -> None:
    """More tokens than the cache holds: the last request is preempted, waits, and is resumed."""
    for who in range(1, 5):
        harness.add(f"r{who}", tokens(who, 3 * _BLOCK + who), 60)
    harness.run()
    harness.forget_locally()
    harness.add("after", [*tokens(4, 3 * _BLOCK + 4), *tokens(9, 20)], 5)


def aborted_unscheduled(harness: Harness) -> None:
    """Before it is scheduled; another one with the same prompt stays."""
    prompt = _stored(harness)
    harness.add("gone", prompt, 5)
    harness.abort("gone")
    harness.add("stays", prompt, 5)


def aborted_running(harness: Harness) -> None:
    """While its prompt is computed, and while it decodes."""
    harness.add("early", tokens(1, 90), 20)
    harness.step()
    harness.abort("early")
    harness.add("late", tokens(1, 90), 20)
    harness.step(7)
    harness.abort("late")
    harness.settle()
    harness.forget_locally()
    harness.add("after", tokens(1, 90), 5)


def aborted_loading(harness: Harness) -> None:
    """In the step in which its load begins; its blocks are written until that ends."""
    prompt = _stored(harness)
    harness.add("gone", [*prompt, *tokens(2, 10)], 5)
    harness.step()
    harness.abort("gone")
    harness.add("next", tokens(5, 60), 8)
    harness.add("same", [*prompt, *tokens(2, 10)], 5)


def session(harness: Harness) -> None:
    """Two turns with another request between them, and then a request for all tokens of the session."""
    request = harness.add("session", tokens(1, 45), 13, resumable=True)
    harness.step(14)
    harness.add("other", tokens(2, 100), 20)
    harness.step()
    harness.add("session", tokens(3, 40), 10, resumable=True)
    harness.step(20)
    session_tokens = list(request.all_token_ids)
    harness.abort("session")
    harness.settle()
    harness.forget_locally()
    harness.add("after", [*session_tokens, *tokens(4, 5)], 5)


def id_again(harness: Harness) -> None:
    """An id is used again with other tokens, after its end and at once after an abort."""
    prompt = _stored(harness)
    harness.add("same", [*prompt, *tokens(2, 30)], 6)
    harness.run()
    harness.add("same", tokens(3, 70), 6)
    harness.step()
    harness.abort("same")
    harness.settle()
    harness.add("same", tokens(4, 90), 6)
    harness.settle()
    harness.forget_locally()
    harness.add("same", [*tokens(4, 90), *tokens(5, 9)], 6)


def reset_idle(harness: Harness) -> None:
    """Twice, with no request; then the model has other weights, and the prompts come again."""
    prompt = _stored(harness)
    harness.reset()
    harness.reset()
    harness.add("again", prompt, 6)
    harness.settle()
    harness.forget_locally()
    harness.add("and again", [*prompt, *tokens(2, 20)], 6)


def reset_at_once(harness: Harness) -> None:
    """As soon as the last request has ended: its saves may be under way."""
    prompt = tokens(1, 5 * _BLOCK)
    harness.add("a", prompt, 5)
    harness.run()
    harness.reset()
    harness.add("b", prompt, 5)
    harness.settle()
    harness.forget_locally()
    harness.add("c", prompt, 5)


def reset_running(harness: Harness) -> None:
    """All running requests are preempted, and both caches forget; twice at once, and again some steps later."""
    prompt = _stored(harness)
    harness.add("a", [*prompt, *tokens(2, 10)], 30)
    harness.add("b", tokens(3, 50), 30)
    harness.step(2)
    while harness.waits_for_load and harness.is_busy:  # vLLM refuses a reset then
        harness.step()
    harness.reset(running=True)
    harness.reset(running=True)
    harness.step(3)
    harness.reset(running=True)


def reset_twice(harness: Harness) -> None:
    """Twice in a row while saves are under way and nothing is loaded."""
    harness.add("a", tokens(1, 90), 30)
    harness.add("b", tokens(3, 50), 30)
    harness.step(2)
    harness.reset(running=True)
    harness.reset(running=True)


def own_reset(harness: Harness) -> None:
    """A reset of vLLM's own cache while requests run; the connector's is spared."""
    prompt = _stored(harness)
    harness.add("a", [*prompt, *tokens(2, 10)], 30)
    harness.add("b", tokens(3, 50), 30)
    harness.step(6)
    while harness.waits_for_load and harness.is_busy:
        harness.step()
    harness.forget_locally_while_running()


def empty_steps(harness: Harness) -> None:
    """Steps that schedule nothing, before the first request, between two and after the last."""
    harness.step(3)
    harness.add("a", tokens(1, 50), 5)
    harness.run()
    harness.step(10)
    harness.add("b", tokens(1, 50), 5)
    harness.run()
    harness.step(10)


def full_cache(harness: Harness) -> None:
    """Many prompts, one after the other, then the first again: part of it may be gone from every cache."""
    for who in range(1, 16):
        harness.add(f"r{who}", tokens(who, 6 * _BLOCK), 4)
        harness.step(4)
    harness.settle()
    harness.forget_locally()
    harness.add("first again", [*tokens(1, 6 * _BLOCK), *tokens(20, 10)], 5)
    harness.add("last again", [*tokens(15, 6 * _BLOCK), *tokens(20, 10)], 5)


def lost(harness: Harness) -> None:
    """What was offered is lost before it is loaded; then the prompt comes once more."""
    prompt = _stored(harness)
    harness.lose()
    harness.add("again", prompt, 6)
    harness.settle()
    harness.forget_locally()
    harness.add("and again", [*prompt, *tokens(3, 20)], 6)


@attrs.frozen
class Scenario:
    """What is done to an engine, and with which settings it is built."""

    play: Play
    settings: Mapping[str, Any] = {}


_SMALL = {"num_blocks": 17}
_SHORT_STEPS = {"max_num_batched_tokens": 48}
_ASYNC = {"async_scheduling": True}

SCENARIOS: Final[Mapping[str, Scenario]] = MappingProxyType(
    {
        "a plain prompt": Scenario(plain),
        "a prefix that is stored": Scenario(hit),
        "a prompt that is stored whole": Scenario(whole_hit),
        "a conversation": Scenario(outputs_are_found),
        "two with one prefix": Scenario(shared_at_once),
        "a prompt of many steps": Scenario(in_chunks, _SHORT_STEPS),
        "a prompt of many steps, asynchronously": Scenario(in_chunks, {**_SHORT_STEPS, **_ASYNC}),
        "preempted and resumed": Scenario(preempted, _SMALL),
        "preempted and resumed, asynchronously": Scenario(preempted, {**_SMALL, **_ASYNC}),
        "aborted before its first step": Scenario(aborted_unscheduled),
        "aborted while it runs": Scenario(aborted_running, _SHORT_STEPS),
        "aborted during a load": Scenario(aborted_loading),
        "next turn of a session": Scenario(session, {"num_blocks": 60}),
        "an id used again": Scenario(id_again),
        "reset while idle": Scenario(reset_idle),
        "reset at once": Scenario(reset_at_once),
        "reset while running": Scenario(reset_running),
        "reset twice in a row": Scenario(reset_twice),
        "reset that spares the connector": Scenario(own_reset),
        "empty steps": Scenario(empty_steps),
        "more prompts than the cache holds": Scenario(full_cache),
        "what is stored is lost": Scenario(lost),
    }
)
"""By the name that a report prints and `--only` takes."""
