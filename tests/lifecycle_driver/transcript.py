"""Plays transcripts: observations in a terse form, and below each block what was decided and how its requests stand.

A transcript is text. A paragraph with a line `----` is a block: commands above it, their output below. All other
paragraphs are prose. Etcd raft's testdata is the model.

    ledger block=16 chunk=16 slots=8      begins a ledger; more keys of `LedgerConfiguration`, handlers=module:Class
    arrive a 40 keys=2                    `a` arrives with 40 prompt tokens; of=x takes the keys of another document
    keys a 1 first=2                      one more key becomes known, that of chunk 2
    lookup a 0/40                         0 of 40 known tokens are computed; how much can be loaded?
    allocate a 1-3 load=32                it gets blocks 1 to 3; 32 tokens of the answer are taken up
    blocks a 1-3                          that it holds them is seen without an allocation: a hook has failed
    step a:0+40/40 b:20+1/21@7~1          40 tokens behind the first 0 of 40; for `b` block 7 is new, 1 token in flight
    preempt a 40                          its blocks are taken; 40 tokens had settled
    report 1 2 error=text                 all ranks report jobs 1 and 2; with an error, as failed
    deliver workers                       with the step they are given what they are owed
    deliver vllm reported=a               it is told what it is owed; of `a` it has the workers' report
    fail build_connector_meta             a hook fails; with a request id, in its name
    refuse a 1-2                          its load will not be, these blocks were to be filled
    unfilled 1-3                          these blocks could not be filled
    rollback a 16                         it counts 16 computed tokens again
    continue a 40/60                      a session's next turn
    finish a 40/41 FINISHED_ABORTED       it ends: 40 tokens settled of 41 known
    reset                                 everything cached is stale
    audit                                 what the audit says of the log so far

Decisions are written with their life, `a 0.1`: ordinal and generation. `!` begins what the audit finds on the way. How
a request stands is written where it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvledger.adapters.core import composed_core
from kvledger.lifecycle import Channel, Core, RequestRecord, Scheduled
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from lifecycle_driver.driver import Driver, keys_of
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
            given = dict(word.split("=", 1) for word in words if "=" in word)
            if name == "ledger":
                self._used = self.rows_used
                self._begin(given)
                continue
            if name == "audit":
                yield self._judged()
                continue
            command: Callable[..., None] = getattr(self, f"_{name}")
            command(*(word for word in words if "=" not in word), **given)
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
        # Of its own, also where a handler keeps a memory, as none should.
        self._audit = Audit(composed_core(named), self._driver.configuration)
        self._num_shown = self._num_found = 0
        self._stands: dict[str, str] = {}
        self._names: dict[bytes, str] = {}

    # --- commands --------------------------------------------------------------------------------

    def _arrive(self, request_id: str, num_prompt_tokens: str, keys: str = "0", of: str = "") -> None:
        self._driver.arrive(request_id, int(num_prompt_tokens))
        if int(keys):
            self._keys(request_id, keys, of=of)

    def _keys(self, request_id: str, num_keys: str, first: str = "0", of: str = "") -> None:
        known = keys_of(of or request_id, int(num_keys), int(first))
        self._names.update({key: f"{of or request_id}/{chunk}" for chunk, key in enumerate(known, int(first))})
        self._driver.keys(request_id, int(first), known)

    def _lookup(self, request_id: str, counts: str) -> None:
        self._driver.observe(e.LookupRequested(request_id, *_counts(counts), self._driver._now()))

    def _allocate(self, request_id: str, blocks: str, load: str = "0") -> None:
        self._driver.allocate(request_id, _numbers(blocks), int(load))

    def _blocks(self, request_id: str, blocks: str) -> None:
        self._driver.observe(e.BlockTableObserved(request_id, _numbers(blocks), self._driver._now()))

    def _step(self, *requests: str) -> None:
        self._driver.schedule(*map(_scheduled, requests))

    def _preempt(self, request_id: str, num_settled_tokens: str) -> None:
        self._driver.preempt(request_id, int(num_settled_tokens))

    def _report(self, *job_ids: str, error: str = "") -> None:
        for job_id in job_ids:
            self._driver.report(int(job_id), ok=not error, error=error, num_ranks=self._driver.configuration.num_ranks)

    def _deliver(self, channel: str, reported: str = "") -> None:
        self._driver.deliver(Channel(channel), reported=filter(None, [reported]))

    def _fail(self, hook: str, request_id: str = "") -> None:
        self._driver.observe(e.HookFailed(hook, request_id, "broken", self._driver._now()))

    def _refuse(self, request_id: str, blocks: str) -> None:
        self._driver.observe(e.LoadRefused(request_id, _numbers(blocks), self._driver._now()))

    def _unfilled(self, blocks: str) -> None:
        self._driver.observe(e.LoadErrorsObserved(_numbers(blocks), self._driver._now()))

    def _rollback(self, request_id: str, num_computed_tokens: str) -> None:
        self._driver.roll_back(request_id, int(num_computed_tokens))

    def _continue(self, request_id: str, counts: str) -> None:
        self._driver.continue_session(request_id, *_counts(counts))

    def _finish(self, request_id: str, counts: str, status: str = "FINISHED_STOPPED") -> None:
        self._driver.observe(e.RequestFinished(request_id, status, *_counts(counts), self._driver._now()))

    def _reset(self) -> None:
        self._driver.reset()

    # --- output ----------------------------------------------------------------------------------

    def _news(self) -> Iterator[str]:
        new = list(enumerate(self._driver.observed, 1))[self._num_shown :]
        self._num_shown = len(self._driver.observed)
        self._audit.take_frame(new)
        for sequence, event in new:
            indent = "  " if event.is_decision else ""
            yield f"{indent}{sequence} {self._told(event)}"
        for violation in self._audit.violations[self._num_found :]:
            yield f"! {violation.rule} at {violation.sequence}: {violation.detail}"
        self._num_found = len(self._audit.violations)

    def _told(self, event: e.Event) -> str:
        words = [event.id]
        if isinstance(event, e.RequestEvent):
            words.append(event.request_id)
        if isinstance(event, e.RequestDecision):
            words.append(f"{event.ordinal}.{event.generation}")
        if event.is_decision:
            names = [name for name in event.__struct_fields__ if name not in _OF_THE_LIFE]
            words += filter(None, (self._field(name, getattr(event, name)) for name in names))
        elif isinstance(event, e.StepScheduled | e.EffectsDelivered):
            names = [name for name in event.__struct_fields__ if isinstance(getattr(event, name), tuple)]
            words += [f"{name}={list(value)}" for name in names if (value := getattr(event, name))]
        return " ".join(words)

    def _field(self, name: str, value: Any) -> str:
        if isinstance(value, bool):
            return name if value else ""
        if name == "keys":
            value = " ".join(self._names.get(key, key.hex()) for key in value)
        elif isinstance(value, tuple):
            value = _ranges(value)
        elif isinstance(value, str) and " " in value:
            value = repr(value)
        short = name.removeprefix("num_").removesuffix("_tokens")
        return "" if value == "" else f"{short}={value}"

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


def _counts(text: str) -> tuple[int, int]:
    first, second = map(int, text.split("/"))
    return first, second


def _numbers(text: str) -> tuple[int, ...]:
    parts = (part.partition("-") for part in text.split(",") if part)
    return tuple(number for first, _, last in parts for number in range(int(first), int(last or first) + 1))


def _ranges(numbers: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _scheduled(text: str) -> Scheduled:
    text, _, in_flight = text.partition("~")
    text, _, blocks = text.partition("@")
    request_id, counts = text.split(":")
    computed, _, rest = counts.partition("+")
    num_scheduled_tokens, num_tokens = _counts(rest)
    return Scheduled(request_id, int(computed), num_scheduled_tokens, num_tokens, _numbers(blocks), int(in_flight or 0))
