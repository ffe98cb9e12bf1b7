"""Plays scenarios and worlds, audits their logs, and decides which obligations a connector keeps."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from kvledger.adapters.lab.conformance.harness import Failure, Harness, RunOver
from kvledger.adapters.lab.conformance.obligations import OBLIGATIONS, Check, Obligation, Precondition
from kvledger.adapters.lab.conformance.scenarios import SCENARIOS
from kvledger.adapters.lab.conformance.subject import Subject, log_directories
from kvledger.adapters.lab.conformance.traffic import settings, traffic
from kvledger.adapters.lab.simulation.clock import SimulatedClock
from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.recorder import KVLedgerRecorder
from kvledger.adapters.recorder.log import STOPPED as RECORDING_STOPPED
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

STOPPED = "EXTENSION_STOPPED"
"""Check that fails if a log is not complete because the recorder, or another extension, was stopped."""
_CORE = Core.standard().extended(Recorder())
_OUTSIDE_OF_LOG = frozenset({*Check, "RECORDED"})
"""Checks that need no event of the recorder."""
_TWICE = ", each lookup asked twice"


@attrs.frozen
class Run:
    """A scenario or a world to play. `--only` selects it by its name."""

    name: str
    scenario: str
    """The scenario's name, by which obligations refer to it; empty for a world."""
    play: Callable[[Harness], None]
    settings: Mapping[str, Any]
    asks_twice: bool


@attrs.frozen
class Outcome:
    """The result of a run."""

    run: Run
    failures: tuple[Failure, ...]
    met: frozenset[Precondition]
    log: Path | None
    """The scheduler's log; None if nothing failed, because the log is then deleted."""
    remarks: tuple[str, ...]
    num_events: int
    num_steps: int


@attrs.frozen
class Finding:
    """The verdict on one obligation."""

    obligation: Obligation
    broken_in: tuple[tuple[Outcome, Failure], ...]
    """Each run that broke the obligation, with its first failure."""
    reason: str
    """Why the obligation could not be judged; empty if it was judged."""

    @property
    def verdict(self) -> str:
        """Return the word that the report shows: "broken", "not judged" or "kept"."""
        return "broken" if self.broken_in else "not judged" if self.reason else "kept"


def runs(seeds: range) -> Iterator[Run]:
    """Yield every scenario twice, then the worlds. In every second run, each lookup is made twice."""
    for name, scenario in SCENARIOS.items():
        for asks_twice in (False, True):
            yield Run(name + _TWICE * asks_twice, name, scenario.play, scenario.settings, asks_twice)
    for seed in seeds:
        yield world(seed)


def world(seed: int) -> Run:
    """Return the run of the world with this seed."""

    def play(harness: Harness) -> None:
        traffic(harness, seed)

    return Run(f"world {seed}", "", play, settings(seed), seed % 2 == 1)


def played(run: Run, subject: Subject, directory: Path) -> Outcome:
    """Play a run, and audit its logs.

    Raises:
        Exception: the engine cannot be built with the connector.
    """
    log_dir = directory / run.name.replace(" ", "-").replace(",", "").replace("'", "")
    shutil.rmtree(log_dir, ignore_errors=True)
    clock = SimulatedClock()
    with clock.read_by(KVLedgerRecorder):
        harness = Harness(subject, log_dir, clock, asks_twice=run.asks_twice, **run.settings)
        with suppress(RunOver):
            run.play(harness)
            harness.end()
        with suppress(RunOver):
            harness.shut_down()
    failures, met, num_events = list(harness.failures), set(harness.met), 0
    logs = log_directories(log_dir)
    for path in logs:
        log = open_log(path, _CORE)
        audit = Audit(log.core, log.configuration, start=log.start())
        audit.run_frames(log.trusted_frames())
        failures += [Failure(each.rule, each.detail, each.sequence) for each in audit.violations]
        num_events += audit.num_events
        for sequence, event in open_log(path, _CORE).trusted_events():
            met.update(_met(event))
            failures += _stop(sequence, event)
    if not failures:
        shutil.rmtree(log_dir, ignore_errors=True)
    elif harness.has_lost:
        met.add(Precondition.FAILED_LOAD)  # any failure after the loss shows that a load failed
    of_scheduler = next((path for path in logs if "-worker-" not in path.name), None)
    log_path = of_scheduler if failures else None
    return Outcome(
        run, tuple(failures), frozenset(met), log_path, tuple(harness.remarks), num_events, harness.engine.num_steps
    )


