"""Every command that the documents show runs, and exits as they say.

The names that they use are those of real files: `LOG`, `logs/2026-01-05` … are logs in which their requests lived.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from lifecycle_driver import Driver, keys_of
from shown_commands import RUN_ELSEWHERE, Block, blocks_of, runs_elsewhere, words_of
from stored_logs import write_log

from kvledger.adapters.lab.demo.model import TINY, VOCABULARY_SIZE
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.lifecycle import Core, Turn, handlers
from kvledger.lifecycle import events as e

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
REQUESTS = ("REQUEST", "chat-17-b6", "chat-21-f0", "chat-6-a2", "cmpl-bench-16-0")
LOGS = {
    **dict.fromkeys(("LOG", "logs/2026-01-05", "kvledger-logs"), REQUESTS),
    **dict.fromkeys(("OTHER", "logs/2026-01-06"), ("chat-9",)),
    "build/demo/logs": ("1-aec8ae82",),
}

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY_SIZE, **TINY}


def lives(requests: Sequence[str], core: Core) -> Driver:
    """Each of the requests is preempted, asked about twice, and ends."""
    driver = Driver(chunk_size=16, block_size=16, core=core)
    for number, request in enumerate(requests):
        driver.pass_ns(20_000_000)
        driver.start(request, keys_of(request, 3), 100, range(10 * number + 1, 10 * number + 8))
        driver.preempt(request, 100)
        driver.settle_all()
        driver.lookup(request, 16, 101)
        driver.lookup(request, 16, 101)
        driver.finish(request, 100, 101)
        driver.settle_all()
    return driver


class BareHit(handlers.Preempted):
    """Answers with the whole hit, whatever vLLM has computed."""

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        """As `docs/examples/cached_answer.py`, without a memory."""
        super().lookup_requested(turn.altered(bare), event)


def bare(answer: e.Event) -> e.Event:
    """All that is there is offered."""
    is_answer = isinstance(answer, e.LookupAnswered)
    return msgspec.structs.replace(answer, num_external_tokens=answer.num_hit_tokens) if is_answer else answer


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two folders with the files that commands name: all is sound in one, answers are wrong in the other."""
    worlds = {}
    for name, core in {"sound": Core.standard(), "broken": Core.standard().replacing(BareHit())}.items():
        worlds[name] = tmp_path_factory.mktemp(name)
        for log, requests in LOGS.items():
            story = lives(requests, core)
            write_log(worlds[name] / log, story.observed, story.configuration)
        (worlds[name] / "tests").mkdir()
        (worlds[name] / "handlers.py").write_text("from kvledger.lifecycle.handlers import Running as Mine\n")
        (worlds[name] / "docs").symlink_to(REPOSITORY / "docs")
        (worlds[name] / "models/llama").mkdir(parents=True)
        (worlds[name] / "models/llama/config.json").write_text(json.dumps(LLAMA))
    return worlds


def exit_code_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command in this process. The core alone has the bug of a log, so `repro` needs no vLLM."""
    while words[0].startswith("PYTHONPATH="):
        # As Python does at its start, which makes what PYTHONPATH names absolute.
        monkeypatch.syspath_prepend(str(Path(words.pop(0).partition("=")[2]).resolve()))
    if words[0] == "kvledger":
        return main([*words[1:], *(["--core"] if words[1] == "repro" and "--core" not in words else [])])
    assert words[0] == "python", words
    monkeypatch.setattr(sys, "argv", words[1:])
    runpy.run_path(words[1], run_name="__main__")
    return 0


def squeezed(text: str) -> str:
    """Without the columns' widths."""
    return " ".join(text.split())


def is_among(shown: str, printed: list[str]) -> bool:
    """Whether a shown line, in which `…` stands for anything, was printed."""
    pattern = ".*".join(re.escape(squeezed(part)) for part in shown.split("…"))
    return any(re.fullmatch(pattern, line) for line in printed)


def expected_exit_code(block: Block, words: list[str]) -> int:
    """0, unless the command judges: a log that is shown with its breach, a test that passes here."""
    if words[1] == "verify" and block.shows_a_broken_rule:
        return ExitCode.RULE_BROKEN
    if words[1] == "repro" and "--handlers" not in words:
        return ExitCode.DIVERGED
    return ExitCode.SOUND


def wrong_ones(block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a block's commands, one behind the other; what exits or prints otherwise than it is shown."""
    wrong = []
    for command in block.commands:
        words = words_of(command)
        if runs_elsewhere(command):
            continue
        capsys.readouterr()
        exit_code = exit_code_of(words, monkeypatch)
        printed = capsys.readouterr()
        expected = expected_exit_code(block, words)
        if exit_code != expected:
            wrong.append(f"{command}: {exit_code}, not {expected}: {printed.err}")
        lines = [squeezed(line) for line in (printed.out + printed.err).splitlines()]
        wrong += [f"{command} does not print: {line}" for line in block.output_of(command) if not is_among(line, lines)]
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_that_a_document_shows_runs(
    document: Path,
    worlds: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each block begins anew; what shows a breach is run on one, and so is `repro`, which needs an incident."""
    wrong = []
    monkeypatch.setenv("KVLEDGER_LOG", "LOG")
    for number, block in enumerate(blocks_of(document.read_text())):
        needs_a_breach = block.shows_a_broken_rule or any(c.startswith("kvledger repro") for c in block.commands)
        world = tmp_path / str(number)
        shutil.copytree(worlds["broken" if needs_a_breach else "sound"], world, symlinks=True)
        monkeypatch.chdir(world)
        monkeypatch.syspath_prepend(world)
        wrong += wrong_ones(block, monkeypatch, capsys)
    assert wrong == []


def test_what_runs_elsewhere_is_shown_somewhere() -> None:
    """No reason is kept for what no document shows."""
    shown = [command for path in DOCUMENTS for block in blocks_of(path.read_text()) for command in block.commands]
    assert {runs_elsewhere(command) for command in shown} - {None} == RUN_ELSEWHERE.keys()


def test_blocks_spans_and_continued_lines_are_found() -> None:
    """Output is none of them, and neither are usage lines."""
    document = (
        "`kvledger why LOG a`, `kvledger why`\n\n    $ kvledger show LOG \\\n        a | head\n    kvledger said so\n\n"
        "```bash\nmake demo # slow\n```\n\n    kvledger show LOG [REQUEST]\n    kvledger stats LOG > file\n"
    )
    assert [block.commands for block in blocks_of(document)] == [
        ("kvledger show LOG a",),
        ("make demo",),
        ("kvledger stats LOG",),
        ("kvledger why LOG a",),
    ]
