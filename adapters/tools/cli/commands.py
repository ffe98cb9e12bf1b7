"""What is said of each command before its module is imported: one line, its exit codes, two examples.

`--help`, docs/commands.md and the tests that run the examples read it here. It must not know how a command works.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from kvledger.adapters.tools.exit_codes import OF_EVERY_COMMAND, VERDICTS, ExitCode

_COLUMNS = 78

_UNREADABLE = "it cannot be read: damaged all through, forbidden, or written by a newer kvledger"
_DAMAGED_TOO = "shown, also of a log that is damaged: stderr says so, `kvledger verify` judges"
_NOTHING = "nothing could be checked: no event is selected, or what came before is missing and no snapshot is there"


@attrs.frozen
class Command:
    """What is said of a command."""

    help: str
    exit_codes: Mapping[ExitCode, str]
    """Those of the command itself, with what each means here; `kvledger.adapters.tools.exit_codes` has those of all."""
    examples: Mapping[str, str]
    """What somebody wants -> the line that does it."""
    is_entry_point: bool = False
    """Whether its function is the entry point of its name in the group `kvledger.commands`; the tools' own are not."""

    def path(self, name: str) -> str:
        """Where cyclopts imports its function from when the command `name` is chosen."""
        return f"{__name__}:{name}" if self.is_entry_point else f"{__package__}.{name}:run"

    def epilogue(self) -> str:
        """Exit codes and examples, as `--help` shows them below the options."""
        examples = "\n".join(f"  {line}\n      {what}" for what, line in self.examples.items())
        others = {code: text for code, text in OF_EVERY_COMMAND.items() if code not in self.exit_codes}
        return f"exit codes:\n{_codes(self.exit_codes)}\nof every command:\n{_codes(others)}\n\nexamples:\n{examples}"


def _codes(codes: Mapping[ExitCode, str]) -> str:
    lines = (
        textwrap.fill(text, _COLUMNS, initial_indent=f"  {code.value:<4}", subsequent_indent=" " * 6)
        for code, text in codes.items()
    )
    return "\n".join(lines)


