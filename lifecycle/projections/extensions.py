"""Which extensions take part: all, until an event says that one was stopped because its code raised.

Whatever code of an extension is run is run here, so nothing that it raises reaches who runs it. It must not know who
keeps the log: it is notified, and records that.
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
    """What the log says."""

    stopped: dict[str, Sequence] = {}
    """Extension -> the event that stopped it."""


class Extensions(Projection):
    """Runs code of extensions that take part."""

    def __init__(self, versions: Mapping[str, int], forget: Callable[[str], None]) -> None:
        """Of these extensions; `forget` gives the projections of one their state before the first event."""
        self._versions = versions
        self._forget = forget
        self.state = State()
        self.raised: list[tuple[str, str, str]] = []
        """(extension, where, error) of those whose code raised, until `stops` is asked or an event says so."""
        self._silent: set[str] = set()
        """Those whose code has raised here."""
        self.on_raised: Callable[[], None] = lambda: None
        """Called when code raised that an event is not being folded by: whoever keeps the log asks for `stops`."""

    def takes_part(self, name: str) -> bool:
        """Whether the extension of that name is asked anything."""
        return name not in self._silent and name not in self.state.stopped

    def fold(
        self, name: str, where: str, fold: Callable[..., None], event: e.Event, sequence: int, _subject: Subject
    ) -> None:
        """Let a projection of the extension fold an event."""
        self._run(name, where, fold, event, sequence)

    def ask(self, name: str, where: str, method: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        """What a method of the extension says; None where it takes no part, or raises."""
        answer = self._run(name, where, method, *arguments)
        if self.raised:
            self.on_raised()
        return answer

    def stops(self, cause: int) -> Iterator[e.ExtensionStopped]:
        """The decisions that are due because code raised, each of them once."""
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
                self.raised.append((name, where, without_secrets(error)))
            return None

    @on(e.ExtensionStopped)
    def _stopped(self, event: e.ExtensionStopped, sequence: int, _subject: Subject) -> None:
        self.state.stopped.setdefault(event.extension, sequence)
        self.raised[:] = [raised for raised in self.raised if raised[0] != event.extension]
        self._forget(event.extension)
