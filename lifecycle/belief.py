"""Everything the connector believes: all projections of one log, wired together.

The only place that knows the order in which projections fold. Nothing here refuses an event, reads a clock or
does I/O: folding a recorded event never fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.events import VOCABULARY, Event
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.machine import TABLE, CompiledTable
from kvledger.lifecycle.policies import build_policy
from kvledger.lifecycle.projections.block_table import BlockTable
from kvledger.lifecycle.projections.chunk_index import ChunkIndex
from kvledger.lifecycle.projections.chunk_keys import ChunkKeys
from kvledger.lifecycle.projections.lookup_cache import LookupCache
from kvledger.lifecycle.projections.save_cursor import SaveCursor
from kvledger.lifecycle.projections.tails import Tails
from kvledger.lifecycle.projections.totals import Totals
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.projections.transfers import Transfers
from kvledger.lifecycle.projections.unfilled import UnfilledBlocks

Fold = Callable[..., None]


class Snapshots(Protocol):
    """What can be compared between a live ledger and a replayed one."""

    def snapshot(self) -> object:
        """Plain values, equal for equal states."""


class Projections:
    """All projections of one log."""

    def __init__(self, configuration: LedgerConfiguration, table: CompiledTable = TABLE) -> None:
        self.configuration = configuration
        self.geometry = Geometry(configuration.block_size, configuration.chunk_size, configuration.windows)
        self.tracker = RequestTracker(table)
        self.blocks = BlockTable(self.tracker)
        self.chunk_keys = ChunkKeys(self.tracker, configuration.chunk_size)
        self.unfilled = UnfilledBlocks(self.tracker, self.blocks, self.geometry)
        self.transfers = Transfers(self.tracker, self.chunk_keys, self.geometry, self.unfilled, configuration.num_ranks)
        self.chunks = ChunkIndex(
            self.geometry,
            configuration.num_slots,
            self.chunk_keys,
            self.transfers,
            keep_for_preempted=configuration.keep_for_preempted,
        )
        self.tails = Tails(self.tracker, self.chunks.slots)
        self.lookups = LookupCache(configuration.chunk_size, self.chunk_keys, self.chunks)
        self.save_cursor = SaveCursor(self.tracker, self.transfers, configuration.chunk_size)
        self.totals = Totals(self.tracker, self.lookups, self.transfers)
        self.policy = build_policy(configuration, self.chunk_keys)
        # Totals, blocks and tails first, to see states and lives as they were; the unfilled behind the blocks, in whose
        # tables they lie, and before the transfers, which ask for them; the chunk index before the transfers,
        # which forget settled jobs; everything that asks whether a request is still known after the tracker.
        order = (
            self.totals,
            self.blocks,
            self.unfilled,
            self.tails,
            self.tracker,
            self.chunk_keys,
            self.save_cursor,
            self.lookups,
            self.chunks,
            self.transfers,
            self.policy,
        )
        maps = [projection.folds() for projection in order]
        self._folds: dict[type[Event], tuple[Fold, ...]] = {
            event_class: tuple(folds[event_class] for folds in maps if event_class in folds)
            for event_class in VOCABULARY.values()
        }

    def fold(self, event: Event, sequence: int) -> None:
        """Take up one event. Total: it never fails for an event that was recorded."""
        for fold in self._folds[type(event)]:
            fold(event, sequence)

    def folds_of(self, event_class: type[Event]) -> tuple[Fold, ...]:
        """What `fold` does with the events of a class, for who folds many."""
        return self._folds[event_class]

    def snapshot(self) -> dict[str, object]:
        """Everything that is believed, as plain values; equal states give equal snapshots."""
        parts: dict[str, Snapshots] = {
            "tracker": self.tracker,
            "blocks": self.blocks,
            "unfilled": self.unfilled,
            "chunk_keys": self.chunk_keys,
            "save_cursor": self.save_cursor,
            "lookups": self.lookups,
            "chunks": self.chunks,
            "tails": self.tails,
            "transfers": self.transfers,
            "totals": self.totals,
            "policy": self.policy,
        }
        return {name: part.snapshot() for name, part in parts.items()}

    def num_entries(self) -> dict[str, int]:
        """Entries per projection that belong to requests; all are 0 when every request is released."""
        return {
            "tracker": len(self.tracker),
            "blocks": len(self.blocks),
            "chunk_keys": len(self.chunk_keys),
            "save_cursor": len(self.save_cursor),
            "lookups": len(self.lookups),
            "tails": len(self.tails),
            "transfers": len(self.transfers),
        }