def built(run: Run, subject: Subject, directory: Path) -> None:
    """Start the engine of a run and shut it down again.

    Raises:
        Exception: any error that the connector raises when it is created.
    """
    log_dir = directory / "start"
    try:
        Harness(subject, log_dir, SimulatedClock(), asks_twice=False, **run.settings).shut_down()
    finally:
        shutil.rmtree(log_dir, ignore_errors=True)


def _stop(sequence: int, event: e.Event) -> Iterator[Failure]:
    """Yield a failure if the event says that the recorder or another extension was stopped."""
    if isinstance(event, e.ExtensionStopped):
        detail = f"extension {event.extension} was stopped: {event.where} raised {event.error}"
        yield Failure(STOPPED, detail, sequence)
    elif isinstance(event, e.LogNote) and event.text.startswith(RECORDING_STOPPED):
        yield Failure(STOPPED, event.text, sequence)


def _met(event: e.Event) -> Iterator[Precondition]:
    if isinstance(event, e.LoadIssued):
        yield from (Precondition.LOAD, *((Precondition.ASYNC_LOAD,) if event.is_async else ()))
    elif isinstance(event, e.LoadFailed):
        yield Precondition.FAILED_LOAD
    elif isinstance(event, e.ExtensionObserved):
        yield from _met_in(Recorder.payload_of(event))


def _met_in(payload: object) -> Iterator[Precondition]:
    if isinstance(payload, payloads.LookupReturned):
        yield from (Precondition.LOOKUP, *((Precondition.ANSWER,) if payload.num_external_tokens else ()))
    elif isinstance(payload, payloads.EndReturned) and payload.keeps_blocks:
        yield Precondition.KEPT
    elif isinstance(payload, payloads.Transferred):
        yield from (Precondition.COPY, *(() if payload.is_load else (Precondition.SAVE,)))


def findings(outcomes: Sequence[Outcome]) -> list[Finding]:
    """Judge each obligation, in the order of the contract."""
    return [_finding(obligation, outcomes) for obligation in OBLIGATIONS.values()]


def _finding(obligation: Obligation, outcomes: Sequence[Outcome]) -> Finding:
    concerned = [each for each in outcomes if not obligation.scenarios or each.run.scenario in obligation.scenarios]
    judged = [each for each in concerned if obligation.needs in {Precondition.ALWAYS, *each.met}]
    scenarios = [each for each in outcomes if each.run.scenario]  # a world may lead into any situation
    elsewhere = {_kind(each) for outcome in scenarios if outcome not in concerned for each in outcome.failures}
    stopped = [(each, failure) for each in concerned for failure in each.failures if failure.check == STOPPED]
    broken_in, is_in_doubt = [], False
    for outcome in judged:
        failures = [each for each in outcome.failures if each.check in obligation.checks]
        shared = {Check.KV_RIGHT} if obligation.may_share_its_cause else set()
        sure = (each for each in failures if each.check not in shared and _kind(each) not in elsewhere)
        first = next(sure, None)
        if first is not None:
            broken_in.append((outcome, first))
        is_in_doubt |= bool(failures)
    if broken_in:
        reason = ""
    elif not obligation.checks:
        reason = obligation.limit or "a breach would show neither in the log nor in the simulation"
    elif not concerned:
        reason = "none of its scenarios was played"
    elif stopped and any(check not in _OUTSIDE_OF_LOG for check in obligation.checks):
        outcome, failure = stopped[0]
        reason = f"the log of {outcome.run.name} is not complete: at event {failure.event}, {failure.detail}"
    elif not judged:
        reason = obligation.needs.value
    elif is_in_doubt:
        reason = "its checks failed, but the cause is not, or need not be, a breach of this obligation"
    elif Check.KV_RIGHT in obligation.checks and all(Precondition.WORKER not in each.met for each in judged):
        reason = Precondition.WORKER.value
    else:
        reason = ""
    return Finding(obligation, tuple(broken_in), reason)


def _kind(failure: Failure) -> tuple[str, str]:
    """Return the check, and the detail without ids and numbers. Equal results count as one cause."""
    return failure.check, re.sub(r"\S*\d\S*", "#", failure.detail)


def unassigned(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Failure]]:
    """Return the failures whose check belongs to no obligation.

    The cause is a bug of vLLM or kvledger, or an obligation is missing in the contract.
    """
    named = {check for obligation in OBLIGATIONS.values() for check in obligation.checks}
    return [(outcome, each) for outcome in outcomes for each in outcome.failures if each.check not in named]
