"""`LOG` on the command line, and KVLEDGER_LOG, which stands for it. It must not know what a log is."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

DEFAULT_LOG: Final = "KVLEDGER_LOG"


class LogArgument(argparse.Action):
    """`LOG`, for which the environment's `KVLEDGER_LOG` stands where it is not given; the parser sees to that."""

    def __init__(
        self,
        *,
        type: Callable[[str], object],  # noqa: A002 -- as argparse calls it
        help: str,  # noqa: A002
        unless: str = "",
        **about: Any,  # noqa: ANN401
    ) -> None:
        """`unless`: the option beside which no LOG is needed."""
        super().__init__(**about, type=type, help=f"{help}; default: {DEFAULT_LOG}", nargs="?", metavar="LOG")
        self.unless = unless
        self._read = type

    def __call__(
        self, _: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, __: str | None = None
    ) -> None:
        """Store it."""
        setattr(namespace, self.dest, values)

    def settle(self, namespace: argparse.Namespace) -> bool:
        """Put KVLEDGER_LOG in the place of a LOG that was left out; returns whether there is one, or none is needed.

        REQUEST may also stand before LOG, and alone beside KVLEDGER_LOG: it is what is no path.
        """
        default = os.environ.get(DEFAULT_LOG, "")
        request = getattr(namespace, "request", "")
        if _may_be_request(namespace.log):
            if request and not _may_be_request(other := self._read(request)):
                namespace.request, namespace.log = str(namespace.log), other
            elif request is None and default:
                namespace.request, namespace.log = str(namespace.log), None
        is_needed = not getattr(namespace, self.unless, None)
        namespace.log_is_default = bool(namespace.log is None and default and is_needed)
        if namespace.log_is_default:
            namespace.log = self._read(default)
        return namespace.log is not None or not is_needed


def _may_be_request(given: object) -> bool:
    return isinstance(given, Path) and os.sep not in str(given) and not os.path.lexists(given)
