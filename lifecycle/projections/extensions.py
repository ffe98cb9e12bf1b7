"""Which extensions are active: each one, until an `ExtensionStopped` event records that its code raised.

Folds and methods of extensions run through this module, so an exception in them does not reach the caller. This module
must not know the ledger: it calls `on_raised`, and the ledger records `ExtensionStopped`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.errors import raise_if_unstoppable, without_secrets
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.ranges import Sequence


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The extensions that were stopped, according to the log."""

    stopped: dict[str, Sequence] = {}
    """Extension name → sequence number of the event that stopped it."""


class Extensions(Projection):
    """Runs the code of active extensions."""

    def __init__(self, versions: Mapping[str, int], forget: Callable[[str], None]) -> None:
        """`versions`: extension name → version. `forget(name)` resets the projections of that extension."""
        self._versions = versions
        self._forget = forget
        self.state = State()
        self.raised: list[tuple[str, str, str]] = []
        """(extension, where, error) for code that raised, until `stops` or a folded `ExtensionStopped` removes it."""
        self._silent: set[str] = set()
        """Names of the extensions whose code raised in this process."""
        self.on_raised: Callable[[], None] = lambda: None
        """Called when code raised outside a fold. The ledger then calls `stops`."""

    def takes_part(self, name: str) -> bool:
        """Whether the extension is active."""
        return name not in self._silent and name not in self.state.stopped

    def fold(
        self, name: str, where: str, fold: Callable[..., None], event: e.Event, sequence: int, _subject: Subject
    ) -> None:
        """Let a projection of the extension fold an event."""
        self._run(name, where, fold, event, sequence)

    def ask(self, name: str, where: str, method: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        """Call a method of the extension and return its result; None if the extension is stopped or raises."""
        answer = self._run(name, where, method, *arguments)
        if self.raised:
            self.on_raised()
        return answer

    def stops(self, cause: int) -> Iterator[e.ExtensionStopped]:
        """Yield an `ExtensionStopped` for each extension whose code raised."""
        while self.raised:
            name, where, error = self.raised.pop(0)
            yield e.ExtensionStopped(name, self._versions[name], where, error, cause)

    def _run(self, name: str, where: str, method: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        if not self.takes_part(name):
            return None
        try:
            return method(*arguments)
        except BaseException as error:  # noqa: BLE001 -- whatever somebody's code raises
            raise_if_unstoppable(error)
            if self.takes_part(name):  # it may have been stopped while the method ran
                self._silent.add(name)
                self.raised.append((name, where, without_secrets(error, of_extension=True)))
            return None

    @on(e.ExtensionStopped)
    def _stopped(self, event: e.ExtensionStopped, sequence: int, _subject: Subject) -> None:
        self.state.stopped.setdefault(event.extension, sequence)
        self.raised[:] = [raised for raised in self.raised if raised[0] != event.extension]
        self._forget(event.extension)
