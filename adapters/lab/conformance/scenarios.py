"""Short deterministic scenarios. Each leads the connector into a situation in which connectors have failed.

The prompts `tokens(1, …)` and `tokens(2, …)` differ at every position. If a request loads the KV of another prompt, the
model therefore detects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvledger.adapters.lab.conformance.harness import Harness, Play

_BLOCK = 16


def tokens(number: int, count: int) -> list[int]:
    """Return a prompt of `count` tokens. Prompts with different numbers differ at every position."""
    return [(number * 131 + place * 7 + place * place % 11) % 512 for place in range(count)]


def _stored(harness: Harness, number: int = 1, num_tokens: int = 5 * _BLOCK) -> list[int]:
    """Compute a prompt and reset vLLM's cache, so that only the connector still has the KV. Return the prompt."""
    prompt = tokens(number, num_tokens)
    harness.add(f"first{number}", prompt, 3)
    harness.settle()
    harness.forget_locally()
    return prompt


def plain(harness: Harness) -> None:
    """One request: a prompt of 50 tokens, and 20 output tokens."""
    harness.add("a", tokens(1, 50), 20)


def hit(harness: Harness) -> None:
    """Three requests that begin with tokens of a stored prompt.

    The first request has the whole stored prompt, and more tokens. The second has the first 40 tokens of the stored
    prompt, then other tokens. The third has only the first block.
    """
    prompt = _stored(harness)
    harness.add("longer", [*prompt, *tokens(2, 21)], 20)
    harness.run()
    harness.add("branch", [*prompt[:40], *tokens(3, 30)], 5)
    harness.add("short", prompt[:_BLOCK], 5)


def whole_hit(harness: Harness) -> None:
    """A stored prompt comes again, then a prompt that consists of just its first four blocks.

    All tokens of both prompts are stored, because they fill whole blocks. Each request must still compute the last
    token of its prompt.
    """
    prompt = _stored(harness)
    harness.add("again", prompt, 5)
    harness.run()
    harness.forget_locally()
    harness.add("and again", prompt[: 4 * _BLOCK], 5)


def outputs_are_found(harness: Harness) -> None:
    """A conversation: the second prompt consists of the first prompt, its answer and a new question."""
    prompt = tokens(1, 40)
    harness.add("turn1", prompt, 30)
    harness.settle()
    answer = list(harness.engine.outputs["turn1"])
    harness.forget_locally()
    harness.add("turn2", [*prompt, *answer, *tokens(2, 10)], 10)


def shared_at_once(harness: Harness) -> None:
    """Two requests arrive together and begin with the same stored prompt."""
    prompt = _stored(harness)
    harness.add("b", [*prompt, *tokens(2, 20)], 8)
    harness.add("c", [*prompt, *tokens(3, 20)], 8)


def in_chunks(harness: Harness) -> None:
    """A prompt that takes several steps to compute, then a second prompt that extends the first."""
    prompt = _stored(harness, num_tokens=11 * _BLOCK + 3)
    harness.add("again", [*prompt, *tokens(2, 40)], 4)


def preempted(harness: Harness) -> None:
    """Four requests have more tokens than fit into the blocks, so the last request is preempted and resumes.

    Then another request extends the prompt of the preempted request.
    """
    for number in range(1, 5):
        harness.add(f"r{number}", tokens(number, 3 * _BLOCK + number), 60)
    harness.run()
    harness.forget_locally()
    harness.add("after", [*tokens(4, 3 * _BLOCK + 4), *tokens(9, 20)], 5)


def aborted_unscheduled(harness: Harness) -> None:
    """A request is aborted before it is scheduled. Another request with the same stored prompt is not aborted."""
    prompt = _stored(harness)
    harness.add("gone", prompt, 5)
    harness.abort("gone")
    harness.add("stays", prompt, 5)


