"""`import kvledger`: what it costs, what it offers, and what a type checker and an editor know of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from processes import finished

import kvledger
from kvledger.adapters.tools import api

REPOSITORY = Path(__file__).resolve().parents[2]
IN_README = next(
    block
    for block in re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    if "open_log" in block
)
IN_DOCSTRING = """
for reason in kvledger.open_log("logs").request("chat-17").why():
    print(reason)
"""
EVERYTHING = """
import sys, kvledger
print(*sorted(name for name in sys.modules if name.startswith("kvledger")))
log = kvledger.open_log(sys.argv[1])
for each in (log.entries, log.requests, log.lookups, log.copies, log.steps, log.evictions, log.violations):
    list(each())
for request in log.requests():
    list(log.request(request.request_id).why())
log.verify()
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_the_docstring_shows_the_sentence() -> None:
    """And a version is there."""
    assert kvledger.__doc__ is not None
    lines = [line.strip() for line in kvledger.__doc__.splitlines()]
    assert [line for line in map(str.strip, IN_DOCSTRING.splitlines()) if line and line not in lines] == []
    assert kvledger.__version__ == kvledger.lifecycle.__version__


@pytest.mark.parametrize("sentence", [IN_README, IN_DOCSTRING], ids=["README", "docstring"])
def test_the_sentence_runs_as_it_is_shown(
    sentence: str, log: Path, incident: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each reason is a line."""
    log.rename(log.with_name("logs"))
    monkeypatch.chdir(incident.parent)
    exec(sentence, {"kvledger": kvledger})  # noqa: S102 -- it is ours
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("event 5, left to compute: tokens 0–")
    assert all(line.startswith("event ") for line in printed)


def test_a_program_pays_for_nothing_before_it_opens_a_log_and_never_for_vllm(log: Path, tmp_path: Path) -> None:
    """Neither do pandas and pyarrow come along, which a program may bring itself."""
    ended = finished([sys.executable, "-c", EVERYTHING, str(log)], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    at_first, at_last = (set(line.split()) for line in ended.stdout.splitlines())
    assert at_first == {"kvledger"}
    assert not at_last & {"torch", "vllm", "numpy", "pandas", "pyarrow", "pydantic", "structlog"}


def test_every_name_is_offered_and_no_other() -> None:
    """An editor completes them before they are imported."""
    assert set(kvledger.__all__) == {*api.__all__, "__version__"}
    assert set(kvledger.__all__) <= set(dir(kvledger))
    assert all(getattr(kvledger, name) is getattr(api, name) for name in api.__all__)
    with pytest.raises(AttributeError, match="module 'kvledger' has no attribute 'opne_log'"):
        kvledger.opne_log  # type: ignore[attr-defined]  # noqa: B018 -- that it cannot be had is the point


def test_a_type_checker_knows_the_sentence_of_the_readme_and_refuses_a_misspelt_one(tmp_path: Path) -> None:
    """Names that are imported when they are asked for have their types all the same."""
    program = tmp_path / "program.py"
    program.write_text(f"{IN_README}    reveal_type(reason)\nkvledger.opne_log\n")
    ended = finished(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", REPOSITORY / "pyproject.toml", program],
        cwd=REPOSITORY,
    )
    said = [line.partition("program.py:")[2] for line in ended.stdout.splitlines() if "program.py:" in line]
    assert said == [
        '5: note: Revealed type is "kvledger.adapters.tools.api.records.Reason"',
        '6: error: Module has no attribute "opne_log"; maybe "open_log"?  [attr-defined]',
    ], ended.stdout + ended.stderr
