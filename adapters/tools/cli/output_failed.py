"""What a failed write to stdout or stderr raises. Apart from the streams, which must not import the core."""

from __future__ import annotations

from kvledger.lifecycle import Unstoppable


class OutputFailed(Unstoppable):
    """Nothing can be written to stdout or stderr any more; its cause is the `OSError`."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error

    @property
    def is_reader_gone(self) -> bool:
        """Whether it is a pipe whose reader went away, as `head` does."""
        return isinstance(self.error, BrokenPipeError)
