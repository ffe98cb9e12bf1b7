"""Says which packages the distribution holds and how its README reads elsewhere; all else stands in pyproject.toml.

The folders `lifecycle/`, `storage/` and `adapters/` install as parts of the package `kvledger`, whose own file is
`adapters/public/__init__.py`. setuptools can find packages by itself only under the names their folders have, so this
file adds `kvledger` to each name: a new sub-package needs no entry anywhere.

README.md has links into the repository. On a package index they would lead nowhere: there they lead to the repository
that `[project.urls]` names, and as long as it names none they are plain words, and pictures are left out.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = ("lifecycle", "storage", "adapters")
PUBLIC = "adapters/public"
"""The folder that installs as `kvledger` itself, and not as `kvledger.adapters.public`."""
HERE = Path(__file__).parent
RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def read_elsewhere(text: str, repository: str | None) -> str:
    """The README with links that hold outside of the repository."""

    def turned(found: re.Match[str]) -> str:
        is_picture, words, path = found.groups()
        if repository is not None:
            return f"{is_picture}[{words}]({repository}/{'raw' if is_picture else 'blob'}/main/{path})"
        return "" if is_picture else words

    return RELATIVE_LINK.sub(turned, text)


urls = tomllib.loads((HERE / "pyproject.toml").read_text())["project"].get("urls", {})

setup(
    long_description=read_elsewhere((HERE / "README.md").read_text(), urls.get("Repository")),
    long_description_content_type="text/markdown",
    packages=[
        "kvledger",
        *(
            f"kvledger.{package}"
            for package in find_packages(
                include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")],
                exclude=[PUBLIC.replace("/", ".")],
            )
        ),
    ],
    package_dir={"kvledger": PUBLIC, **{f"kvledger.{folder}": folder for folder in FOLDERS}},
)
