"""Exception for a failed write to stdout or stderr.

`OutputFailed` derives from a class of the core, and `streams.py` must not import the core.
"""

from __future__ import annotations

from kvledger.lifecycle import Unstoppable


class OutputFailed(Unstoppable):
    """A write to stdout or stderr failed. `error` is the `OSError` of that write."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error

    @property
    def is_reader_gone(self) -> bool:
        """Whether the stream is a pipe, and the program that reads it has ended, for example `head`."""
        return isinstance(self.error, BrokenPipeError)
