"""Where the reader begins in a stored log, and what it is given of it: for every tool, so that all read it alike."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.adapters.figures import decoded
from kvledger.adapters.tools.logs.log import Batch, StoredLog
from kvledger.adapters.tools.logs.totals import LogTotals
from kvledger.adapters.tools.reasons import Accounts, RequestHistory
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle.reader import Model, Reader

HEADER_LOST = LedgerConfiguration(block_size=1, chunk_size=1, num_slots=1)
"""To read a log without its header: lives and their states are known, and nothing of chunks and slots."""


def begin_model(
    log: StoredLog, configuration: LedgerConfiguration | None = None, *, at_newest_snapshot: bool = False
) -> Model:
    """The model before the first event that `take_batch` gives a reader.

    If the oldest segments of the log were retired, it holds what the first usable snapshot holds. Without one, reading
    begins as behind a gap. Call it before the batches are read: they begin at `log.start_sequence`.

    Args:
        log: the opened log.
        configuration: that of the log by default.
        at_newest_snapshot: begin at the newest usable snapshot, if there is one; the caller reads the batches after
            `log.start_sequence` only.

    Raises:
        CommandFailed: the log has lost its header, and no configuration is given.
    """
    model = Model(log.core.tables, configuration or log.configuration)
    start = log.start(newest=at_newest_snapshot)
    if start is not None:
        start.resume(model, log.core)
    return model


def begin_totals(log: StoredLog, model: Model) -> LogTotals:
    """Totals that count what a reader with this model is given, on top of what the snapshot holds from which it begins.

    They are not complete if the snapshot has none. Call it after `begin_model`.
    """
    state = decoded(log.start_totals) if log.start_sequence else None
    return LogTotals(model, state, is_complete=state is not None or not log.start_sequence)


def begin_accounts(
    log: StoredLog,
    model: Model,
    *,
    request_id: str | None = None,
    on_end: Callable[[RequestHistory], None] | None = None,
) -> Accounts:
    """Accounts with histories of what a reader with this model is given; call it after `begin_model`.

    If reading begins at a snapshot, the accounts do not have what happened to chunks before.
    """
    accounts = Accounts(model, request_id=request_id, on_end=on_end, keeps_histories=True)
    if log.start_sequence:
        accounts.lost(1, log.start_sequence)
    return accounts


def take_batch(reader: Reader, log: StoredLog, batch: Batch) -> None:
    """Give a reader the batch that was just read; not what the snapshot contains already from which it began."""
    gap = batch.gap
    if gap is not None and not gap.is_in_snapshot:
        reader.lost(gap.first_sequence, gap.last_sequence)
    if batch.last_sequence > log.start_sequence:
        reader.take(batch.numbered())
