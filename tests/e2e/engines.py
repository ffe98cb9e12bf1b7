"""What real engines in this process are made to do, and their logs.

The first start imports vLLM (6 s); each later one takes 2 s. One engine lives at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from lifecycle_driver.concerned import check_reasons, figures_of

from kvledger.adapters.figures import Figures
from kvledger.adapters.lab.demo.workload import Workload
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.replay import SequencedEvent
from kvledger.storage.kv.cpu import CpuCopyEngine

AMPLE = Workload(num_blocks=128)
"""A pool in which nothing is ever preempted."""


def copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loads succeed from now on without filling a single block."""
    start_load = CpuCopyEngine.start_load
    monkeypatch.setattr(CpuCopyEngine, "start_load", lambda engine, _slots, _block_ids: start_load(engine, [], []))


def keep_two_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines started from now on schedule asynchronously.

    On CPU vLLM switches that off because it gains nothing there; it works nevertheless.
    """
    from vllm.platforms.cpu import CpuPlatform

    switch_off = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def leave_on(platform: Any, vllm_config: Any) -> None:
        switch_off(platform, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(leave_on))


@attrs.frozen
class ReadLog:
    """A log that was read and audited."""

    path: Path
    events: list[SequencedEvent]
    figures: Figures
    num_requests_left: int
    committed: frozenset[bytes]
    """Keys of the chunks that could be loaded at its end."""

    def of_type(self, event_class: type[Any]) -> list[Any]:
        """The events of one class, in order."""
        return [event for _, event in self.events if type(event) is event_class]

    def life_of(self, request_id: str, *event_classes: type[e.RequestEvent]) -> list[Any]:
        """The events of one request that are of these classes, in order."""
        wanted = event_classes or Core.standard().tables.request_events
        return [v for _, v in self.events if type(v) in wanted and getattr(v, "request_id", "") == request_id]

    def keys_of(self, request_id: str) -> set[bytes]:
        """Every chunk key that a request ever had."""
        return {key for observed in self.life_of(request_id, e.ChunkKeysObserved) for key in observed.keys}

    def steps_of(self, request_id: str) -> list[tuple[int, int]]:
        """(tokens computed before, tokens scheduled) in each step that was not plain decoding, in order."""
        (arrival,) = self.life_of(request_id, e.RequestArrived)
        return [
            (num_computed_tokens, num_scheduled_tokens)
            for step in self.of_type(e.StepScheduled)
            for ordinal, num_computed_tokens, num_scheduled_tokens, _ in step.advanced
            if ordinal == arrival.ordinal
        ]


def read_sound_log(path: Path | None, *, was_killed: bool = False) -> ReadLog:
    """The log at `path`, after every check: chain, rules, decisions, the reference machine, reasons, nothing left over.

    Where its writer `was_killed`, that may have been in the middle of a frame.
    """
    assert path is not None
    log = open_log(path)
    events = list(log.trusted_events())
    assert {damage.kind for damage in log.damage} <= ({"torn_tail"} if was_killed else set())
    assert events
    audit = Audit(Core.standard(), log.configuration)
    audit.run(events)
    assert audit.unfoldable is None
    assert audit.violations == []
    assert list(audit.divergences) == []
    assert list(audit.reference_differences) == []
    assert not [event for _, event in events if isinstance(event, e.InvariantViolated | e.HookFailed)]
    check_reasons(events, log.configuration)
    projections, figures = audit.projections, figures_of(events, log.configuration)
    committed = frozenset(projections.pool)
    return ReadLog(path, events, figures, len(projections.tracker), committed)


Reference = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""(prompts, max_tokens) -> greedy outputs of an engine without a connector in which nothing is preempted."""
