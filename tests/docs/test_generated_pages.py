"""What the documents say is what the code is: pages made from it, links, commands, targets."""

from __future__ import annotations

import ast
import re
import shlex
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from kvledger.adapters.tools.cli.app import build_app
from kvledger.lifecycle import Core, RequestState

LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND_SPAN = re.compile(r"`(kvledger [^`…]+)`")
COMMAND_LINE = re.compile(r"^\s*(?:\$ )?(kvledger (?!=)[^|#\n…]+)", re.MULTILINE)
CODE = re.compile(r"^```.*?^```$|^(?: {4}[^\n]*\n)+", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"(?:^|`)\s*make ([a-z-]+(?: [a-z-]+)*)", re.MULTILINE)


@pytest.fixture(scope="module")
def generate(load_script: Callable[[str], types.ModuleType]) -> types.ModuleType:
    """docs/generate.py."""
    return load_script("docs/generate.py")


def test_generated_pages_are_up_to_date(generate: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """`docs/generate.py --check` finds nothing to write; if it does, `make docs`."""
    exit_code = generate.main(["--check"])
    assert (exit_code, capsys.readouterr().out) == (0, "")


def test_a_stale_page_is_named_and_not_written(
    generate: types.ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One changed and one missing page: exit code 1, both names, nothing changes. Without --check they are written."""
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    monkeypatch.setattr(generate, "PAGES", {name: generate.PAGES[name] for name in ("states.md", "events.md")})
    assert generate.main([]) == 0
    pages = {page: page.read_text() for page in tmp_path.iterdir()}
    (tmp_path / "states.md").write_text("old\n")
    (tmp_path / "events.md").unlink()
    capsys.readouterr()
    assert generate.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert {line.partition(":")[0] for line in out.splitlines()} == {"docs/states.md", "docs/events.md"}
    assert (tmp_path / "states.md").read_text() == "old\n"
    assert generate.main([]) == 0
    assert pages == {page: page.read_text() for page in tmp_path.iterdir()}


def test_generated_pages_say_so_and_how_to_make_them_again(
    generate: types.ModuleType, documents: dict[str, str]
) -> None:
    """In their first line, where whoever edits them sees it."""
    for name in generate.PAGES:
        first_line = documents[f"docs/{name}"].splitlines()[0]
        assert "Generated from" in first_line
        assert "`make docs`" in first_line


def test_every_state_and_every_event_has_its_place(documents: dict[str, str]) -> None:
    """And every event is written by something."""
    assert all(f"**{state.value}**" in documents["docs/states.md"] for state in RequestState)
    assert all(f"### `{event_id}`" in documents["docs/events.md"] for event_id in Core.standard().events)
    assert "nothing yet" not in documents["docs/events.md"]


def anchors_of(text: str) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.+)$", re.sub(CODE, "", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_internal_link_leads_somewhere(documents: dict[str, str], repository: Path) -> None:
    """To a file that is there, and to a heading that it has."""
    broken = []
    for name, text in documents.items():
        for link in LINK.findall(re.sub(CODE, "", text)):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (repository / name).parent / path if path else repository / name
            if not target.exists() or (anchor and anchor not in anchors_of(target.read_text())):
                broken.append(f"{name}: {link}")
    assert broken == []


def test_every_document_is_reached_from_the_index(documents: dict[str, str]) -> None:
    """A page that nobody links is a page that nobody reads."""
    lists = documents["docs/index.md"] + documents["docs/decisions.md"]
    linked = {link.partition("#")[0] for link in LINK.findall(lists)}
    pages = {name.removeprefix("docs/") for name in documents if name.startswith("docs/")} - {"index.md"}
    assert pages - linked == set()


def commands_in(documents: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(document, command) for every `kvledger …` in code."""
    for name, text in documents.items():
        for command in COMMAND_SPAN.findall(text):
            yield name, command
        for block in CODE.findall(text):
            for command in COMMAND_LINE.findall(block):
                yield name, command


def test_every_command_that_is_shown_parses(documents: dict[str, str]) -> None:
    """With the parser of the command itself; `[…]` in a usage line is optional, EVENT a number, `>` the shell's."""
    refused, app = [], build_app()
    shown = list(commands_in(documents))
    for name, command in shown:
        called = command.partition(" > ")[0]  # what becomes of the output is the shell's business
        words = shlex.split(re.sub(r"[\[\]]", " ", called).replace("EVENT", "7"))[1:]
        if len(words) == 1 and not words[0].startswith("-"):
            words.append("bash" if words == ["completion"] else "LOG")  # a mention of a command, not a call
        try:
            app.parse_args(word for word in words if word != "--json")
        except CycloptsError as error:
            refused.append(f"{name}: {command}: {error}")
    assert refused == []
    assert {command.split()[1] for _, command in shown} >= {"verify", "show", "why"}


def test_a_command_that_does_not_parse_would_be_found() -> None:
    """The search sees spans, indented lines and fenced lines alike."""
    text = "Run `kvledger why LOG`.\n\n    kvledger lie LOG\n\n```text\n$ kvledger verify --fix LOG\n```\n"
    found = [command for _, command in commands_in({"a.md": text})]
    assert found == ["kvledger why LOG", "kvledger lie LOG", "kvledger verify --fix LOG"]


def test_every_make_target_that_is_named_exists(documents: dict[str, str], repository: Path) -> None:
    """`make demo` in the README is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    named = {target for text in documents.values() for words in TARGET.findall(text) for target in words.split()}
    assert named - targets == set()
    assert {"demo", "test", "docs"} <= named


def test_every_message_to_people_is_explained(documents: dict[str, str], repository: Path) -> None:
    """What the connector logs stands in docs/operating.md, and nothing else does."""
    messages = set()
    for path in (repository / "adapters/vllm").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            is_message = ast.unparse(node.func.value).endswith("messages") and isinstance(node.args[0], ast.Constant)
            if is_message and node.func.attr in {"info", "warning", "error"}:
                messages.add((ast.literal_eval(node.args[0]), node.func.attr))
    table = documents["docs/operating.md"].partition("| message |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    explained = [(text, level.strip()) for cell, level in rows for text in re.findall(r"`([^`]+)`", cell)]
    for message, level in messages:
        assert any(message.startswith(text) and level == said_level for text, said_level in explained), message
    for text, _ in explained:
        assert any(message.startswith(text) for message, _ in messages), text
