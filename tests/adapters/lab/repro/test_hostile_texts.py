"""A log comes from anywhere, and a test is code: no text of a log becomes code in the test that is written of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lifecycle_driver import Driver
from stored_logs import unfoldable, write_log

from kvledger.adapters.lab.repro.chosen import Chosen
from kvledger.adapters.lab.repro.outcome import HOOK_FAILED, UNFOLDABLE, Trouble
from kvledger.adapters.lab.repro.shape import wrong_part
from kvledger.adapters.lab.repro.write import ANSWERS_TEST, Description, test_source
from kvledger.adapters.tools.cli.main import main
from kvledger.lifecycle import LedgerConfiguration, Rule
from kvledger.lifecycle import events as e

INJECTION = "x() -> none: pass\n__import__('os').system('exit 3')\ndef test_y"
HOSTILE = [
    INJECTION,
    '"""\n__import__("os").abort()\n"""',
    "'''",
    '"' * 7,
    "\\" * 3,
    '\\"""',
    "\\N{NO SUCH CHARACTER}",
    "\\x",
    "\\u12",
    "{0}{x!r}%s",
    "\0",
    "\r\f\v\x1c\x85\u2028",
    "\u202e\u2066\ufeff\u200b",
    "\ud800\udfff\udc80",
    "# coding: utf-7",
    "\n# coding: utf-7\n",
    "-" * 300 + '"',
    ">>> __import__('os').abort()",
    "x" * 110 + " >>> __import__('os').abort() ->>>> y",
    "```python __import__('os').abort() ````",
    "x" * 20_000,
    "\U0010ffff\ue000\xa0",
    "LAST_TOKEN() -> None: ...",
    "last_token",
    "\u017f",
    "",
]
TEXTS = st.lists(st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=()), max_size=30), max_size=3).map(
    "".join
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
RULES = st.sampled_from([HOOK_FAILED, UNFOLDABLE, *(rule.value for rule in Rule)])
DESCRIPTIONS = st.builds(
    Description,
    incident=st.none() | st.builds(Trouble, RULES | TEXTS, st.integers(), TEXTS, TEXTS),
    request_id=TEXTS,
    excused=st.lists(RULES | TEXTS, unique=True, max_size=2),
    wrapped=TEXTS,
    chosen=st.builds(
        Chosen,
        TEXTS,
        st.dictionaries(TEXTS, JSON, max_size=2),
        st.booleans(),
    ),
    on_core=st.booleans(),
    handlers=st.lists(TEXTS, max_size=2),
    origin=TEXTS,
    command=TEXTS,
    remarks=st.lists(TEXTS, max_size=2),
)
NAMES = {"test_no_hook_fails", "test_unfoldable_holds", *(f"test_{rule.value.lower()}_holds" for rule in Rule)}


def everywhere(text: str) -> Description:
    """The same text in every place."""
    incident = Trouble(text, 1, text, text)
    return Description(
        incident, text, [text], text, Chosen(text, {text: [text, {text: text}]}), False, [text], text, text, [text]
    )


@given(DESCRIPTIONS)
@example(everywhere(INJECTION))
@example(everywhere("\\N{"))
@example(everywhere("\0\ud800"))
def test_no_text_becomes_code(about: Description) -> None:
    """Without its texts the file is that of a log in which each is a plain word; the rule reaches it as it is."""
    tree = ast.parse(test_source(about))
    plain = attrs.evolve(
        about,
        incident=about.incident and attrs.evolve(about.incident, request_id="r", detail="d"),
        request_id="r",
        wrapped="w" if about.wrapped else "",
        origin="o",
        command="c",
        remarks=[],
    )
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    incidents = [test for test in tests if test.name != ANSWERS_TEST]
    assert len(incidents) == (about.incident is not None)
    if about.incident is not None:
        (test,) = incidents
        assert test.name in NAMES or test.name == "test_the_recorded_rule_holds"
        literals = [node.value for node in ast.walk(test) if isinstance(node, ast.Constant)]
        assert about.incident.rule in literals
    assert given_to(tree) == given_in(about)
    assert without_texts(tree) == without_texts(ast.parse(test_source(plain)))


def given_to(tree: ast.Module) -> dict[str, Any]:
    """What the first test says of the connector to run."""
    (call, *_) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("rerun")
    ]
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def given_in(about: Description) -> dict[str, Any]:
    """The same, as it was to be written."""
    given = {"handlers": tuple(about.handlers), **attrs.asdict(about.chosen)}
    return {name: value for name, value in given.items() if value}


