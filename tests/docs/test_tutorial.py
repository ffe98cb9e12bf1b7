"""The tutorial ends in the example: each piece of code that it shows is a piece of that package."""

from __future__ import annotations

import re
from pathlib import Path

CODE = re.compile(r"^```(?:python|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_alone(text: str) -> str:
    """Its lines, wherever they stand: the formatter moves a method that is shown without its class."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_every_piece_of_code_of_the_tutorial_is_in_the_package(documents: dict[str, str], repository: Path) -> None:
    """Word for word, so that what is read is what the package's own tests run."""
    package = repository / "docs/examples/starvation_guard"
    files = [code_alone(path.read_text()) for kind in ("*.py", "*.toml") for path in package.rglob(kind)]
    pieces = CODE.findall(documents["docs/tutorial.md"])
    assert [piece for piece in pieces if not any(code_alone(piece) in text for text in files)] == []
    assert pieces
