"""One log verified by several processes, with the findings of one pass.

What was decided is decided again part by part, each from the snapshot at its beginning; a part counts only if the one
before it ends with the very state, and the very chain hash, that it began with. The rules are held against the whole
log in groups: what they remember stands in no snapshot. Whatever does not fit together, or cannot be folded, is no
finding here: one pass says it. See decision 0025.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import attrs

from kvledger.adapters.tools.logs.coverage import ExtensionEvents, RequestPresence
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.processes import Processes
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.verification import EndState, Findings
from kvledger.lifecycle import Divergence, Replay
from kvledger.lifecycle.audit import (
    DecidedAgain,
    Judgement,
    RulesHeld,
    Start,
    checkers_of,
    decided_again,
    make_rule_checks,
)
from kvledger.lifecycle.snapshots import capture, restore, state_fingerprint
from kvledger.storage.events import LogError, Snapshot, is_being_written, usable_snapshot
from kvledger.storage.events.segment_file import SNAPSHOT_SUFFIX

OpenLog = Callable[[], StoredLog]
"""Opens the log once more, in another process."""


@attrs.frozen
class Cut:
    """Where a log is cut: between two segments, of which the second has a snapshot."""

    path: Path
    """Of the snapshot."""
    sequence: int
    """The last event before it."""
    chain_hash: bytes
    """What the second segment follows from, says its header."""


@attrs.frozen
class PartDecided:
    """What came of deciding a part again."""

    decided: DecidedAgain
    missing: Divergence | None
    """A decision behind the part's last event: whether the log lacks it, the next event tells."""
    last: tuple[int, bytes]
    """The last event that was taken, and the chain hash there."""
    fits: bool
    """Whether the state at the end is the one that the next part begins with, and nothing else matters there."""
    end_state: EndState


def verify_in_parts(
    log: StoredLog, selection: Selection, open_log: OpenLog, processes: Processes, num_processes: int
) -> Findings | None:
    """The findings of `Verification`; None where only one pass can tell them.

    Args:
        log: is read here.
        selection: what is selected of it.
        open_log: opens it in the processes, and must be plain data, as a partial of a function is.
        processes: do the rest of the work.
        num_processes: how many are at work, this one included.
    """
    # What is written meanwhile, one would read and the other not; of a worker's log there is little to decide.
    if not log.header or log.worker_rank is not None or is_being_written(log.path):
        return None
    try:
        return _verify(log, selection, open_log, processes, num_processes)
    except Exception:  # noqa: BLE001 -- whatever it is, one pass meets it again and says it
        return None


