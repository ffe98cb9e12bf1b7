"""A small crowd of requests for an engine with 13 blocks, whatever it calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def serve_crowd(engine: Any, named: Callable[[str], str]) -> None:
    """Serve three requests that preempt each other, and a fourth one until it is aborted after twelve steps.

    Args:
        engine: with `add`, `step`, `abort` and `run`.
        named: gives the request ids for the names "0", "1", "2" and "aborted".
    """
    for number in range(3):
        engine.add(named(str(number)), range(100 * number, 100 * number + 40), 50)
    engine.add(named("aborted"), range(900, 940), 50)
    for _ in range(12):
        engine.step()
    engine.abort(named("aborted"))
    engine.run()
