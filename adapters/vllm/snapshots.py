"""Writes the ledger's state next to each new segment of its log, so that a log can be read without its beginning.

At the first commit after the log went on in a new segment. Between two of those a commit costs one comparison; a
snapshot that cannot be written costs a message, and nothing else.
"""

from __future__ import annotations

from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import Ledger
from kvledger.lifecycle.snapshots import capture, state_fingerprint
from kvledger.storage.events import SegmentEventStore, Snapshot, write_snapshot


class LogSnapshots:
    """Of the log that `segments` writes."""

    def __init__(self, segments: SegmentEventStore) -> None:
        self._segments = segments
        self._seen = segments.segment

    def after_commit(self, ledger: Ledger) -> None:
        """Write a snapshot if a new segment was begun, and the whole state is written."""
        segment = self._segments.segment
        if segment is self._seen or ledger.num_uncommitted or ledger.next_sequence != self._segments.next_sequence:
            return
        self._seen = segment
        try:
            snapshot = Snapshot(
                log_id=str(self._segments.header["log_id"]),
                sequence=ledger.next_sequence - 1,
                chain_hash=self._segments.head_hash,
                fingerprint=state_fingerprint(ledger.projections.core, ledger.projections.configuration),
                state=capture(ledger.projections),
            )
            write_snapshot(segment, snapshot)
        except Exception as error:  # noqa: BLE001 -- nothing depends on a snapshot, least of all the engine
            messages.warning("a snapshot could not be written; the log is not affected", error=str(error))
