"""The docs site is built without a warning, has every page, and asks no other host for anything."""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from processes import finished

ASKED_FOR = re.compile(r"""<(?:script|img|iframe|link|source)\b[^>]*?\s(?:src|href)=["']?(?:https?:)?//[^\s"'>]+""")
CANONICAL = re.compile(r"<link\b[^>]*\brel=[\"']?canonical")
EXTERNAL_STYLE = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs-site` builds it: strictly, so that a warning or a dead link or anchor ends it."""
    directory = tmp_path_factory.mktemp("site")
    build = finished(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", directory],
        cwd=repository,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert build.returncode == 0, build.stderr
    assert "WARNING" not in build.stderr
    return directory


@pytest.mark.xdist_group("docs site")
def test_every_document_is_a_page(site: Path, documents: dict[str, str]) -> None:
    """Also those that lie outside of docs/, and each decision."""
    outside = {"README": "about", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog", "SECURITY": "security"}
    names = {name.removesuffix(".md") for name in documents}
    expected = {outside.get(name, name.removeprefix("docs/")) for name in names}
    pages = {str(page.relative_to(site).with_suffix("")) for page in site.rglob("*.html")}
    assert expected - pages == set()


@pytest.mark.xdist_group("docs site")
def test_a_page_asks_no_other_host(site: Path) -> None:
    """No script, font, style or picture is fetched: the site is read from a disk, or behind a firewall."""
    asked = [
        f"{page.name}: {found}"
        for page in site.rglob("*.html")
        for found in ASKED_FOR.findall(page.read_text())
        if not CANONICAL.match(found)
    ]
    assert asked == []
    assert [style.name for style in site.rglob("*.css") if EXTERNAL_STYLE.search(style.read_text())] == []


@pytest.mark.xdist_group("docs site")
def test_a_linked_source_file_is_on_the_site(site: Path, repository: Path) -> None:
    """As text, so that a browser shows it."""
    path = "lifecycle/extension.py"
    assert (site / "source" / f"{path}.txt").read_text() == (repository / path).read_text()
    assert f'href="source/{path}.txt"' in (site / "extending.html").read_text()


@pytest.mark.xdist_group("docs site")
def test_the_reference_has_what_is_promised(site: Path) -> None:
    """Each name of `kvledger` and of `kvledger.lifecycle`, with its anchor; a type alias and the version have none."""
    import kvledger

    page = (site / "reference.html").read_text()
    names = {f"kvledger.{name}" for name in kvledger.__all__}
    names |= {f"kvledger.lifecycle.{name}" for name in kvledger.lifecycle.__all__}
    missing = {name for name in names if f'id="{name}"' not in page}
    assert missing <= {"kvledger.__version__", "kvledger.lifecycle.SequencedEvent", "kvledger.lifecycle.__version__"}


@pytest.mark.xdist_group("docs site")
def test_every_diagram_is_drawn(site: Path, documents: dict[str, str]) -> None:
    """A block of Mermaid that stayed text would need a script."""
    pages = [page.read_text() for page in site.rglob("*.html")]
    num_blocks = sum(text.count("\n```mermaid\n") for text in documents.values())
    assert sum(page.count('<div class="diagram"><svg') for page in pages) == num_blocks
    assert not [page for page in pages if "stateDiagram-v2" in page]


def test_a_diagram_has_an_arrow_from_each_state_that_is_left(load_script: Callable[[str], types.ModuleType]) -> None:
    """Read from the picture: a dot in the columns of the sources, the arrow's end in the column of the destination."""
    moves = ("new --> lost: taken", "kept --> lost: taken", "lost --> kept: given, found", "new --> kept: given, found")
    source = "\n".join(("stateDiagram-v2", "[*] --> new", *moves, "kept --> [*]"))
    drawn = load_script("docs/state_diagrams.py").svg_of(source, "mermaid", "diagram", {}, None)
    svg = ET.fromstring(drawn)[0]  # noqa: S314 -- made right here
    heads = {float(head.attrib["x"]): head.text for head in svg.iter("text") if head.attrib["class"] == "middle"}

    def column(x: str) -> str | None:
        return heads[min(heads, key=lambda head: abs(head - float(x)))]

    arrows = [line.attrib for line in svg.iter("line") if line.attrib["class"] == "move"]
    dots = [(dot.attrib["cy"], column(dot.attrib["cx"])) for dot in svg.iter("circle")]
    shown = {
        (column(arrow["x2"]), frozenset(state for y, state in dots if y == arrow["y1"]), column(arrow["x1"]))
        for arrow in arrows
    }
    assert len(arrows) == len(shown)
    assert shown == {
        ("lost", frozenset({"new", "kept"}), "new"),
        ("lost", frozenset({"new", "kept"}), "kept"),
        ("kept", frozenset({"lost", "new"}), "new"),
    }
    assert [text.text for text in svg.iter("text") if text.attrib["class"] == "end"] == ["taken", "given", "found"]
    states = {box.attrib["class"].strip() for box in svg.iter("rect")}
    assert states == {"state first", "state", "state last"}


def test_what_is_no_move_is_refused(load_script: Callable[[str], types.ModuleType]) -> None:
    """Rather than drawn without it."""
    with pytest.raises(ValueError, match="no state diagram of moves"):
        load_script("docs/state_diagrams.py").svg_of("stateDiagram-v2\n note right of a", "mermaid", "x", {}, None)
