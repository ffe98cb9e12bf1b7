"""Plays transcripts: observations in a terse form, and below each block what was decided and how its requests stand.

A transcript is text. A paragraph with a line `----` is a block: commands above it, their output below. All other
paragraphs are prose. Etcd raft's testdata is the model.

    ledger block=16 chunk=16 slots=8      begins a ledger; more keys of `LedgerConfiguration`, handlers=module:Class
    arrive a 40 keys=2                    what happens, see `commands.py`
    audit                                 what the audit says of the log so far

Decisions are written with their life, `a 0.1`: ordinal and generation. `!` begins what the audit finds on the way. How
a request stands is written where it has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvledger.adapters.core import composed_core
from kvledger.lifecycle import Core, RequestRecord
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from lifecycle_driver.commands import Commands, given_in
from lifecycle_driver.driver import Driver
from lifecycle_driver.rows import Row, rows_used

SEPARATOR = "----"
_OF_THE_LIFE = {"request_id", "ordinal", "generation", "cause", "time_ns"}


def replayed(text: str, used: set[Row] | None = None) -> str:
    """The transcript with the output that its commands have today; the rows that moved a state go into `used`."""
    player = _Player()
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        commands, separator, _ = paragraph.partition(f"\n{SEPARATOR}")
        if separator:
            paragraphs.append("\n".join([commands, SEPARATOR, *player.play(commands.splitlines())]))
        else:
            paragraphs.append(paragraph)
    if used is not None:
        used |= player.rows_used
    return "\n\n".join(paragraphs) + "\n"


class _Player:
    def __init__(self) -> None:
        self._used: set[Row] = set()
        self._begin({"block": "16", "chunk": "16", "slots": "8"})

    def play(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            name, *words = line.split()
            if name == "ledger":
                self._used = self.rows_used
                self._begin(given_in(words))
                continue
            if name == "audit":
                yield self._judged()
                continue
            self._commands.carry_out(name, words)
            yield from self._news()
        yield from self._standing()

    @property
    def rows_used(self) -> set[Row]:
        """The rows that moved a state in any of its ledgers."""
        return self._used | rows_used(Core.standard(), self._driver.configuration, self._driver.observed)

    def _begin(self, given: dict[str, str]) -> None:
        handlers = given.pop("handlers", "").split(",")
        sizes = {f"{name}_size": int(given.pop(name)) for name in ("block", "chunk")}
        choices = {name: int(value) for name, value in given.items() if name != "slots"}
        named = [handler for handler in handlers if handler]
        self._driver = Driver(core=composed_core(named), num_slots=int(given["slots"]), **sizes, **choices)
        self._commands = Commands(self._driver)
        # Of its own, also where a handler keeps a memory, as none should.
        self._audit = Audit(composed_core(named), self._driver.configuration)
        self._num_shown = self._num_found = 0
        self._stands: dict[str, str] = {}

    # --- output ----------------------------------------------------------------------------------

    def _news(self) -> Iterator[str]:
        new = list(enumerate(self._driver.observed, 1))[self._num_shown :]
        self._num_shown = len(self._driver.observed)
        self._audit.take_frame(new)
        for sequence, event in new:
            indent = "  " if event.is_decision else ""
            yield f"{indent}{sequence} {event_line(event, self._commands.names)}"
        for violation in self._audit.violations[self._num_found :]:
            yield f"! {violation.rule} at {violation.sequence}: {violation.detail}"
        self._num_found = len(self._audit.violations)

    def _standing(self) -> Iterator[str]:
        tracker = self._driver.projections.tracker
        stands = {
            f"{record.request_id} {record.ordinal}.{record.generation}": _state_of(
                record, tracker.num_computed_tokens(record)
            )
            for record in tracker
        }
        known = {name.split()[0] for name in stands}
        for name, state in stands.items():
            if self._stands.get(name) != state:
                yield f"{name}: {state}"
        for name in dict.fromkeys(name.split()[0] for name in self._stands):
            if name not in known:
                yield f"{name}: released"
        self._stands = stands

    def _judged(self) -> str:
        self._audit.finish()
        differences = [f"! decided again otherwise: {each}" for each in self._audit.divergences]
        broken = ", ".join(sorted(self._audit.num_violations))
        return "\n".join([*differences, f"broken: {broken}"]) if not self._audit.is_sound else "sound"


def _state_of(record: RequestRecord, num_computed_tokens: int) -> str:
    regions = [record.state.value]
    regions += ["holds blocks"] if record.blocks != "none" else []
    regions += ["computes first"] if record.first == "computes_first" else []
    regions += ["stale"] if record.current == "stale" else []
    regions += ["quarantined"] if record.trust == "quarantined" else []
    return f"{', '.join(regions)}; {num_computed_tokens} of {record.num_tokens} tokens"


def event_line(event: e.Event, names: Mapping[bytes, str]) -> str:
    """An event in one line, without times and causes; `names`: key → chunk."""
    words = [event.id]
    if isinstance(event, e.RequestEvent):
        words.append(event.request_id)
    if isinstance(event, e.RequestDecision):
        words.append(f"{event.ordinal}.{event.generation}")
    if event.is_decision:
        fields = [name for name in event.__struct_fields__ if name not in _OF_THE_LIFE]
        words += filter(None, (_field(name, getattr(event, name), names) for name in fields))
    elif isinstance(event, e.StepScheduled | e.EffectsDelivered):
        fields = [name for name in event.__struct_fields__ if isinstance(getattr(event, name), tuple)]
        words += [f"{name}={list(value)}" for name in fields if (value := getattr(event, name))]
    return " ".join(words)


def _field(name: str, value: Any, names: Mapping[bytes, str]) -> str:
    if isinstance(value, bool):
        return name if value else ""
    if name == "keys":
        value = " ".join(names.get(key, key.hex()) for key in value)
    elif isinstance(value, tuple):
        value = _ranges(value)
    elif isinstance(value, str) and " " in value:
        value = repr(value)
    short = name.removeprefix("num_").removesuffix("_tokens")
    return "" if value == "" else f"{short}={value}"


def _ranges(numbers: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
