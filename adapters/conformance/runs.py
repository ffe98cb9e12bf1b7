"""Plays stories and worlds, reads the logs that they leave, and says which obligations a connector keeps."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from kvledger.adapters.conformance.obligations import OBLIGATIONS, Check, Met, Obligation
from kvledger.adapters.conformance.stage import Broken, RunOver, Stage
from kvledger.adapters.conformance.stories import STORIES
from kvledger.adapters.conformance.subject import Subject, log_directories
from kvledger.adapters.conformance.traffic import settings, traffic
from kvledger.adapters.logs.log import open_log
from kvledger.adapters.recorder import KVLedgerRecorder, payloads
from kvledger.adapters.recorder.extension import Recorder
from kvledger.adapters.simulation.clock import SimulatedClock
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

_CORE = Core.standard().extended(Recorder())
_TWICE = ", each lookup asked twice"


@attrs.frozen
class Run:
    """One thing to play, and its name, by which it is played again."""

    name: str
    story: str
    """Without what is varied: what obligations name."""
    play: Callable[[Stage], None]
    settings: Mapping[str, Any]
    asks_twice: bool


@attrs.frozen
class Outcome:
    """How a run went."""

    run: Run
    broken: tuple[Broken, ...]
    met: frozenset[Met]
    log: Path | None
    """Kept where something is broken."""
    remarks: tuple[str, ...]
    num_events: int
    num_steps: int


@attrs.frozen
class Finding:
    """What is to say of one obligation."""

    obligation: Obligation
    broken_in: tuple[tuple[Outcome, Broken], ...]
    """The first break of each run."""
    reason: str
    """Why it could not be judged; empty where it was."""

    @property
    def verdict(self) -> str:
        """In one word."""
        return "broken" if self.broken_in else "not judged" if self.reason else "kept"


def runs(seeds: range) -> Iterator[Run]:
    """Every story, twice, then the worlds; every second of these asks twice."""
    for name, play in STORIES.items():
        for asks_twice in (False, True):
            yield Run(name + _TWICE * asks_twice, name, play.story, play.settings, asks_twice)
    for seed in seeds:
        yield world(seed)


def world(seed: int) -> Run:
    """The world of a seed."""

    def play(stage: Stage) -> None:
        traffic(stage, seed)

    return Run(f"world {seed}", "", play, settings(seed), seed % 2 == 1)


def played(run: Run, subject: Subject, directory: Path) -> Outcome:
    """Play it, and read its log.

    Raises:
        Exception: the engine cannot be built with that connector.
    """
    log_dir = directory / run.name.replace(" ", "-").replace(",", "").replace("'", "")
    shutil.rmtree(log_dir, ignore_errors=True)
    clock = SimulatedClock()
    with clock.read_by(KVLedgerRecorder):
        stage = Stage(subject, log_dir, clock, asks_twice=run.asks_twice, **run.settings)
        with suppress(RunOver):
            run.play(stage)
            stage.end()
        with suppress(RunOver):
            stage.shut_down()
    broken, met, num_events = list(stage.broken), set(stage.met), 0
    logs = log_directories(log_dir)
    for path in logs:
        log = open_log(path, _CORE)
        audit = Audit(log.core, log.configuration, start=log.start())
        audit.run_frames(log.trusted_frames())
        broken += [Broken(each.rule, each.detail, each.sequence) for each in audit.violations]
        num_events += audit.num_events
        met.update(_met(event for _, event in open_log(path, _CORE).trusted_events()))
    if not broken:
        shutil.rmtree(log_dir, ignore_errors=True)
    elif stage.has_lost:
        met.add(Met.FAILED_LOAD)  # in whichever way it was noticed
    of_scheduler = next((path for path in logs if "-worker-" not in path.name), None)
    log_path = of_scheduler if broken else None
    return Outcome(
        run, tuple(broken), frozenset(met), log_path, tuple(stage.remarks), num_events, stage.engine.num_steps
    )


def built(run: Run, subject: Subject, directory: Path) -> None:
    """Only start its engine, and stop it again.

    Raises:
        Exception: whatever the connector raises where it is made.
    """
    log_dir = directory / "start"
    try:
        Stage(subject, log_dir, SimulatedClock(), asks_twice=False, **run.settings).shut_down()
    finally:
        shutil.rmtree(log_dir, ignore_errors=True)


def _met(events: Iterator[e.Event]) -> Iterator[Met]:
    """What happened in a log that obligations need."""
    for event in events:
        if isinstance(event, e.LoadIssued):
            yield from (Met.LOAD, *((Met.ASYNC_LOAD,) if event.is_async else ()))
        elif isinstance(event, e.LoadFailed):
            yield Met.FAILED_LOAD
        elif isinstance(event, e.ExtensionObserved):
            yield from _met_in(Recorder.payload_of(event))


def _met_in(payload: object) -> Iterator[Met]:
    if isinstance(payload, payloads.LookupReturned):
        yield from (Met.LOOKUP, *((Met.ANSWER,) if payload.num_external_tokens else ()))
    elif isinstance(payload, payloads.EndReturned) and payload.keeps_blocks:
        yield Met.KEPT
    elif isinstance(payload, payloads.Transferred):
        yield from (Met.COPY, *(() if payload.is_load else (Met.SAVE,)))


def findings(outcomes: Sequence[Outcome]) -> list[Finding]:
    """What all runs together say of each obligation, in the order of the contract."""
    return [_finding(obligation, outcomes) for obligation in OBLIGATIONS.values()]


def _finding(obligation: Obligation, outcomes: Sequence[Outcome]) -> Finding:
    concerned = [each for each in outcomes if not obligation.stories or each.run.story in obligation.stories]
    judged = [each for each in concerned if obligation.needs in {Met.ALWAYS, *each.met}]
    told = [each for each in outcomes if each.run.story]  # a world may lead into any situation
    elsewhere = {_kind(each) for outcome in told if outcome not in concerned for each in outcome.broken}
    broken_in, is_in_doubt = [], False
    for outcome in judged:
        broken = [each for each in outcome.broken if each.check in obligation.checks]
        shared = {Check.KV_RIGHT} if obligation.may_share_its_cause else set()
        sure = (each for each in broken if each.check not in shared and _kind(each) not in elsewhere)
        first = next(sure, None)
        if first is not None:
            broken_in.append((outcome, first))
        is_in_doubt |= bool(broken)
    if broken_in:
        reason = ""
    elif not obligation.checks:
        reason = obligation.limit or "neither the log nor the simulation shows it"
    elif not concerned:
        reason = "none of its stories was played"
    elif not judged:
        reason = obligation.needs.value
    elif is_in_doubt:
        reason = "what went wrong has another cause, or one that is not told apart from this one"
    elif Check.KV_RIGHT in obligation.checks and all(Met.WORKER not in each.met for each in judged):
        reason = Met.WORKER.value
    else:
        reason = ""
    return Finding(obligation, tuple(broken_in), reason)


def _kind(broken: Broken) -> tuple[str, str]:
    """What two breaks have in common that have one cause: all but ids and numbers."""
    return broken.check, re.sub(r"\S*\d\S*", "#", broken.detail)


def unassigned(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Broken]]:
    """Breaks of rules that no obligation names: of vLLM's own or of kvledger's making, or a gap of the contract."""
    named = {check for obligation in OBLIGATIONS.values() for check in obligation.checks}
    return [(outcome, each) for outcome in outcomes for each in outcome.broken if each.check not in named]
