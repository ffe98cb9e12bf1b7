"""Makes the snapshots of a log: the state before each segment, folded from the log itself.

A log's writer runs this code in another process. `kvledger retire` runs it for a log that lacks snapshots. This module
must not depend on an engine.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kvledger.adapters.figures import Totals
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.tools.logs.log import Batch, StoredLog
from kvledger.lifecycle.audit import Start, StartFolds
from kvledger.lifecycle.reader import NotResumable
from kvledger.lifecycle.snapshots import SnapshotError, state_fingerprint
from kvledger.storage.events import LogError, Snapshot, find_snapshot, segments_without_snapshot, write_snapshot
from kvledger.storage.events.segment_file import first_sequence_of, read_header


def write_snapshots(log: StoredLog, first_sequence: int | None = None) -> int:
    """Write a snapshot next to each segment that lacks one, and return how many were written.

    With `first_sequence`, write only the snapshot of the segment that begins with that event.

    Reading begins at the last snapshot before the first of these segments, or else at the log's beginning. The log's
    writer may append events meanwhile. Existing snapshots are not changed.

    Raises:
        CommandFailed: the state before a segment is unknown. The snapshots of earlier segments have been written.
        OSError: a snapshot cannot be written.
    """
    begins = ((first_sequence_of(segment) or 1, segment) for segment in segments_without_snapshot(log.path))
    lacking = {begin - 1: segment for begin, segment in begins if first_sequence in {None, begin}}
    if not lacking:
        return 0
    if not log.header:
        raise CommandFailed(f"{log.path}: no copy of its header is intact, so nothing can be folded", ExitCode.DAMAGED)
    other_code = log.core.other_code(log.header)
    if other_code:  # a user who trusts a snapshot trusts the code that wrote the log
        raise CommandFailed(
            f"{log.path}: only the code that wrote the log can make its snapshots, and this is other code: {other_code}"
        )
    log_id, fingerprint = str(log.header["log_id"]), state_fingerprint(log.core, log.configuration)
    begun, _ = find_snapshot(log.path, log_id=log_id, fingerprint=fingerprint, at_most=min(lacking), newest=True)
    folds, batches = StartFolds(log.core, log.configuration), log.batches()
    totals = Totals(folds.projections)
    if begun is not None:
        with suppress(SnapshotError, NotResumable):  # then read from the log's beginning, if the log has it
            folds = StartFolds(log.core, log.configuration, Start(begun.state, begun.reader))
            totals = Totals.continued(folds.projections, begun.totals)
            batches = log.batches_behind(begun.sequence)
    num_written = 0
    for batch in batches:
        if log.damage or not log.is_trusted:
            raise CommandFailed(
                f"{log.path}: events before event {batch.first_sequence} are missing or damaged, so the state there is "
                "not known",
                ExitCode.DAMAGED if log.damage else ExitCode.NOTHING_CHECKED,
            )
        _fold(folds, log, batch)
        segment = lacking.pop(batch.last_sequence, None)
        if segment is not None:
            chain_hash = _hash_before(segment)
            start = folds.start()
            snapshot = Snapshot(
                log_id, batch.last_sequence, chain_hash, fingerprint, start.state, start.reader, totals.stored()
            )
            write_snapshot(segment, snapshot)
            num_written += 1
        if not lacking:
            break
    return num_written


def _fold(folds: StartFolds, log: StoredLog, batch: Batch) -> None:
    try:
        folds.take(batch.numbered())
    except Exception as error:
        if folds.current is None:  # nothing was folded: the log cannot be read
            raise
        sequence, event = folds.current
        raise CommandFailed(
            f"{log.path}: event {sequence} ({event.id}) cannot be folded: {error!r}; no snapshot can be made after "
            "it. `kvledger verify` reports errors before it",
            ExitCode.DIVERGED,
        ) from error


def _hash_before(segment: Path) -> bytes:
    """Return the chain hash (16 bytes) of the frame before a segment, from the segment's header.

    Raises:
        CommandFailed: no copy of the header is readable.
    """
    try:
        return read_header(segment, any_copy=True).previous_head_hash
    except LogError as error:
        raise CommandFailed(f"{segment.parent}: {error}", ExitCode.DAMAGED) from error
