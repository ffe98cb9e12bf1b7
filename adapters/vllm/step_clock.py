"""Numbers the moments of one worker within a step. A moment also names the step's copies and the latest hook call."""

from __future__ import annotations

from kvledger.lifecycle import Hook, Moment


class StepClock:
    """Numbers the moments at which one worker begins and ends copies, without the machine's clock.

    Two ranks that begin and end the same copies in the same hook calls have equal moments.
    """

    def __init__(self) -> None:
        self._delivered = 0
        self._hook = Hook.HANDLE_PREEMPTIONS
        self._number = 0

    def enter(self, hook: Hook, delivered: int) -> None:
        """Record that vLLM calls a hook.

        `delivered` is the sequence number of the `EffectsDelivered` that records the copies of the hook's step; 0 if
        there is no such event. If `delivered` is from an earlier step, the clock stays in the present step.
        """
        self._hook = hook
        if delivered > self._delivered:
            self._delivered, self._number = delivered, 0

    def now(self) -> Moment:
        """Return the next moment."""
        self._number += 1
        return Moment(self._delivered, self._number, int(self._hook))
