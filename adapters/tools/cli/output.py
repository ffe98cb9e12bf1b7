"""Prints results: as JSON lines with `--json`, as coloured text on a terminal, as text without colours in a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import attrs
import msgspec
from cyclopts import Parameter
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvledger.adapters.figures import Figures
from kvledger.adapters.tools.cli.streams import notice_reader
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode, unreadable_text
from kvledger.adapters.tools.logs.clock import Clock
from kvledger.adapters.tools.logs.coverage import readable
from kvledger.adapters.tools.logs.describe import event_fields
from kvledger.adapters.tools.logs.ending import ending_text, under_way_text
from kvledger.adapters.tools.logs.facts import figures_in_words
from kvledger.adapters.tools.logs.findings import FindingList, difference_text
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.under_way import last_under_way
from kvledger.adapters.tools.logs.visible import remark, visible
from kvledger.lifecycle import Core
from kvledger.lifecycle.audit import Judgement
from kvledger.storage.events import HowEnded

_PIPED_WIDTH = 100_000
"""Columns for a pipe, so that nothing is wrapped or cut."""
_BYTES_PER_UPDATE = 1 << 18
_GAP = 2
"""Characters between two columns of a table."""
_FOLDED = 28
"""When `table` chooses columns, it counts at most this many characters of a column. The terminal folds longer text."""
_LEAST_PROSE = 34
"""Smallest width, in characters, of a column into which text is folded."""
_BELOW = 4
"""Indent of text that has no room on the line of its name."""


class Output:
    """Writes results to stdout, and remarks and progress to stderr. Escapes control characters."""

    def __init__(self, *, is_json: bool) -> None:
        self.is_json = is_json
        self.has_many_logs = False
        """Whether the command reads several logs."""
        self.failures: list[ExitCode] = []
        """Exit codes of logs that could not be read or checked."""
        self._live: Live | None = None
        is_terminal = sys.stdout.isatty()
        self._console = Console(
            file=sys.stdout,
            width=None if is_terminal else _PIPED_WIDTH,
            force_terminal=None if is_terminal else False,
            no_color=None if is_terminal else True,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=False,
        )

    @property
    def is_terminal(self) -> bool:
        """Whether stdout is a terminal."""
        return self._console.is_terminal

    @contextlib.contextmanager
    def screen(self) -> Iterator[None]:
        """Let `show` use the whole terminal inside this context. At the end, restore the terminal's content."""
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def show(self, drawn: RenderableType) -> None:
        """Print `drawn`. Inside `screen`, replace the content of the terminal by `drawn`."""
        if self._live is None:
            self._print(drawn)
        else:
            self._live.update(drawn, refresh=True)

    def _print(self, drawn: RenderableType) -> None:
        if self.is_terminal:
            self._console.print(drawn)
            return
        with self._console.capture() as capture:
            self._console.print(drawn)
        sys.stdout.writelines(line.rstrip() + "\n" for line in capture.get().splitlines())

    def record(self, type_name: str, fields: Mapping[str, object]) -> None:
        """Print one JSON line."""
        line = msgspec.json.encode({"type": type_name, **fields}, enc_hook=str)
        sys.stdout.write(visible(line.decode()) + "\n")

    def line(self, text: str = "", style: str = "", *, indent: int | None = None) -> None:
        """Print one line of plain text. On a terminal, wrapped lines begin after `indent` columns."""
        if indent is None:
            indent = len(text) - len(text.lstrip())
        self._folded(Text(visible(text[:indent]), style), Text(visible(text[indent:]), style))

    def raw(self, text: str) -> None:
        """Write text unchanged, so that a program can read it."""
        sys.stdout.write(text)

    def field(self, name: str, value: str, style: str = "") -> None:
        """Print a name and its value, aligned with other fields."""
        self._folded(Text(f"{name:<11} ", "dim"), Text(visible(value), style))

    def _folded(self, before: Text, text: Text) -> None:
        indent, width = before.cell_len, self._console.width
        if width - indent < min(_LEAST_PROSE, width // 2):  # no room on the line
            if before.plain.strip():
                self._console.print(before)
            before, indent = Text(" " * _BELOW), _BELOW
        lines = text.wrap(self._console, max(1, width - indent))
        for number, line in enumerate(lines or [text]):
            line.rstrip()
            self._console.print(Text.assemble(Text(" " * indent) if number else before, line))

    def figures(
        self, figures: Figures, *, has_own_copies: bool, num_deferrals: int | None = None, has_requests: bool = True
    ) -> None:
        """Print what the cache did. If `has_requests` is false, as for a worker's log, print only the faults."""
        has_faults = figures.num_violations + figures.num_hook_failures > 0
        lines = figures_in_words(figures, has_own_copies=has_own_copies, num_deferrals=num_deferrals)
        for name, text in lines.items():
            if not has_requests and name != "faults":
                continue
            self.field(name, text, "red" if name == "faults" and has_faults else "")

    def table(
        self,
        columns: Mapping[str, str],
        rows: Sequence[Sequence[str]],
        *,
        hidden: Sequence[str] = (),
        optional: Sequence[str] = (),
    ) -> None:
        """Print rows of plain text.

        Args:
            columns: column name → alignment: "left" or "right".
            rows: for each row, one text per column.
            hidden: columns to leave out.
            optional: columns to leave out, in this order, if the terminal is too narrow.
        """
        shown = {name: place for place, name in enumerate(columns) if name not in hidden}
        left_out = []
        if self._console.is_terminal:
            widths = {
                name: min(_FOLDED, max(map(cell_len, (name, *(row[place] for row in rows)))))
                for name, place in shown.items()
            }
            for name in (name for name in optional if name in shown):
                if sum(widths.values()) + _GAP * (len(widths) - 1) <= self._console.width:
                    break
                left_out.append(name)
                del widths[name], shown[name]
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in shown:
            justify: Literal["left", "right"] = "right" if columns[name] == "right" else "left"
            table.add_column(name, justify=justify, overflow="fold")
        for row in rows:
            table.add_row(*(Text(visible(row[place])) for place in shown.values()))
        self._print(table)
        if left_out:
            self.line(f"no room for the columns {', '.join(left_out)}; widen the terminal, or use --json", style="dim")

    def flush(self) -> None:
        """Flush stdout. Raise `OutputFailed` if the program that reads it has ended."""
        sys.stdout.flush()
        notice_reader()

    @contextlib.contextmanager
    def apart_from_others(self, path: Path) -> Iterator[None]:
        """Inside this context, report the error if a log cannot be read or checked. With only one log, raise it."""
        try:
            yield
        except (CommandFailed, OSError) as error:
            exit_code = ExitCode.DAMAGED if isinstance(error, OSError) else error.exit_code
            if not self.has_many_logs or exit_code not in {ExitCode.DAMAGED, ExitCode.NOTHING_CHECKED}:
                raise
            if exit_code is ExitCode.DAMAGED:
                self.unreadable(path, error)
            else:
                self.nothing(path, str(error))

    def unreadable(self, path: Path, error: Exception) -> None:
        """Report a log that cannot be read. The log counts as `DAMAGED` in the command's exit code."""
        reason = unreadable_text(error) if isinstance(error, OSError) else str(error)
        if self.is_json:
            self.record("unreadable", {"path": str(path), "reason": reason})
        self.remark(reason)
        self.failures.append(ExitCode.DAMAGED)

    def nothing(self, path: Path, reason: str) -> None:
        """Report why nothing in a log could be checked. The log counts as `NOTHING_CHECKED` in the exit code."""
        self._nothing(path, reason)
        self.failures.append(ExitCode.NOTHING_CHECKED)

    def _nothing(self, path: Path, reason: str) -> None:
        if self.is_json:
            self.record("nothing_checked", {"path": str(path), "reason": reason})
        self.remark(reason)

    def coverage_of(self, log: StoredLog, selection: Selection, *, is_found: bool = True) -> ExitCode:
        """Return the exit code for a log. If the selected part could not be checked, report the reason.

        Call this after the log was read. `is_found` is whether the selected request lived in the selected part.
        """
        reason = readable(log, selection).why_nothing
        if not reason and not is_found:
            reason = f"{selection.request_id} has no event in the selected part"
        if not reason:
            return ExitCode.SOUND
        self._nothing(log.path, f"{log.path}: nothing could be checked: {reason}")
        return ExitCode.DAMAGED if log.damage and not log.num_events else ExitCode.NOTHING_CHECKED

    def remark(self, text: str) -> None:
        """Print to stderr a message that is not a result."""
        remark(text)

    def damage_of(self, log: StoredLog) -> None:
        """Report all damage that was found when the log was read."""
        for damage in log.damage:
            self.remark(str(damage))

    def waiting(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Show what the command waits for, if stderr is a terminal."""
        return Console(file=sys.stderr).status(what) if sys.stderr.isatty() else contextlib.nullcontext()

    @contextlib.contextmanager
    def progress(self, log: StoredLog, what: str) -> Iterator[None]:
        """Show how much of the log has been read, if stderr is a terminal."""
        if not sys.stderr.isatty():
            yield
            return
        with progress_in_bytes() as progress:
            task = progress.add_task(what, total=log.total_bytes())
            unseen = 0

            def read(num_bytes: int) -> None:
                nonlocal unseen
                unseen += num_bytes
                if unseen >= _BYTES_PER_UPDATE:
                    progress.advance(task, unseen)
                    unseen = 0

            log.on_bytes = read
            try:
                yield
            finally:
                log.on_bytes = None


Written = Annotated[Output, Parameter(parse=False)]
"""The output of a command: a parameter that is not an argument of the command line."""


def progress_in_bytes() -> Progress:
    """Return a progress bar on stderr that disappears at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)


def show_title(output: Output, request_id: str, clock: Clock, time_ns: int) -> None:
    """Print the title of a request's timeline: the request's id, and when the timeline begins."""
    at = clock.date_and_time(time_ns)
    clock.new_day(time_ns)
    output.line(f"{request_id}, {at}" if at else request_id, style="bold")


def show_ending(output: Output, log: StoredLog, num_open: int | None) -> None:
    """Print how the log ended."""
    ending = log.ending
    call = None if ending.how is HowEnded.CLOSED else last_under_way(log.core, log.last_events)
    if output.is_json:
        missing = None if ending.missing is None else attrs.asdict(ending.missing)
        output.record(
            "end",
            {
                "path": str(log.path),
                "end": ending.how.value,
                "detail": ending.detail,
                "missing": missing,
                "num_open_requests": num_open,
                "under_way": None if call is None else attrs.asdict(call),
            },
        )
        return
    style = {HowEnded.CLOSED: "", HowEnded.OPEN: ""}.get(ending.how, "yellow")
    output.field("end", ending_text(ending, num_open), style if ending.missing is None else "red")
    if call is not None:
        output.field("then", under_way_text(call, log), "yellow")


def show_decisions(output: Output, judgement: Judgement, core: Core | None = None) -> None:
    """Print how many decisions differ from those in the log. With `core`, print the first difference, too."""
    different = (
        ("decisions", "repeated, ", judgement.divergences),
        ("reference", "", judgement.reference_differences),
    )
    for name, before, found in different:
        if found:
            differ = "1 differs, at event" if found.num_found == 1 else f"{found.num_found} differ, the first at event"
            first = "" if core is None else f": {difference_text(found[0], core)}"
            output.field(name, f"{before}{differ} {found[0].sequence}{first}", "red")
        elif before and judgement.unfoldable is None:
            output.field(name, f"{before}all equal", "green")
    if judgement.unfoldable is not None:
        output.field("decisions", str(judgement.unfoldable), "red")


def record_divergences(output: Output, judgement: Judgement, findings: FindingList | None = None) -> None:
    """Print each decision that differs from the log, and the event that cannot be folded, as JSON objects.

    With `findings`, each object also has the sequence number of the first event of the finding to which it belongs.
    """

    def belongs(item: object) -> dict[str, object]:
        return {} if findings is None else {"finding": findings.first_sequence(item)}

    different = (("divergence", judgement.divergences), ("reference_difference", judgement.reference_differences))
    for kind, divergences in different:
        for each in divergences:
            recorded, decided = event_fields(each.recorded), event_fields(each.decided)
            output.record(kind, {"sequence": each.sequence, "recorded": recorded, "decided": decided, **belongs(each)})
    if (unfoldable := judgement.unfoldable) is not None:
        event = event_fields(unfoldable.event)
        fields = {"sequence": unfoldable.sequence, "event": event, "error": unfoldable.error}
        output.record("unfoldable", {**fields, **belongs(unfoldable)})