def aborted_running(harness: Harness) -> None:
    """Of two requests with the same prompt, the first is aborted in its prefill, the second while it decodes.

    Then a third request with this prompt comes.
    """
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
    """A request is aborted in the step in which its load begins. The load goes on filling the request's blocks."""
    prompt = _stored(harness)
    harness.add("gone", [*prompt, *tokens(2, 10)], 5)
    harness.step()
    harness.abort("gone")
    harness.add("next", tokens(5, 60), 8)
    harness.add("same", [*prompt, *tokens(2, 10)], 5)


def session(harness: Harness) -> None:
    """Two turns of a session with another request between them, then a request with all tokens of the session."""
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
    """A request id is used again with other tokens: once after its request finished, once after an abort."""
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
    """Two resets while the engine is idle. Then the model has new weights, and the stored prompt comes again."""
    prompt = _stored(harness)
    harness.reset()
    harness.reset()
    harness.add("again", prompt, 6)
    harness.settle()
    harness.forget_locally()
    harness.add("and again", [*prompt, *tokens(2, 20)], 6)


def reset_at_once(harness: Harness) -> None:
    """A reset right after the last request has ended, when saves of this request may still be in flight."""
    prompt = tokens(1, 5 * _BLOCK)
    harness.add("a", prompt, 5)
    harness.run()
    harness.reset()
    harness.add("b", prompt, 5)
    harness.settle()
    harness.forget_locally()
    harness.add("c", prompt, 5)


def reset_running(harness: Harness) -> None:
    """Each reset of vLLM's and the connector's cache preempts all running requests.

    The first two resets come in a row. The third comes some steps later.
    """
    prompt = _stored(harness)
    harness.add("a", [*prompt, *tokens(2, 10)], 30)
    harness.add("b", tokens(3, 50), 30)
    harness.step(2)
    while harness.waits_for_load and harness.is_busy:  # vLLM refuses a reset during a load
        harness.step()
    harness.reset(running=True)
    harness.reset(running=True)
    harness.step(3)
    harness.reset(running=True)


def reset_twice(harness: Harness) -> None:
    """Two resets in a row that preempt the running requests. Saves may be in flight at the resets, but no load is."""
    harness.add("a", tokens(1, 90), 30)
    harness.add("b", tokens(3, 50), 30)
    harness.step(2)
    harness.reset(running=True)
    harness.reset(running=True)


def own_reset(harness: Harness) -> None:
    """A reset of vLLM's own cache preempts all running requests. The connector's cache is not reset."""
    prompt = _stored(harness)
    harness.add("a", [*prompt, *tokens(2, 10)], 30)
    harness.add("b", tokens(3, 50), 30)
    harness.step(6)
    while harness.waits_for_load and harness.is_busy:
        harness.step()
    harness.forget_locally_while_running()


def empty_steps(harness: Harness) -> None:
    """Steps that schedule nothing: before the first request, between two requests, and after the last."""
    harness.step(3)
    harness.add("a", tokens(1, 50), 5)
    harness.run()
    harness.step(10)
    harness.add("b", tokens(1, 50), 5)
    harness.run()
    harness.step(10)


def full_cache(harness: Harness) -> None:
    """Fifteen prompts, then the first and the last prompt again. The caches may have evicted KV of these prompts."""
    for number in range(1, 16):
        harness.add(f"r{number}", tokens(number, 6 * _BLOCK), 4)
        harness.step(4)
    harness.settle()
    harness.forget_locally()
    harness.add("first again", [*tokens(1, 6 * _BLOCK), *tokens(20, 10)], 5)
    harness.add("last again", [*tokens(15, 6 * _BLOCK), *tokens(20, 10)], 5)


def lost(harness: Harness) -> None:
    """The connector offers a stored prompt and loses the prompt's KV before the load. Then the prompt comes again."""
    prompt = _stored(harness)
    harness.lose()
    harness.add("again", prompt, 6)
    harness.settle()
    harness.forget_locally()
    harness.add("and again", [*prompt, *tokens(3, 20)], 6)


@attrs.frozen
class Scenario:
    """One scenario: what is done with an engine, and the engine's settings."""

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
"""Name, as in reports and for `--only` → scenario."""
