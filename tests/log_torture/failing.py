"""A disk that refuses: from its n-th change on, for some changes, every call raises an `OSError`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from log_torture.kill_points import COUNTED


@attrs.define(eq=False)
class FailingDisk:
    """Counts calls of `os` that change files, and refuses those from `first` to `first + num_calls - 1`.

    A write that is refused takes half of its bytes before, as a disk does that is nearly full.
    """

    first: int = -1
    num_calls: int = 0
    error: int = errno.ENOSPC
    num_counted: int = 0
    num_refused: int = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for the functions of `os`."""
        for name in COUNTED:
            # What a sync is for shows only when power is lost: it is counted here, and takes no time.
            patch.setattr(os, name, self._counted(name, (lambda _: None) if "sync" in name else getattr(os, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                return function(*arguments, **options)
            number, self.num_counted = self.num_counted, self.num_counted + 1
            if not self.first <= number < self.first + self.num_calls:
                return function(*arguments, **options)
            self.num_refused += 1
            if name == "write" and number == self.first and len(arguments[1]) > 1:
                return function(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            raise OSError(self.error, os.strerror(self.error))

        return counted
