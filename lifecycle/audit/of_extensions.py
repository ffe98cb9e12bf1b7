"""Rules of extensions: checked like all other rules until code of their extension raises.

If the checker of such a rule raises, the rule is not judged any more. If an extension is stopped, none of its rules is
judged any more. All other rules are checked as usual. This module must not depend on any particular rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.audit.violations import Violations
from kvledger.lifecycle.errors import raise_if_unstoppable, without_secrets
from kvledger.lifecycle.events import (
    Event,
    ExtensionDecided,
    ExtensionEvent,
    ExtensionNoted,
    ExtensionObserved,
    ExtensionStopped,
)
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.moment import Visit, Visits

_OF_EXTENSIONS = (ExtensionObserved, ExtensionDecided, ExtensionNoted)
_Result = TypeVar("_Result")


class RuleOfExtension(Checker):
    """Wraps an extension's own checker."""

    rule = ""  # each object has its own

    def __init__(
        self,
        rule: str,
        extension: str,
        payload_of: Callable[[ExtensionEvent], msgspec.Struct | None],
        make: Callable[[AuditModel], Checker],
        model: AuditModel,
    ) -> None:
        super().__init__(model)
        self.rule = rule  # type: ignore[misc]
        self.not_judged = ""
        """Why the rule was not judged, or not up to the end of the log; empty if it was judged on the whole log."""
        self._extension = extension
        self._payload_of = payload_of
        self._found = Violations()
        self._checker = self._run(lambda: make(model.reporting_to(self._found)))

    def visits(self) -> Visits:
        """Return pairs (event class, method of the extension's checker). After a method has raised, no method runs."""
        checks = self._run(self._checks_of_events) or ()
        return [*super().visits(), *((event_class, self._guarded(check)) for event_class, check in checks)]

    def _checks_of_events(self) -> Visits:
        checks = [] if self._checker is None else list(self._checker.visits())
        of_events = [(kind, partial(_call, check)) for kind, check in checks if issubclass(kind, Event)]
        of_payloads = [(kind, check) for kind, check in checks if not issubclass(kind, Event)]
        look = partial(self._look_at_payload, of_payloads)
        return of_events + [(kind, look) for kind in _OF_EXTENSIONS if of_payloads]

    def _look_at_payload(self, checks: Sequence[tuple[type[msgspec.Struct], Visit]], event: ExtensionEvent) -> None:
        payload = self._payload_of(event)
        for kind, check in checks:
            if type(payload) is kind:
                _call(check, payload)

    def begin(self) -> None:
        """Begin in the middle of a log. If the extension was stopped before that point, the rule is not judged."""
        checker = self._checker
        if self._extension in self.lives.stopped_extensions:
            self.not_judged = f"its extension was stopped at event {self.lives.stopped_extensions[self._extension]}"
        elif checker is not None:
            self._run(checker.begin)

    def _guarded(self, check: Visit) -> Visit:
        def guarded(event: Any) -> None:  # noqa: ANN401 -- of any class
            self._run(lambda: check(event))
            if not self.not_judged:
                for violation in self._found.first:
                    self.model.violations.add(violation)
            self._found.first.clear()

        return guarded

    @on(ExtensionStopped)
    def _stopped(self, event: ExtensionStopped) -> None:
        if event.extension == self._extension and not self.not_judged:
            self.not_judged = f"its extension was stopped at event {self.moment.sequence}"

    def _run(self, call: Callable[[], _Result]) -> _Result | None:
        if self.not_judged:
            return None
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 -- whatever somebody's checker raises
            raise_if_unstoppable(error)
            at = f" at event {self.moment.sequence}" if self.moment.sequence else ""
            self.not_judged = f"its checker raised {without_secrets(error)}{at}"
            return None


def _call(check: Callable[[Any], object], event: msgspec.Struct) -> None:
    if check(event) is not None:  # a generator, whose body would not run, or a finding
        message = "a check must return None; call self.broken(...) to report what is wrong"
        raise TypeError(message)
