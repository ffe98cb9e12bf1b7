"""Rules of extensions: held against a log like all others, but only as long as their code does not raise.

What somebody's checker raises costs its own verdict and nothing else; so does its extension being stopped. It must not
know what the rule is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from kvledger.lifecycle.audit.checker import AnyChecker, Violation, begin_in_the_middle, checks_of
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.errors import without_secrets
from kvledger.lifecycle.events import Event, ExtensionStopped

_Result = TypeVar("_Result")


class RuleOfExtension:
    """The checker of such a rule, around the extension's own."""

    def __init__(self, rule: str, extension: str, make: Callable[[], AnyChecker]) -> None:
        self.rule = rule
        self.not_judged = ""
        """Why the rest of the log, or all of it, could not be judged; empty: it was."""
        self._extension = extension
        self._moment: Moment | None = None
        self._checker = self._run(make)

    def checks(self, model: Model) -> Iterable[tuple[type[Event], Check]]:
        """Those of the extension's checker, each as long as nothing has raised."""
        self._moment = model.moment
        checker = self._checker
        found = [] if checker is None else self._run(lambda: list(checks_of(checker, model))) or []
        return [(ExtensionStopped, self._stopped), *((kind, self._guarded(check)) for kind, check in found)]

    def begin(self, start: Start) -> None:
        """Where the audit starts in the middle of a log."""
        checker = self._checker
        if self._extension in start.stopped_extensions:
            self.not_judged = f"its extension was stopped at event {start.stopped_extensions[self._extension]}"
        elif checker is not None:
            self._run(lambda: begin_in_the_middle([checker], start))

    def _guarded(self, check: Check) -> Check:
        def guarded(event: Any, moment: Moment) -> list[Violation] | None:  # noqa: ANN401 -- of any class
            return self._run(lambda: list(_violations(check(event, moment))))

        return guarded

    def _stopped(self, event: ExtensionStopped, moment: Moment) -> None:
        if event.extension == self._extension and not self.not_judged:
            self.not_judged = f"its extension was stopped at event {moment.sequence}"

    def _run(self, call: Callable[[], _Result]) -> _Result | None:
        if self.not_judged:
            return None
        try:
            return call()
        except Exception as error:  # noqa: BLE001 -- whatever somebody's checker raises
            at = f" at event {self._moment.sequence}" if self._moment is not None and self._moment.sequence else ""
            self.not_judged = f"its checker raised {without_secrets(error)}{at}"
            return None


def _violations(found: Any) -> Iterator[Violation]:  # noqa: ANN401 -- somebody's code
    for violation in found or ():
        if not isinstance(violation, Violation):
            message = f"a checker returned a {type(violation).__name__}, which is no Violation"
            raise TypeError(message)
        yield violation
