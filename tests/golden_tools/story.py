"""A story in words of the domain, and the log that a real ledger and a real store make of it.

A story is text. A line that begins with a number is a moment: milliseconds since the log was opened, and a command of
`lifecycle_driver/commands.py`. The indented lines below it are the events that the log then has, with their sequence
numbers, in the form of the transcripts. Lines that begin with `#` are prose.

    ledger block=16 chunk=32 slots=8
    # A request arrives.
    0 arrive chat 72 keys=2
      1 request.arrived chat
      2 chunk.keys_observed chat
    20 report 1 bytes=200 took=0.5 ranks=0,1    0.5 ms as the workers measured it; default: all ranks

The expected output of each tool is derived from these lines. A test compares them with the log. So if the ledger
decides otherwise than before, that test fails and shows the event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

import attrs
from lifecycle_driver import Driver
from lifecycle_driver.commands import Commands, given_in
from lifecycle_driver.transcript import event_line
from stored_logs import header_of

from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle.codec import EventDecoder
from kvledger.storage.events import LogReader, SegmentEventStore

FOLDER = Path(__file__).parent / "stories"
_NS_PER_MS = 1_000_000


@attrs.frozen
class Moment:
    """One line with a time."""

    time_ns: int
    words: Sequence[str]
    """The command and what belongs to it."""


class _TimedDriver(Driver):
    """A driver whose clock the story sets."""

    now_ns = 0

    def _now(self) -> int:
        return self.now_ns


class _StoryCommands(Commands):
    """Reports have sizes, durations and ranks."""

    def _report(self, *job_ids: str, bytes: str = "0", took: str = "0", ranks: str = "", error: str = "") -> None:  # noqa: A002
        all_ranks = range(self.driver.configuration.num_ranks)
        for job_id in job_ids:
            self.driver.report(
                int(job_id),
                ok=not error,
                error=error,
                ranks=tuple(map(int, ranks.split(","))) if ranks else tuple(all_ranks),
                num_bytes=int(bytes),
                duration_ns=_ns(took),
            )


@attrs.frozen
class Story:
    """What happened."""

    text: str

    @property
    def moments(self) -> Iterator[Moment]:
        """In their order."""
        for line in self.text.splitlines():
            if line[:1].isdigit():
                time, *words = line.split()
                yield Moment(_ns(time), words)

    @property
    def configuration(self) -> LedgerConfiguration:
        """That of the line `ledger`."""
        (line,) = (line for line in self.text.splitlines() if line.startswith("ledger "))
        given = given_in(line.split())
        sizes = {name: int(given.pop(word)) for name, word in _SIZES.items()}
        switches = {field.name for field in attrs.fields(LedgerConfiguration) if isinstance(field.default, bool)}
        choices = {name: bool(int(value)) if name in switches else int(value) for name, value in given.items()}
        return LedgerConfiguration(**{**_DEFAULTS, **sizes, **choices})

    def write(self, folder: Path) -> Path:
        """Make the log in a new folder, one frame for each moment, and close it."""
        self._play(folder)
        return folder

    def with_events(self, folder: Path) -> str:
        """Make the log in a new folder; return the story with the log's events below each moment."""
        names = self._play(folder)
        reader = LogReader(folder)
        decoder = EventDecoder(Core.standard(), reader.header)
        frames = iter(list(reader))
        lines: list[str] = []
        for line in self.text.splitlines():
            if line.startswith(" "):
                continue
            lines.append(line)
            if line[:1].isdigit():
                frame = next(frames)
                for sequence, event in enumerate(decoder.decode_frame(frame.payload).events, frame.first_sequence):
                    lines.append(f"{'    ' if event.is_decision else '  '}{sequence} {event_line(event, names)}")
        return "\n".join(lines)

    def _play(self, folder: Path) -> dict[bytes, str]:
        """Make the log; return key → name of the chunk."""
        configuration = self.configuration
        store = SegmentEventStore.create(folder, header_of(configuration))
        driver = _TimedDriver(sink=store, **attrs.asdict(configuration))
        commands = _StoryCommands(driver)
        for moment in self.moments:
            driver.now_ns = moment.time_ns
            commands.carry_out(moment.words[0], moment.words[1:])
            driver.ledger.commit()
        store.close()
        return commands.names


_SIZES = {"block_size": "block", "chunk_size": "chunk", "num_slots": "slots"}
_DEFAULTS = {"max_deferred_lookups": 0, "max_silent_ms": 0}
"""Those of the transcripts."""


def _ns(milliseconds: str) -> int:
    return int(Decimal(milliseconds) * _NS_PER_MS)


def story(name: str) -> Story:
    """One of `stories/`."""
    return Story((FOLDER / f"{name}.txt").read_text())