def _verify(
    log: StoredLog, selection: Selection, open_log: OpenLog, processes: Processes, num_processes: int
) -> Findings | None:
    start = log.start()
    every_rule = list(checkers_of(log.core))
    num_groups = max(1, num_processes // 2)
    here, *elsewhere = [every_rule[number::num_groups] for number in range(num_groups)]
    parts = list(pairwise([None, *_cuts(log, selection), None]))
    others = [processes.submit(_hold_again, open_log, selection, rules) for rules in elsewhere]
    deciding = [processes.submit(decide_part, open_log, selection, *part) for part in parts]
    before = None if start is None else start.projections(log.core, log.configuration)
    presence = RequestPresence(selection, before)
    of_extensions = ExtensionEvents()
    held = [hold(log, selection, here, start, (presence, of_extensions))]
    decided = {
        number: decide_part(open_log, selection, *parts[number])
        for number in reversed(range(len(parts)))
        if deciding[number].cancel()  # nobody has begun it
    }
    held += [future.result() for future in others]
    fitting: list[PartDecided] = []
    for number, future in enumerate(deciding):
        fitting.append(decided[number] if number in decided else future.result())
        if not fitting[-1].fits:
            break
    last = fitting[-1]
    if any(where != last.last for _, where in held):
        return None
    if last.missing is not None and not selection.is_over(log.last_sequence):
        last.decided.divergences.append(last.missing)
    judgement = Judgement.of(log.core.rules, [each for each, _ in held], [part.decided for part in fitting])
    return Findings.of(log, selection, judgement, last.end_state, of_extensions, is_present=presence.is_found)


def _cuts(log: StoredLog, selection: Selection) -> Iterator[Cut]:
    """At every snapshot that today's code can begin from; what is in it, whoever ends there compares."""
    for path in sorted(log.path.glob(f"*{SNAPSHOT_SUFFIX}")) if log.path.is_dir() else ():
        snapshot = _snapshot(path, log)
        if isinstance(snapshot, Snapshot) and log.start_sequence < snapshot.sequence:
            if selection.is_over(snapshot.sequence):
                return
            yield Cut(path, snapshot.sequence, snapshot.chain_hash)


def _snapshot(path: Path, log: StoredLog) -> Snapshot | str:
    fingerprint = state_fingerprint(log.core, log.configuration)
    return usable_snapshot(path, log_id=str(log.header["log_id"]), fingerprint=fingerprint)


def hold(
    log: StoredLog,
    selection: Selection,
    rules: Sequence[str],
    start: Start | None,
    others: Sequence[RequestPresence | ExtensionEvents] = (),
) -> tuple[RulesHeld, tuple[int, bytes]]:
    """Hold these rules against the log; returns what was found, the last event that was taken, and its chain hash.

    `others` are given every event that is taken.
    """
    makers = checkers_of(log.core)
    checks = make_rule_checks(
        log.core, log.configuration, [makers[rule] for rule in rules], keeps=selection.concerns_violation, start=start
    )
    last = 0, b""
    for batch in log.batches(selection.last_sequence):
        if log.is_trusted:
            checks.take(batch.numbered())
            for other in others:
                other.take(batch.numbered())
            last = batch.last_sequence, batch.chain_hash
    return checks.held(), last


def _hold_again(open_log: OpenLog, selection: Selection, rules: Sequence[str]) -> tuple[RulesHeld, tuple[int, bytes]]:
    log = open_log()
    return hold(log, selection, rules, log.start())


def decide_part(open_log: OpenLog, selection: Selection, begin: Cut | None, end: Cut | None) -> PartDecided:
    """Decide again what stands between two cuts, the log's beginning (or its first snapshot) and its end included.

    Raises:
        Exception: it cannot be read or folded, or does not follow from `begin`.
    """
    log = open_log()
    core, configuration = log.core, log.configuration
    until = selection.last_sequence if end is None else end.sequence
    if begin is None:
        start = log.start()
        before = None if start is None else start.projections(core, configuration)
        batches = log.batches(until)
    else:
        before = restore(core, _state_at(begin, log), configuration)
        batches = log.batches_behind(begin.sequence, until=until)  # whose segment's header has that hash
    replay = Replay(core, configuration, reference=core.reference, start=before)
    replay.divergences.keeps = replay.reference_differences.keeps = selection.concerns
    last = (0, b"") if begin is None else (begin.sequence, begin.chain_hash)
    for batch in batches:
        if not log.is_trusted:
            continue
        if begin is not None and last[0] == begin.sequence and batch.events[0].is_decision:
            raise LogError("the part begins with a decision upon what stands before it")
        replay.take(batch.numbered())
        last = batch.last_sequence, batch.chain_hash
    fits = (
        end is not None
        and last == (end.sequence, end.chain_hash)
        and replay.is_at_rest
        and capture(replay.projections) == _state_at(end, log)
    )
    return PartDecided(decided_again(replay), replay.missing, last, fits, EndState.of(replay.projections))


def _state_at(cut: Cut, log: StoredLog) -> bytes:
    snapshot = _snapshot(cut.path, log)
    if not isinstance(snapshot, Snapshot):
        raise LogError(snapshot)
    return snapshot.state
