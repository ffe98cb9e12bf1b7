"""The standard core: the one place where its events, rows, handlers, projections and rules are put together.

The order in which projections fold stands here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvledger.lifecycle.audit.rules import RULES
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.events import STANDARD_EVENTS
from kvledger.lifecycle.handlers import STANDARD_HANDLERS
from kvledger.lifecycle.projections import ProjectionSpec
from kvledger.lifecycle.projections.block_table import BlockTable
from kvledger.lifecycle.projections.chunk_index import ChunkIndex
from kvledger.lifecycle.projections.chunk_keys import ChunkKeys
from kvledger.lifecycle.projections.extensions import Extensions
from kvledger.lifecycle.projections.lookup_cache import LookupCache
from kvledger.lifecycle.projections.obligations import Obligations
from kvledger.lifecycle.projections.save_cursor import SaveCursor
from kvledger.lifecycle.projections.tails import Tails
from kvledger.lifecycle.projections.token_costs import TokenCosts
from kvledger.lifecycle.projections.totals import Totals
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.projections.transfers import Transfers
from kvledger.lifecycle.projections.unfilled import UnfilledBlocks
from kvledger.lifecycle.table import GATING, JOB_REGIONS, REGIONS
from kvledger.lifecycle.upcasters import Upcasters

# What is owed first, so that it is known whatever fails behind it; then the totals, to see states as they were; the
# unfilled behind the blocks, in whose tables they lie, and before the transfers, which ask for them; the tails before
# the chunk index, and that before the transfers, which forget settled jobs; what is kept by life before the tracker,
# which forgets lives.
PROJECTIONS: tuple[ProjectionSpec, ...] = (
    ProjectionSpec("obligations", lambda its: Obligations(its.configuration.num_ranks)),
    ProjectionSpec("extensions", Extensions),
    ProjectionSpec("totals", lambda its: Totals(its.tracker, its.transfers, its.lookups)),
    ProjectionSpec("blocks", lambda its: BlockTable(its.tracker)),
    ProjectionSpec("unfilled", lambda its: UnfilledBlocks(its.tracker, its.blocks, its.geometry)),
    ProjectionSpec("tails", lambda its: Tails(its.tracker, its.chunks.slots, its.geometry.chunk_size)),
    ProjectionSpec("chunk_keys", lambda its: ChunkKeys(its.tracker, its.configuration.chunk_size)),
    ProjectionSpec(
        "save_cursor",
        lambda its: SaveCursor(its.tracker, its.configuration.chunk_size, its.configuration.save_interval_tokens),
    ),
    ProjectionSpec(
        "lookups",
        lambda its: LookupCache(its.tracker, its.configuration.chunk_size, its.chunk_keys, its.chunks, its.fold),
    ),
    ProjectionSpec(
        "chunks",
        lambda its: ChunkIndex(
            its.tracker,
            its.geometry,
            its.configuration.num_slots,
            its.chunk_keys,
            its.transfers,
            keep_for_preempted=its.configuration.keep_for_preempted,
        ),
    ),
    ProjectionSpec("costs", lambda its: TokenCosts(its.tracker)),
    ProjectionSpec("tracker", lambda its: RequestTracker(its.core)),
    ProjectionSpec(
        "transfers",
        lambda its: Transfers(
            its.tracker, its.chunk_keys, its.geometry, its.unfilled, its.core.compiled, its.configuration.num_ranks
        ),
    ),
)

NOT_CHECKED: Mapping[str, str] = MappingProxyType(
    {
        "STEP_WHILE_PENDING": "idle steps of the engine are not recorded",
        "ROUNDTRIP": "bytes of the KV cache never enter the log",
        "EVENTS_EQ_RESIDENCY": "published KV events are not recorded; what they follow from is",
    }
)
UPCASTERS: Upcasters = MappingProxyType({})  # every event is in its first version


def standard_core() -> Core:
    """The core that kvledger's connector runs with."""
    return Core(
        events=STANDARD_EVENTS,
        regions=REGIONS,
        job_regions=JOB_REGIONS,
        gating=GATING,
        handlers=MappingProxyType({handler.state: (handler,) for handler in STANDARD_HANDLERS}),
        projections=PROJECTIONS,
        rules=RULES,
        not_checked=NOT_CHECKED,
        upcasters=UPCASTERS,
    )
