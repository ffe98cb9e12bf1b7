"""What MkDocs is told beside `mkdocs.yml`: what lies outside of docs/, and the pages of decisions.

Links are written for the repository, where tests follow them. On the site README, CONTRIBUTING, CHANGELOG and SECURITY
are pages, a source file that is linked is copied as text, and the links lead there. Diagrams in Mermaid are drawn.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from state_diagrams import svg_of

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "about.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def in_repository(source: str) -> str:
    """Where a page of the site lies in the repository."""
    return next((name for name, page in PAGES.items() if page == source), f"docs/{source}")


def site_path(path: str) -> str:
    """Where a file of the repository lies on the site."""
    if path.startswith("docs/") and (REPOSITORY / path).is_file():
        return path.removeprefix("docs/")
    return PAGES.get(path) or f"source/{path}.txt"


def text_of(path: str) -> str:
    """A file's text; of a folder, the names of what is in it."""
    there = REPOSITORY / path
    return "\n".join(sorted(file.name for file in there.iterdir())) if there.is_dir() else there.read_text()


def targets(text: str, source: str) -> dict[str, str]:
    """Link -> the file of the repository that it means, for links of a page."""
    folder = (REPOSITORY / in_repository(source)).parent
    links = LINK.findall(CODE.sub("", text))
    return {link: str((folder / link).resolve().relative_to(REPOSITORY)) for link in links}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add every decision to the navigation, and have diagrams drawn."""
    decisions = sorted(path.relative_to(config.docs_dir) for path in Path(config.docs_dir, "decisions").glob("*.md"))
    config.nav.append({"Decisions": ["decisions.md", *map(str, decisions)]})
    fence = {"name": "mermaid", "class": "diagram", "format": svg_of}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the sources that any page links to."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(REPOSITORY / name).read_text()))
    pages = files.documentation_pages()
    linked = {path for page in pages for path in targets(page.content_string, page.src_uri).values()}
    for path in sorted(linked):
        if site_path(path).startswith("source/"):
            files.append(File.generated(config, site_path(path), content=text_of(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn the links that leave docs/."""
    source = page.file.src_uri
    up = "../" * (len(PurePosixPath(source).parts) - 1)
    where = {link: site_path(path) for link, path in targets(markdown, source).items()}
    return LINK.sub(lambda found: up + where.get(found[1], found[1]) if found[1] in where else found[1], markdown)
