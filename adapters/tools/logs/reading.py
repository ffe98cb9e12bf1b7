"""Where a reader begins in a stored log, and which events the reader gets. All tools use this code."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.adapters.figures import decoded
from kvledger.adapters.tools.logs.log import Batch, StoredLog
from kvledger.adapters.tools.logs.totals import LogTotals
from kvledger.adapters.tools.reasons import Accounts, RequestHistory
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle.reader import Model, Reader

HEADER_LOST = LedgerConfiguration(block_size=1, chunk_size=1, num_slots=1)
"""Configuration for a log without its header: lives and their states are known, but not chunks and slots."""


def begin_model(
    log: StoredLog, configuration: LedgerConfiguration | None = None, *, at_newest_snapshot: bool = False
) -> Model:
    """Return the model with the state before the first event that `take_batch` will pass to a reader.

    If the oldest segments of the log were retired, the model has the state of the first usable snapshot. Without a
    usable snapshot, the model is empty, and the retired events count as a gap. Call this function before you read
    batches: it sets `log.start_sequence`.

    Args:
        log: the opened log.
        configuration: configuration of the model; default: the log's configuration.
        at_newest_snapshot: begin at the newest usable snapshot, if there is one. The caller then reads only the batches
            after `log.start_sequence`.

    Raises:
        CommandFailed: the log has lost its header, and no configuration is given.
    """
    model = Model(log.core.tables, configuration or log.configuration)
    start = log.start(newest=at_newest_snapshot)
    if start is not None:
        start.resume(model, log.core)
    return model


def begin_totals(log: StoredLog, model: Model) -> LogTotals:
    """Return totals for a reader with this model. Call this after `begin_model`.

    If reading begins at a snapshot, the result continues the snapshot's totals. If the snapshot has no totals, the
    result is incomplete.
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
    """Return a visitor that keeps the history of each life and chunk. Call this after `begin_model`.

    If reading begins at a snapshot, the visitor does not know the earlier history of chunks.
    """
    accounts = Accounts(model, request_id=request_id, on_end=on_end, keeps_histories=True)
    if log.start_sequence:
        accounts.lost(1, log.start_sequence)
    return accounts


def take_batch(reader: Reader, log: StoredLog, batch: Batch) -> None:
    """Pass the gap before a batch, and the batch, to a reader. Skip each of them if its events are in the snapshot."""
    gap = batch.gap
    if gap is not None and not gap.is_in_snapshot:
        reader.lost(gap.first_sequence, gap.last_sequence)
    if batch.last_sequence > log.start_sequence:
        reader.take(batch.numbered())
