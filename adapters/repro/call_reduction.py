"""Leaves out of a recording of a wrapped connector the requests and hook calls that an incident does not need.

Each trial makes the connector anew and what is left of its calls again. What may be left out is decided by what vLLM
could have done: see `playable.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import attrs

from kvledger.adapters.repro.calls import HookCall, hook_calls
from kvledger.adapters.repro.driving import reenact
from kvledger.adapters.repro.playable import could_be_played
from kvledger.adapters.repro.recording import NotReenactable, Recording, ended_transfers
from kvledger.adapters.repro.reduction import Reduced, restrict
from kvledger.adapters.repro.reenactment import HOOK_FAILED, Reenactment
from kvledger.lifecycle import events as e

MAX_TRIED_OBSERVATIONS = 200_000
"""How many observations all trials together may take: about a minute."""
_NUMBER = re.compile(r"\d+")
_Item = TypeVar("_Item")


def reduce_calls(recording: Recording, *, rules: Collection[str], request_id: str, keep_all: bool = False) -> Reduced:
    """Reduce a recording of a wrapped connector: requests first, then hook calls, each by delta debugging.

    What is left must go wrong in the same words, break no other rule than the whole does, be answered as recorded, and
    be what vLLM could have done.

    Raises:
        NotReenactable: the connector cannot be made here, or answers from what is not made again.
    """
    whole = reenact(recording)
    wanted = _wrong(whole, rules, request_id)
    recurs = {rule for rule, _ in wanted} >= set(rules)
    if whole.other_answers and not recurs and not keep_all:
        raise NotReenactable(
            f"{whole.other_answers[0]}. {recording.wrapped_name} answers from what no recording has: files of its "
            "workers, another process, what an engine before has left. Record it from its first call, with nothing "
            "stored; --all writes the test nevertheless"
        )
    if keep_all or not recurs or not rules:
        return Reduced(recording, recurs=recurs, num_left_out=0)
    allowed = {trouble.rule for trouble in whole.troubles}
    is_played = could_be_played(recording)
    budget = MAX_TRIED_OBSERVATIONS

    def holds(candidate: Recording) -> bool:
        nonlocal budget
        if budget < len(candidate.observations) or (is_played and not could_be_played(candidate)):
            return False
        budget -= len(candidate.observations)
        found = reenact(candidate)
        return (
            {trouble.rule for trouble in found.troubles} <= allowed
            and _wrong(found, rules, request_id) >= wanted
            and not (found.other_answers or found.left_out)
        )

    lives = [event.ordinal for _, event in recording.observations if isinstance(event, e.RequestArrived)]
    kept = minimal(lives, lambda some: holds(restrict(recording, set(some))))
    best = restrict(recording, set(kept)) if len(kept) < len(lives) else recording
    calls, _ = hook_calls(best.observations)
    few = minimal(calls, lambda some: holds(_of_calls(best, some)))
    return Reduced(_of_calls(best, few), recurs=True, num_left_out=len(lives) - len(kept))


def minimal(items: Sequence[_Item], holds: Callable[[Sequence[_Item]], bool]) -> Sequence[_Item]:
    """A part of the items, in their order, for which something holds that holds for all; none of them can be spared.

    Zeller's ddmin without its first half: it is the complements of smaller and smaller parts that are tried.
    """
    kept, size = list(items), len(items) // 2
    while size:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if fewer and holds(fewer):
                kept = fewer
            else:
                start += size
        size //= 2
    return kept


def _of_calls(recording: Recording, calls: Sequence[HookCall]) -> Recording:
    observations = tuple(entry for call in calls for entry in call.observed)
    ended = {job for _, event in observations for job in ended_transfers(event)}
    copies = {job: of for job, of in recording.copies.items() if job in ended}
    return attrs.evolve(recording, observations=observations, copies=copies)


def _wrong(reenactment: Reenactment, rules: Collection[str], request_id: str) -> set[tuple[str, str]]:
    """What went wrong, in words without the names of copies and blocks."""
    return {
        (trouble.rule, _NUMBER.sub("", trouble.detail) if trouble.rule != HOOK_FAILED else trouble.detail)
        for trouble in reenactment.troubles
        if trouble.rule in rules and (not request_id or trouble.request_id in {"", request_id})
    }
