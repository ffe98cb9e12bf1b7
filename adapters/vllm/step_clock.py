"""Where a worker is in its step: the last copies it was given, the hook that vLLM called, what the worker did since."""

from __future__ import annotations

from kvledger.lifecycle import Hook, Moment


class StepClock:
    """Moments of one worker, in order, without the machine's clock: two ranks that do the same have equal moments."""

    def __init__(self) -> None:
        self._delivered = 0
        self._hook = Hook.HANDLE_PREEMPTIONS
        self._number = 0

    def enter(self, hook: Hook, delivered: int) -> None:
        """Record that vLLM calls a hook with the copies of the `EffectsDelivered` `delivered`; 0 if there are none.

        Steps do not go back: a copy with an earlier step's metadata begins in the present step.
        """
        self._hook = hook
        if delivered > self._delivered:
            self._delivered, self._number = delivered, 0

    def now(self) -> Moment:
        """Return the next moment."""
        self._number += 1
        return Moment(self._delivered, self._number, int(self._hook))
