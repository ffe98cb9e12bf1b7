"""What every projection is: a small fold of the log."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.lifecycle.events import Event
from kvledger.lifecycle.marks import marked

Fold = Callable[..., None]


class Projection:
    """One fold of the log; to be derived from. Its methods marked `@on(...)` are called with an event and its sequence.

    Those of the core are also given the event's `Subject`. A projection that remembers anything has `state`: a struct
    of plain fields, and the only place where they are listed.
    """

    def index(self) -> None:
        """Make anew what follows from the state; called when the states of all projections are there."""

    def check(self) -> None:
        """Check what folds rely on and types do not say; called with a state that was read, before `index`.

        Raises:
            ValueError: no fold leads to such a state, and a later one might fail on it.
        """

    def folds(self) -> dict[type[Event], Fold]:
        """Event class → fold, called as `fold(event, sequence)`; of the core, as `fold(event, sequence, subject)`.

        Raises:
            TypeError: two methods fold the same events, which of them first would not be said.
        """
        folds = marked(self)
        if len(dict(folds)) < len(folds):
            message = f"{type(self).__qualname__} has two methods for the same events; let one call the other"
            raise TypeError(message)
        return dict(folds)
