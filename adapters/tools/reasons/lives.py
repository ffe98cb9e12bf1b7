"""The lives that the accounts follow, by request id and by ordinal."""

from __future__ import annotations

from collections.abc import Iterator

from kvledger.adapters.tools.reasons.life import UNBORN, Life
from kvledger.adapters.tools.reasons.request_history import RequestHistory
from kvledger.adapters.tools.reasons.sums import Sums


class Lives:
    """Of every request its current life; the accounts of `only` one of them are kept, or of all.

    Others are followed for the sake of the chunks that they save.
    """

    def __init__(self, lives: dict[str, Life], only: str | None = None, *, keeps_histories: bool = False) -> None:
        self._lives = lives
        self._only = only
        self._keeps_histories = keeps_histories
        self._by_ordinal: dict[int, Life] = {}
        for life in self:
            if life.ordinal != UNBORN and self.is_kept(life.request_id):
                self._by_ordinal[life.ordinal] = life
            if life.history is not None and life.admission is not None:
                life.history.admissions[-1] = life.admission  # one object, which goes on

    def __iter__(self) -> Iterator[Life]:
        return iter(self._lives.values())

    def is_kept(self, request_id: str) -> bool:
        """Whether the accounts of this request are kept."""
        return self._only is None or request_id == self._only

    def get(self, request_id: str) -> Life | None:
        """The life, if it is known."""
        return self._lives.get(request_id)

    def by_ordinal(self, ordinal: int) -> Life | None:
        """The life whose accounts are kept, if it was seen to begin."""
        return self._by_ordinal.get(ordinal)

    def any(self, request_id: str) -> Life:
        """The life of any request; it begins here where its arrival is not in the log."""
        life = self._lives.get(request_id)
        if life is None:
            life = self._new(request_id)
        return life

    def kept(self, request_id: str) -> Life | None:
        """The same, if its accounts are kept."""
        return self.any(request_id) if self.is_kept(request_id) else None

    def begin(self, request_id: str, ordinal: int) -> Life:
        """A new life; the one before must have ended."""
        life = self._new(request_id)
        life.ordinal = ordinal
        if self.is_kept(request_id):
            self._by_ordinal[ordinal] = life
        return life

    def end(self, request_id: str) -> Life | None:
        """Forget a life; returns it."""
        life = self._lives.pop(request_id, None)
        if life is not None and life.ordinal != UNBORN and self._by_ordinal.get(life.ordinal) is life:
            del self._by_ordinal[life.ordinal]
        return life

    def _new(self, request_id: str) -> Life:
        life = self._lives[request_id] = Life(request_id)
        if self._keeps_histories and self.is_kept(request_id):
            life.history = RequestHistory(request_id, UNBORN, Sums())
        return life
