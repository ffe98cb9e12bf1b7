"""Commands that documents show: found in the text, and told apart by what can run here.

A command is a line of a block for a shell, or one that begins with `kvledger` in any other block or span. A usage line
(`[…]`, `…`) is none. What runs elsewhere only is listed below, with where. In a block marked `console` the lines behind
a command are its output.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator

import attrs

CODE = re.compile(r"^```(\w*)\n.*?^```$|^(?: {4}[^\n]*\n)+", re.MULTILINE | re.DOTALL)
SHELLS = ("bash", "console", "sh", "shell")
SPAN = re.compile(r"`(kvledger [^`]+)`")
REST = re.compile(r"\s+#|\s\|\s|\s>\s")
"""What stands behind a command: a remark, a pipe, a file."""

RUN_ELSEWHERE = {
    r"kvledger (ship|.*nats://)": "needs a NATS server: tests/adapters/tools/cli/test_ship.py has one",
    r"kvledger export .*http://": "needs a receiver of spans: tests/adapters/tools/export/test_otlp.py has one",
    r"kvledger repro .*--(connector|run-recorded)": "needs a log of a recorder: tests/adapters/lab/repro has some",
    r"kvledger conformance ": "plays vLLM's scheduler for minutes: tests/adapters/lab/conformance",
    r"python3 -m venv |\. ": "makes an environment, or enters one: tests/install makes one",
    r"pip install ": "needs an index of packages: tests/install makes the wheel and installs it",
    r"pytest ": "runs a test that a command above it has written: tests/adapters/lab/repro",
    r"make ": "its targets are in the Makefile: test_generated_pages.py looks",
    r"vllm serve ": "starts a server: tests/e2e/test_serving.py, and test_readme.py reads its JSON object",
    r"export [A-Z_]+=": "says where the logs are: the tests have KVLEDGER_LOG=LOG",
    r"nats ": "is the client of NATS, not ours",
    r"trace_processor_shell ": "is Perfetto's: tests/adapters/tools/export has it",
}
"""What a command begins with → why it is not run here."""


@attrs.frozen
class Block:
    """The commands of a block of code, or of a span, in order."""

    commands: tuple[str, ...]
    text: str
    is_console: bool = False
    """Whether the lines behind a command are what it prints, word for word."""

    def output_of(self, command: str) -> list[str]:
        """The lines that are shown behind a command."""
        _, _, behind = self.text.partition(f"$ {command}\n")
        shown = itertools.takewhile(lambda line: not line.startswith("$ "), behind.splitlines())
        return [line for line in shown if line.strip()] if self.is_console else []

    @property
    def shows_a_broken_rule(self) -> bool:
        """Whether what stands there is what a broken log prints."""
        return "rule broken" in self.text or "BROKEN" in self.text


def is_usage(line: str) -> bool:
    """Whether it says what may stand there, and is no command."""
    return "…" in line or re.search(r"\[[A-Z-]", line) is not None


def is_whole(command: str) -> bool:
    """Whether no quotation and no backslash goes on in the next line."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def commands_of(code: str, *, is_shell: bool) -> Iterator[str]:
    """The commands of a block: lines behind `$`, all of a shell's without any, and those of known programs."""
    has_prompt = re.search(r"^\s*\$ ", code, re.MULTILINE) is not None
    lines = iter(code.splitlines())
    for line in lines:
        command = line.strip().removeprefix("$ ")
        is_known = command.startswith("kvledger ") or runs_elsewhere(command)
        if not command or is_usage(line) or not (line.strip().startswith("$ ") if has_prompt else is_shell or is_known):
            continue
        while not is_whole(command):
            command = command.removesuffix("\\") + next(lines).strip()
        yield REST.split(command)[0].strip()


def blocks_of(document: str) -> Iterator[Block]:
    """Every block and span with a command, in order."""
    for found in CODE.finditer(document):
        is_shell = found[1] in SHELLS
        code = found[0].strip("`").removeprefix(found[1] or "")
        if commands := tuple(commands_of(code, is_shell=is_shell)):
            yield Block(commands, code, found[1] == "console")
    for span in SPAN.findall(CODE.sub("", document)):
        if len(span.split()) > 2 and not is_usage(span):
            yield Block((REST.split(span)[0],), span)


def runs_elsewhere(command: str) -> str | None:
    """The pattern that says so, or None."""
    return next((pattern for pattern in RUN_ELSEWHERE if re.match(pattern, command)), None)


def words_of(command: str) -> list[str]:
    """As a shell would split it; EVENT is a number."""
    return shlex.split(command.replace("EVENT", "7"))