def without_texts(tree: ast.Module) -> str:
    """The structure alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_text_says_can_still_be_read(text: str) -> None:
    """On a line of the docstring, cut where it is long, with numbers for what cannot be seen."""
    docstring = ast.get_docstring(ast.parse(test_source(everywhere(text)))) or ""
    assert all(character.isprintable() or character in "\n\ue000\xa0\U0010ffff" for character in docstring)
    assert len(docstring) < 20_000
    (first, *_) = text.split() or [""]
    if first.isascii() and first.isprintable():
        shown = first[:40].replace('"""', "'''").replace(">>>", r"\u003e" * 3).replace("```", r"\u0060" * 3)
        assert shown in docstring


def test_no_text_is_an_example_that_other_tools_run(tmp_path: Path) -> None:
    """Incident: a suite with `--doctest-modules` ran what a log had behind `>>>`, from the docstring of the test."""
    ran = tmp_path / "ran"
    for place in range(120):  # every place in a line of the docstring
        about = everywhere(f"{'x' * place} >>> open({str(ran)!r},'w').close()#{'x' * 120}")
        (tmp_path / f"test_{place}.py").write_bytes(test_source(about))
    others = "not test_the_recorded_rule_holds and not test_lookups_get_the_recorded_answers"
    collected = subprocess.run(
        [*f"{sys.executable} -m pytest --doctest-modules -q -p no:cacheprovider -k".split(), others, str(tmp_path)],
        capture_output=True,
        check=False,
        text=True,
    )
    assert "240 deselected" in collected.stdout
    assert "passed" not in collected.stdout
    assert not ran.exists()


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        (lambda source: source + "import os\n", "not followed by exactly these tests"),
        (lambda source: source.replace("LOG =", "LOG = NO ="), "the imports and the path of the log"),
        (lambda source: source.replace("import Path", "import Path; import os"), "the imports and the path of the log"),
        (lambda source: source.replace("() -> None", "(x=print()) -> None"), "other code"),
        (lambda source: source.replace("() -> None", "() -> print()"), "other code"),
        (lambda source: source.replace("def test_last", "@print\ndef test_last"), "other code"),
        (lambda source: source.replace("def test_last", "async def test_last"), "not followed by exactly these tests"),
        (lambda source: source.replace("not trouble,", "print(),"), "other code"),
        (lambda source: source.replace('"LAST_TOKEN"', "print()"), "other code"),
        (lambda source: source.replace('"LAST_TOKEN"', 'f"{print()}"'), "other code"),
        (lambda source: source.replace("(LOG", "(LOG, x=print()"), "other code"),
        (lambda source: source.replace("(LOG", "(LOG, **{}"), "other code"),
        (lambda source: source.replace("(LOG", "(LOG, 1"), "other code"),
        (lambda source: source + "    print()\n", "other code"),
        (
            lambda source: source.replace('"""Repeats', "f'''{print()}''' \"\"\"Repeats"),
            "does not begin with a docstring",
        ),
        (
            lambda source: source.replace("Repeats", ">>> Repeats"),
            "does not begin with a docstring, or the docstring has code",
        ),
        (lambda source: source.replace("Recorded: ", "```"), "other code"),
        (lambda source: source + "def", "not a Python file"),
        (lambda source: source + "\0", "not a Python file"),
        (lambda source: source + "x = " + "(" * 1000, "not a Python file"),
    ],
)
def test_code_that_should_not_be_in_a_test_is_found(changed: Any, wrong: str) -> None:
    """Wherever it stands."""
    about = attrs.evolve(
        everywhere("r"), incident=Trouble("LAST_TOKEN", 1, "r", "d"), wrapped="", handlers=[], chosen=Chosen()
    )
    source, names = test_source(about).decode(), ["test_last_token_holds"]
    assert wrong_part(source.encode(), "rerun", names) == ""
    assert wrong in wrong_part(changed(source).encode(), "rerun", names)


def log_of_rule(story: Driver, path: Path, rule: str) -> Path:
    """A log that cannot be folded from some event on: rules after it are taken from the log."""
    events = [
        *unfoldable(story.observed),
        e.LogNote("connector shut down", 10_000_000),
        e.InvariantViolated(rule, "chat-9", 1, 1, rule, 3),
    ]
    return write_log(path, events, story.configuration, header={"kvledger_version": rule, "vllm_version": rule})


def test_a_rule_of_a_log_is_no_code_of_its_test(story: Driver, tmp_path: Path) -> None:
    """Incident: the name of the rule became a part of the test's name, so that pytest ran what stood in it."""
    log = log_of_rule(story, tmp_path / "log", INJECTION)
    test = tmp_path / "test_incident.py"
    assert (
        main(
            [
                "repro",
                str(log),
                "chat-9",
                "--core",
                "--no-run",
                "--since",
                str(len(story.observed) + 4),
                "-o",
                str(test),
            ]
        )
        == 0
    )
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(test)],
        capture_output=True,
        check=False,
        text=True,
    )
    assert "test_the_recorded_rule_holds" in collected.stdout
    assert collected.returncode == 0


def test_what_a_test_says_of_a_request_is_obeyed_by_no_terminal(tmp_path: Path) -> None:
    """Incident: pytest printed the message of an assertion with the request id as its client chose it."""
    who = "chat\x1b]0;owned\x07\n\u202eE   "
    events = [e.RequestArrived(who, 0, 45, 10), e.BlocksAllocated(who, (1, 2, 3), 32, 12)]
    configuration = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8)
    log, test = write_log(tmp_path / "log", events, configuration), tmp_path / "test_incident.py"
    assert main(["repro", str(log), "--core", "-o", str(test)]) == 0
    failed = subprocess.run(
        [*f"{sys.executable} -m pytest -q -p no:cacheprovider".split(), str(test)],
        capture_output=True,
        check=False,
        text=True,
    )
    assert failed.returncode == 1
    assert "was broken for chat\\u001b]0;owned\\u0007\\u000a\\u202eE" in failed.stdout
    assert not {"\x1b", "\x07", "\u202e"} & set(failed.stdout)
