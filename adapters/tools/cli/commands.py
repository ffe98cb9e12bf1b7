"""The help of each command: one line, exit codes, and two examples. Importing this module imports no command.

`--help`, docs/commands.md and the tests that run the examples use this help. This module must not know how a command
works.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from kvledger.adapters.tools.exit_codes import OF_EVERY_COMMAND, VERDICTS, ExitCode

_COLUMNS = 78

_UNREADABLE = "the log cannot be read: it is damaged throughout, access is denied, or a newer kvledger wrote it"
_DAMAGED_TOO = (
    "the result is shown, even if the log is damaged; stderr then names the damage. For a verdict, run "
    "`kvledger verify`"
)
_NOTHING = (
    "nothing could be checked: no event is selected, or events before the selection are missing and no snapshot "
    "replaces them"
)


@attrs.frozen
class Command:
    """The help of one command."""

    help: str
    exit_codes: Mapping[ExitCode, str]
    """Exit code → its meaning for this command. `OF_EVERY_COMMAND` has the codes that every command can return."""
    examples: Mapping[str, str]
    """Purpose → command line."""
    is_entry_point: bool = False
    """Whether the command's function is an entry point of the group `kvledger.commands`, outside of this package."""

    def path(self, name: str) -> str:
        """Return the import path of the function that runs the command `name`, in the form that cyclopts takes."""
        return f"{__name__}:{name}" if self.is_entry_point else f"{__package__}.{name}:run"

    def epilogue(self) -> str:
        """Return the text that `--help` shows below the options: exit codes and examples."""
        examples = "\n".join(f"  {line}\n      {what}" for what, line in self.examples.items())
        others = {code: text for code, text in OF_EVERY_COMMAND.items() if code not in self.exit_codes}
        return (
            f"exit codes:\n{_codes(self.exit_codes)}\nexit codes of every command:\n{_codes(others)}\n\n"
            f"examples:\n{examples}"
        )


def _codes(codes: Mapping[ExitCode, str]) -> str:
    lines = (
        textwrap.fill(text, _COLUMNS, initial_indent=f"  {code.value:<4}", subsequent_indent=" " * 6)
        for code, text in codes.items()
    )
    return "\n".join(lines)