def __getattr__(name: str) -> Callable[..., ExitCode]:
    """The function of a command that is an entry point, when cyclopts imports it."""
    from importlib.metadata import entry_points  # noqa: PLC0415 -- looks at all that is installed

    for entry_point in entry_points(group="kvledger.commands", name=name):
        function: Any = entry_point.load()
        return function  # type: ignore[no-any-return]
    raise AttributeError(name)


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "ls": Command(
            "list the logs of a directory, and how each ended",
            {
                ExitCode.SOUND: "listed, also where one is damaged",
                ExitCode.DAMAGED: "one of them cannot be read at all",
                ExitCode.NOTHING_CHECKED: "one holds no event, or has lost its beginning and has no snapshot",
            },
            {
                "the newest first": "kvledger ls logs",
                "how the last one ended, for a script": "kvledger ls logs --json | head -n 1 | jq -r .end",
            },
        ),
        "top": Command(
            "watch a running engine: requests by state, hit rate, copies, faults, who waits longest",
            {ExitCode.SOUND: "shown, until the engine has ended or until Ctrl-C", ExitCode.DAMAGED: _UNREADABLE},
            {
                "the engine that writes to this log_dir": "kvledger top logs",
                "one view, for a program": "kvledger top logs --once --json",
            },
        ),
        "verify": Command(
            "check a log in every way",
            {code: VERDICTS[code] for code in sorted(VERDICTS)},
            {
                "every log of a log_dir": "kvledger verify logs",
                "the verdict on the last start, for a script": "kvledger verify logs --newest --json | tail -n 1",
            },
        ),
        "show": Command(
            "show a log, the timeline of a request, or the state at one moment",
            {
                ExitCode.SOUND: _DAMAGED_TOO,
                ExitCode.DAMAGED: _UNREADABLE,
                ExitCode.DIVERGED: "--at: an event before that moment cannot be folded",
                ExitCode.NOTHING_CHECKED: _NOTHING,
            },
            {
                "the life of one request": "kvledger show logs chat-17",
                "a request as it stood at event 42": "kvledger show logs/2026-01-05 chat-17 --at 42",
            },
        ),
        "why": Command(
            "say why a request was preempted, missed the cache, computed again",
            {ExitCode.SOUND: _DAMAGED_TOO, ExitCode.DAMAGED: _UNREADABLE, ExitCode.NOTHING_CHECKED: _NOTHING},
            {
                "why one request waited and computed again": "kvledger why logs chat-17",
                "its causes from event 10 on, for a program": "kvledger why logs chat-17 --since 10 --json",
            },
        ),
        "stats": Command(
            "sum up what the cache did, with a reason for every missed and recomputed token",
            {ExitCode.SOUND: _DAMAGED_TOO, ExitCode.DAMAGED: _UNREADABLE, ExitCode.NOTHING_CHECKED: _NOTHING},
            {
                "each log, and all together": "kvledger stats logs",
                "one log from a moment on": "kvledger stats logs --newest --since 20ms",
            },
        ),
        "export": Command(
            "write a log as a trace for Perfetto, a page for a ticket, or spans for OpenTelemetry",
            {
                ExitCode.SOUND: "written, also of a log that is damaged",
                ExitCode.DAMAGED: _UNREADABLE,
                ExitCode.NOTHING_CHECKED: f"written, but of one log {_NOTHING}",
                ExitCode.TRY_AGAIN: "--otlp: the endpoint cannot be reached, or takes nothing now",
                ExitCode.REFUSED: "--otlp: the endpoint refused the spans",
            },
            {
                "a page for a ticket": "kvledger export logs/2026-01-05 --html -o incident.html",
                "a trace for ui.perfetto.dev": "kvledger export logs/2026-01-05 --perfetto -o trace.json.gz",
            },
        ),
        "tables": Command(
            "write logs as Parquet files, one for each table, for DuckDB, Polars and pandas",
            {
                ExitCode.SOUND: "written, also if a log is damaged",
                ExitCode.DAMAGED: _UNREADABLE,
                ExitCode.NOTHING_CHECKED: f"written, but of one log {_NOTHING}",
            },
            {
                "all tables of all logs": "kvledger tables logs -o tables",
                "which rules are broken": "kvledger tables logs -o tables --table violations",
            },
        ),
        "core": Command(
            "show states, handlers, extensions, rules and tables: of this installation, or of a log",
            {ExitCode.SOUND: "shown", ExitCode.DAMAGED: _UNREADABLE},
            {
                "what a connector would be made of here": "kvledger core",
                "what a log was written with": "kvledger core logs/2026-01-05",
            },
        ),
        "ship": Command(
            "copy logs into a NATS JetStream stream",
            {
                ExitCode.SOUND: "everything is in the stream",
                ExitCode.DAMAGED: "a log is damaged; what stands before that is in the stream",
                ExitCode.TRY_AGAIN: "not everything is shipped: the same command later goes on",
                ExitCode.REFUSED: "the server refused",
            },
            {
                "from now on": "kvledger ship logs --to nats://nats.example/LOGS --follow",
                "what is there": "kvledger ship --list nats://nats.example/LOGS",
            },
        ),
        "repro": Command(
            "write an incident as a test that drives the recorded hook calls into the connector",
            {
                ExitCode.SOUND: "written, and the test does what it should: it fails, and with --pin it passes",
                ExitCode.DAMAGED: _UNREADABLE,
                ExitCode.DIVERGED: "written, and the test does the opposite here",
                ExitCode.NOTHING_CHECKED: "the log holds no event, or its beginning is missing",
                ExitCode.NOT_VERIFIED: "written, and the test could not be run here",
                ExitCode.USAGE: "wrong usage; or the log has no incident: --pin writes what it has; or it is a "
                "recorder's, and no connector is named",
            },
            {
                "the first incident of a log": "kvledger repro logs/2026-01-06 -o test_incident.py",
                "the answers that a request got": "kvledger repro logs/2026-01-05 chat-17 --pin -o test_chat_17.py",
            },
            is_entry_point=True,
        ),
        "conformance": Command(
            "hold a connector of vLLM's against what vLLM relies on",
            {
                ExitCode.SOUND: "no obligation is broken",
                ExitCode.RULE_BROKEN: "one is, or a rule that none names",
                ExitCode.NOTHING_CHECKED: "nothing could be checked: no run gave occasion to judge an obligation",
            },
            {
                "a connector that vLLM registers": "kvledger conformance OffloadingConnector --seeds 5",
                "one world again": 'kvledger conformance connector:Mine --only "world 17"',
            },
        ),
        "check": Command(
            "say what a configuration of vLLM's would do, before an engine starts",
            {
                ExitCode.SOUND: "an engine would start with it; a model may be declined, which is said",
                ExitCode.REFUSED: "it would be refused, here and for the reason that is named",
            },
            {
                "what a pool holds": 'kvledger check \'{"host_bytes": "1GiB"}\' --model models/llama',
                "whether a key is right": "kvledger check '{\"chunk_size\": 32}' --json",
            },
        ),
        "retire": Command(
            "delete the oldest segments of logs that are at rest",
            {ExitCode.SOUND: "done, or nothing to do", ExitCode.DAMAGED: _UNREADABLE},
            {
                "say what would go": "kvledger retire logs --max-bytes 2GiB --max-age 30d --dry-run",
                "from cron": "kvledger retire logs --max-bytes 2GiB --max-age 30d",
            },
        ),
        "completion": Command(
            "print the script with which a shell completes commands, options and paths",
            {ExitCode.SOUND: "printed"},
            {
                "with bash, in ~/.bashrc": 'eval "$(kvledger completion bash)"',
                "with fish, once": "kvledger completion fish > ~/.config/fish/completions/kvledger.fish",
            },
        ),
    }
)
"""By name, in the order of the help text."""
