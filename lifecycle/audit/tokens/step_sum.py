"""STEP_SUM: what a step schedules is what its requests are given, added up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.start import Start


class StepSum:
    """The tokens of a step are those of the requests that it tells of, and one for each that decodes as before.

    Verifies: this for every step, so that a request which a step leaves out or counts twice shows at once; and that no
    step is missing between two, by their numbers.
    Does not verify: which request it was; two mistakes in one step that cancel out; after a hook has failed, whose
    request may never have been observed, that nobody is missing.
    """

    rule: ClassVar[str] = "STEP_SUM"

    _model: Model

    def __init__(self) -> None:
        self._may_be_hidden = False

    def begin(self, start: Start) -> None:
        """What the log before the first event has told."""
        self._may_be_hidden = start.has_hook_failed

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._model = model
        return [(e.StepScheduled, self._step_scheduled), (e.HookFailed, self._hook_failed)]

    def _hook_failed(self, _event: e.HookFailed, _moment: Moment) -> None:
        self._may_be_hidden = True

    def _step_scheduled(self, event: e.StepScheduled, moment: Moment) -> list[Violation] | None:
        lives = self._model.lives
        if event.step != lives.num_steps - 1:
            return [violation(self.rule, moment, f"step {event.step} follows upon {lives.num_steps - 1} steps")]
        counted = lives.num_scheduled_tokens
        if event.num_scheduled_tokens == counted or (self._may_be_hidden and event.num_scheduled_tokens > counted):
            return None
        detail = f"the step has {event.num_scheduled_tokens} tokens, its requests add up to {counted}"
        return [violation(self.rule, moment, detail)]
