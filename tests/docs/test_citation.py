"""CITATION.cff is one: what its format demands is there, and says what the distribution says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

from kvledger import lifecycle

REQUIRED = {"cff-version", "message", "title", "authors"}
"""By the Citation File Format 1.2.0."""


def test_the_citation_has_what_its_format_demands(repository: Path) -> None:
    """And version, licence and keywords are those of the package."""
    citation = yaml.safe_load((repository / "CITATION.cff").read_text())
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert citation.keys() >= REQUIRED
    assert citation["cff-version"] == "1.2.0"
    assert all("name" in author or "family-names" in author for author in citation["authors"])
    assert (citation["title"], citation["license"]) == (project["name"], project["license"])
    assert citation["version"] == lifecycle.__version__
    assert set(citation["keywords"]) <= set(project["keywords"])