def __getattr__(name: str) -> Callable[..., ExitCode]:
    """Load the entry point of the command `name`, and return its function. cyclopts looks up `name` in this module."""
    from importlib.metadata import entry_points  # noqa: PLC0415 -- searches all installed packages

    for entry_point in entry_points(group="kvledger.commands", name=name):
        function: Any = entry_point.load()
        return function  # type: ignore[no-any-return]
    raise AttributeError(name)


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "ls": Command(
            "list the logs of a directory, and show how each log ended",
            {
                ExitCode.SOUND: "the logs are listed, even if a log is damaged",
                ExitCode.DAMAGED: "a log cannot be read at all",
                ExitCode.NOTHING_CHECKED: "a log has no event, or its beginning is missing and it has no snapshot",
            },
            {
                "every log, the newest first": "kvledger ls logs",
                "tell a script how the newest log ended": "kvledger ls logs --json | head -n 1 | jq -r .end",
            },
        ),
        "top": Command(
            "watch a running engine: requests by state, hit rate, copies, broken rules, failed hooks, and the requests "
            "that have waited longest",
            {
                ExitCode.SOUND: "with --once, one view was printed; otherwise the engine was shown until it ended or "
                "you pressed Ctrl-C",
                ExitCode.DAMAGED: _UNREADABLE,
            },
            {
                "watch the engine whose log_dir is the folder `logs`": "kvledger top logs",
                "print one view as JSON, for a program": "kvledger top logs --once --json",
            },
        ),
        "verify": Command(
            "check a log for damage, for broken rules, and for decisions that today's code makes differently",
            {code: VERDICTS[code] for code in sorted(VERDICTS)},
            {
                "verify every log of a log_dir": "kvledger verify logs",
                "print the verdict on the newest scheduler's log": "kvledger verify logs --newest --json | tail -n 1",
            },
        ),
        "show": Command(
            "show a log, the timeline of a request, or the state of the log or of a request at one moment",
            {
                ExitCode.SOUND: _DAMAGED_TOO,
                ExitCode.DAMAGED: f"{_UNREADABLE}; or, with --at, the log is damaged before MOMENT",
                ExitCode.DIVERGED: "with --at: today's code cannot fold all events up to MOMENT",
                ExitCode.NOTHING_CHECKED: _NOTHING,
            },
            {
                "the timeline of one request": "kvledger show logs chat-17",
                "the state of a request at event 42": "kvledger show logs/2026-01-05 chat-17 --at 42",
            },
        ),
        "why": Command(
            "explain why a request was preempted, missed the cache or computed tokens again",
            {ExitCode.SOUND: _DAMAGED_TOO, ExitCode.DAMAGED: _UNREADABLE, ExitCode.NOTHING_CHECKED: _NOTHING},
            {
                "why one request waited and computed tokens again": "kvledger why logs chat-17",
                "what happened to one request from event 10 on, as JSON": "kvledger why logs chat-17 --since 10 --json",
            },
        ),
        "stats": Command(
            "sum up what the cache did, with a reason for every missed and recomputed token",
            {ExitCode.SOUND: _DAMAGED_TOO, ExitCode.DAMAGED: _UNREADABLE, ExitCode.NOTHING_CHECKED: _NOTHING},
            {
                "the figures of each log, and of all logs together": "kvledger stats logs",
                "the figures of the newest log without its first 20 ms": "kvledger stats logs --newest --since 20ms",
            },
        ),
        "export": Command(
            "write a log as a trace for Perfetto, an HTML page for a ticket, or spans for OpenTelemetry",
            {
                ExitCode.SOUND: "the output is written, even if the log is damaged",
                ExitCode.DAMAGED: _UNREADABLE,
                ExitCode.NOTHING_CHECKED: f"the output is written, but for at least one log {_NOTHING}",
                ExitCode.TRY_AGAIN: "the endpoint of --otlp cannot be reached or accepts nothing at the moment, or the "
                "server of a NATS stream cannot be reached; try again later",
                ExitCode.REFUSED: "the endpoint of --otlp refused the spans, access to a NATS stream is refused, the "
                "stream does not exist, or an optional dependency is not installed",
            },
            {
                "an HTML page for a ticket": "kvledger export logs/2026-01-05 --html -o incident.html",
                "a trace for ui.perfetto.dev": "kvledger export logs/2026-01-05 --perfetto -o trace.json.gz",
            },
        ),
        "tables": Command(
            "write logs as Parquet files, one per table, for DuckDB, Polars and pandas",
            {
                ExitCode.SOUND: "the files are written, even if a log is damaged",
                ExitCode.DAMAGED: _UNREADABLE,
                ExitCode.NOTHING_CHECKED: f"the files are written, but for at least one log {_NOTHING}",
            },
            {
                "write every table except `violations`, of all logs": "kvledger tables logs -o tables",
                "write only the table `violations`, of all logs": "kvledger tables logs -o tables --table violations",
            },
        ),
        "core": Command(
            "show the states, handlers, extensions, rules and state transitions of this installation or of a log",
            {ExitCode.SOUND: "shown", ExitCode.DAMAGED: _UNREADABLE},
            {
                "the core that a connector would use here": "kvledger core",
                "the core that a log was written with": "kvledger core logs/2026-01-05",
            },
        ),
        "ship": Command(
            "copy logs into a NATS JetStream stream",
            {
                ExitCode.SOUND: "everything is in the stream",
                ExitCode.DAMAGED: "a log is damaged, or events were deleted before they were shipped; all other events "
                "are in the stream",
                ExitCode.TRY_AGAIN: "a part of the logs is not shipped yet; to continue, run the same command later",
                ExitCode.REFUSED: "the server refused access or refused a log, the stream does not exist, or the extra "
                "`nats` is not installed",
            },
            {
                "every log, until stopped": "kvledger ship logs --to nats://nats.example/LOGS --follow",
                "the logs in the stream": "kvledger ship --list nats://nats.example/LOGS",
            },
        ),
        "repro": Command(
            "write a test that reproduces an incident by repeating the recorded hook calls",
            {
                ExitCode.SOUND: "the test is written and has the expected result here: it fails, or with --pin it "
                "passes. Also if --no-run was given, so that the test was not run",
                ExitCode.DAMAGED: _UNREADABLE,
                ExitCode.DIVERGED: "the test is written, but does not have the expected result here: it passes, so it "
                "shows no bug, or with --pin it fails",
                ExitCode.NOTHING_CHECKED: "the log has no event, or its beginning is missing",
                ExitCode.NOT_VERIFIED: "the test is written, but could not be run here",
                ExitCode.USAGE: "wrong usage: for example, the log has no incident (and --pin is not given), or for a "
                "recorder's log neither --connector nor --run-recorded is given",
            },
            {
                "the first incident of a log": "kvledger repro logs/2026-01-06 -o test_incident.py",
                "the answers that one request got": "kvledger repro logs/2026-01-05 chat-17 --pin -o test_chat_17.py",
            },
            is_entry_point=True,
        ),
        "conformance": Command(
            "test whether a connector does what vLLM relies on",
            {
                ExitCode.SOUND: "no obligation is broken",
                ExitCode.RULE_BROKEN: "an obligation is broken, or a rule that belongs to no obligation is broken",
                ExitCode.NOTHING_CHECKED: "nothing could be checked: no obligation could be judged in any run",
            },
            {
                "a connector that vLLM registers": "kvledger conformance OffloadingConnector --seeds 5",
                "run only world 17": 'kvledger conformance connector:Mine --only "world 17"',
            },
        ),
        "check": Command(
            "report what a connector configuration for vLLM would do, without starting an engine; takes some seconds, "
            "because the command imports vLLM",
            {
                ExitCode.SOUND: "an engine would start with the configuration; if kvledger declines the model, the "
                "output has the reason",
                ExitCode.REFUSED: "an engine on this machine would refuse the configuration, and the output has the "
                "reason; or vLLM is not installed",
            },
            {
                "how many tokens a 1-GiB pool holds": 'kvledger check \'{"host_bytes": "1GiB"}\' --model models/llama',
                "whether a setting is valid": "kvledger check '{\"chunk_size\": 32}' --json",
            },
        ),
        "retire": Command(
            "delete the oldest segments of logs that are not being written",
            {ExitCode.SOUND: "deleted, or nothing to delete", ExitCode.DAMAGED: _UNREADABLE},
            {
                "list the segments to delete": "kvledger retire logs --max-bytes 2GiB --max-age 30d --dry-run",
                "delete segments, for example from cron": "kvledger retire logs --max-bytes 2GiB --max-age 30d",
            },
        ),
        "completion": Command(
            "print a script that lets your shell complete commands, options and paths",
            {ExitCode.SOUND: "printed"},
            {
                "for bash, in ~/.bashrc": 'eval "$(kvledger completion bash)"',
                "for fish; run this one time": "kvledger completion fish > ~/.config/fish/completions/kvledger.fish",
            },
        ),
    }
)
"""Name → command, in the order of the help text."""
