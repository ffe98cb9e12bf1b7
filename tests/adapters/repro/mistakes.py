"""Mistakes that are switched on here and in the process of a generated test; also a pytest plugin, which runs each test
there twice, with the mistake and without.

Some are those of the simulation, made in what the core decides; others are made in the adapter and raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.test_mutants import MUTANTS

from kvledger.adapters.vllm.noticing import Noticing
from kvledger.adapters.vllm.step_reader import StepReader
from kvledger.lifecycle import Ledger
from kvledger.lifecycle import events as e

Patch = tuple[Any, str, Callable[..., Any]]


def _raising(owner: Any, name: str, when: Callable[..., bool]) -> Patch:
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if when(*arguments, **options):
            message = "a mistake that is made on purpose"
            raise ZeroDivisionError(message)
        return original(*arguments, **options)

    return owner, name, call


OF_THE_CORE: dict[str, tuple[Patch, int]] = {
    attribute: ((owner, attribute, mutant), first_seed)
    for owner, attribute, mutant, _ in MUTANTS.values()
    for wanted, first_seed in (("save_on_finish", 0), ("_answered", 0), ("_reset", 4), ("settle", 30))
    if attribute == wanted
}
"""Name -> what is replaced by what, and the first world that is tried."""

IN_THE_ADAPTER: dict[str, Patch] = {
    "keys_of_preempted": _raising(Noticing, "keys", lambda _, request: request.num_preemptions > 0),
    "step_of_resumed": _raising(
        StepReader,
        "_advance",
        lambda self, _, request_id, num_computed_tokens, *__: (
            self._requests[request_id].num_preemptions > 0 and num_computed_tokens > 0
        ),
    ),
    "end_of_long": _raising(Noticing, "num_written_tokens", lambda *arguments: arguments[-1] > 80),
    "odd_arrival": _raising(
        Ledger, "observe", lambda _, event: isinstance(event, e.RequestArrived) and event.num_prompt_tokens == 33
    ),
}
"""Name -> a function of the adapter that raises for some requests, and when."""

ALL: dict[str, Patch] = {**{name: patch for name, (patch, _) in OF_THE_CORE.items()}, **IN_THE_ADAPTER}


@pytest.fixture(autouse=True, params=["mistaken", "mended"])
def mistake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the mistake that the generated file is named after, or do not."""
    if request.param == "mistaken":
        monkeypatch.setattr(*ALL[request.path.stem.removeprefix("test_")])
