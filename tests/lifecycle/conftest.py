"""Golden files: what a released format looked like, compared on every run.

`KVLEDGER_REWRITE_GOLDEN=1` writes them anew from today's code. The change then shows in the diff, where
somebody has to agree with it. An environment variable, because an option of a folder's own conftest is unknown
when the whole test suite is started.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


class Golden:
    """The golden files of this folder."""

    rewrite = bool(os.environ.get("KVLEDGER_REWRITE_GOLDEN"))

    def check(self, name: str, text: str) -> None:
        """Compare with the file, or rewrite it."""
        path = GOLDEN / name
        if self.rewrite:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{name} is missing; KVLEDGER_REWRITE_GOLDEN=1 writes it"
        assert path.read_text().splitlines() == text.splitlines(), (
            f"{name} differs; if the change is meant, run with KVLEDGER_REWRITE_GOLDEN=1 and review the diff"
        )

    def add(self, name: str, text: str) -> None:
        """Write a file that must never change again, if it is not there yet."""
        path = GOLDEN / name
        if self.rewrite and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def read(self, name: str) -> str:
        """The text of a file."""
        path = GOLDEN / name
        assert path.exists(), f"{name} is missing; KVLEDGER_REWRITE_GOLDEN=1 writes it"
        return path.read_text()

    def names(self, folder: str, suffix: str) -> list[str]:
        """Names of the files in a folder, sorted."""
        return sorted(path.name for path in (GOLDEN / folder).glob(f"*{suffix}"))


@pytest.fixture(scope="session")
def golden() -> Golden:
    """The golden files of this folder."""
    return Golden()
