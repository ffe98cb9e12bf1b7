"""STEP_SUM: what a step schedules is what its requests are given, added up."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.audit.model.start import Start


class StepSum(Checker):
    """The tokens of a step are those of the requests that it tells of, and one for each that decodes as before.

    Verifies: this for every step, so that a request which a step leaves out or counts twice shows at once; and that no
    step is missing between two, by their numbers.
    Does not verify: which request it was; two mistakes in one step that cancel out; after a hook has failed, whose
    request may never have been observed, that nobody is missing.
    """

    rule = "STEP_SUM"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._may_be_hidden = False

    def begin(self, start: Start) -> None:
        """What the log before the first event has."""
        self._may_be_hidden = start.has_hook_failed

    @on(e.HookFailed)
    def _hook_failed(self, _event: e.HookFailed) -> None:
        self._may_be_hidden = True

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        num_tokens, counted, num_before = (
            event.num_scheduled_tokens,
            self.lives.num_scheduled_tokens,
            self.lives.num_steps - 1,
        )
        if event.step != num_before:
            self.broken(f"step {event.step} follows upon {num_before} steps")
        elif num_tokens != counted and not (self._may_be_hidden and num_tokens > counted):
            self.broken(f"the step has {num_tokens} tokens, its requests add up to {counted}")
