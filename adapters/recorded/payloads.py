"""The recorder's own events: a wrapped connector's answers, its workers' reports, its copies.

They have their own module so that the rules can import them. Numbers are tokens unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from kvledger.lifecycle import Extension
from kvledger.lifecycle.events import NULL_BLOCK
from kvledger.lifecycle.ranges import MAX_INT64, Count, DurationNs, Int64, NumBytes, NumTokens

_UNITS = {
    "OffloadingConnector": "block_size",
    "LMCacheConnectorV1": "lmcache.chunk_size",
    "LMCacheMPConnector": "lmcache.chunk_size",
}
"""Connector → the option with the number of tokens that it matches at a time (vLLM 0.32,
`kv_connector/v1/offloading/config.py`; LMCache 0.5.6, `lmcache/v1/config.py`)."""


class RecordingStarted(msgspec.Struct, frozen=True):
    """What is wrapped, in which engine, from vLLM's configuration."""

    recorder: str
    """The recorder's class."""
    kv_transfer: dict[str, Any]
    """The value of `--kv-transfer-config` without the recorder; options that `options.py` does not list have their type
    and length as value."""
    num_blocks: Count
    block_bytes: NumBytes
    """Bytes of one block on one rank, over all layers."""
    num_ranks: Count
    enable_prefix_caching: bool
    async_scheduling: bool
    max_num_seqs: Count
    max_num_batched_tokens: NumTokens
    max_model_len: NumTokens
    speculates: bool = False
    """Whether the engine computes tokens that it may reject."""

    def unit_tokens(self, block_size: int) -> int:
        """Return how many tokens the connector matches at a time, from its options; 0 if they do not have it."""
        options = self.kv_transfer.get("kv_connector_extra_config")
        option = _UNITS.get(str(self.kv_transfer.get("kv_connector")))
        if not isinstance(options, dict) or option is None:
            return 0
        num_blocks, unit = options.get("blocks_per_chunk"), options.get(option)
        if option == "block_size" and isinstance(num_blocks, int):
            unit = num_blocks * block_size
        return unit if isinstance(unit, int) and 0 < unit <= MAX_INT64 else 0


class LookupReturned(msgspec.Struct, frozen=True):
    """The answer of `get_num_new_matched_tokens`, after its `lookup.requested`."""

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    num_external_tokens: Int64 | None
    """None: vLLM has to ask again."""
    is_async: bool
    duration_ns: DurationNs


class EndReturned(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of `request_finished`: whether vLLM keeps the blocks until the connector reports the request."""

    keeps_blocks: bool
    duration_ns: DurationNs
    kept_by: tuple[Int64, ...] = ()
    """Places of the children of a recorded `MultiConnector` that keep the blocks; empty: none, or not recorded."""


class Returned(msgspec.Struct, frozen=True):
    """A hook without an answer about one request has returned."""

    hook: str
    duration_ns: DurationNs


class WorkerStarted(msgspec.Struct, frozen=True):
    """First event of a worker's log. The header has the same."""

    engine_id: str
    """vLLM's, as in the header of the scheduler's log."""
    rank: Int64
    connector: str
    """Class of the wrapped connector."""


class Called(msgspec.Struct, frozen=True, omit_defaults=True):
    """A hook of the wrapped connector is about to be called: any of a worker, or one that no observation records."""

    hook: str
    step: Int64 = -1
    """Number of the step, from 0, as the scheduler's log counts steps; -1: outside a step."""
    layer: str = ""
    """Of a hook for one layer, recorded for the first layer of a step or if it raises."""


class Reported(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker's hook reported, if anything: request ids and blocks."""

    hook: str
    finished_sending: tuple[str, ...] = ()
    finished_recving: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()
    invalid_block_ids: tuple[Int64, ...] = ()


class WorkersReported(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `update_connector_output` gets: request ids and blocks."""

    finished_sending: tuple[str, ...] = ()
    finished_recving: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()
    invalid_block_ids: tuple[Int64, ...] = ()
    unread: str = ""
    """Class of the workers' metadata, if no decoder reads it."""


class ReportedToVLLM(WorkersReported, frozen=True, omit_defaults=True):
    """What vLLM gets of that after the hook, which may have changed it. Not written if it is empty."""


OWN = -1
"""In `ReportedBy.child`: the recorded connector itself."""


class ReportedBy(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ends reported by a worker of the recorded connector, or of a child of a recorded `MultiConnector`: request ids.

    Written only if there are siblings, because vLLM merges their reports.
    """

    child: Int64
    """Place among the children, or `OWN`."""
    connector: str
    """Class of the connector."""
    rank: Int64
    finished_sending: tuple[str, ...] = ()
    finished_recving: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()


class LoadChosen(msgspec.Struct, frozen=True):
    """Which child of a recorded `MultiConnector` loads for a request that got blocks to load into."""

    child: Int64
    """Place among the children."""
    connector: str


class Sent(msgspec.Struct, frozen=True):
    """No copy reads the blocks of the ended request any more."""


class Transferred(msgspec.Struct, frozen=True, omit_defaults=True):
    """A copy that the connector's metadata hands to its workers, as a decoder reads it."""

    job: str
    """The connector's name for it."""
    is_load: bool
    group: Int64
    """Group of layers, from 0; -1 if the metadata does not have it."""
    first_block: Int64
    """Index of the first block in the request's table; -1 if the metadata does not have it."""
    block_ids: tuple[Int64, ...]
    ends_with: str = ""
    """One of `ENDS`; empty if the log does not show the end."""
    is_whole: bool = False
    """Whether it copies all tokens of each of its blocks; False if the metadata does not show that."""

    def places(self, table: Sequence[int]) -> Iterator[int | None]:
        """Yield each block's index in a table, after that of the one before; None, and stop, if it is not there."""
        start, end = self.first_block, self.first_block + 1
        for block_id in self.block_ids:
            places = range(max(start, 0), min(end, len(table)))
            place = next((at for at in places if block_id == table[at] or NULL_BLOCK in (block_id, table[at])), None)
            yield place
            if place is None:
                return
            start, end = place + 1, len(table)


class TransferredFor(msgspec.Struct, frozen=True):
    """A copy for a request that is over or no longer has these blocks; with an empty id, for no known request."""

    request_id: str
    copy: Transferred


class TransfersEnded(msgspec.Struct, frozen=True):
    """Jobs of copies that all workers have reported as done."""

    jobs: tuple[str, ...]


class TransfersAwaited(msgspec.Struct, frozen=True):
    """Jobs of copies that the workers finish before this step computes anything."""

    jobs: tuple[str, ...]


STEP, JOB, REQUEST = ENDS = ("step", "job", "request")
"""When a copy is done: before the next step, when the workers report its job, or when vLLM gets its request's end."""


class MetadataSeen(msgspec.Struct, frozen=True):
    """The recorded connector, or a child of a recorded `MultiConnector`, hands its workers metadata of this class."""

    place: str
    """Prefix of the names of the child's jobs; empty for the recorded connector."""
    metadata: str
    is_decoded: bool
    """Whether a decoder reads it, so that all copies are in the log."""


class Undecoded(msgspec.Struct, frozen=True):
    """A decoder failed on metadata of this class. Copies are not recorded from here on."""

    metadata: str
    error: str


CHILD = "inside of MultiConnector"
"""Begins the note of a recorder inside another connector: vLLM's reports include its siblings'."""


class RecorderEvents(Extension):
    """The events of a recorder."""

    name = "recorder"
    events: ClassVar[dict[str, type[msgspec.Struct]]] = {
        "recording_started": RecordingStarted,
        "lookup_returned": LookupReturned,
        "end_returned": EndReturned,
        "returned": Returned,
        "worker_started": WorkerStarted,
        "called": Called,
        "reported": Reported,
        "workers_reported": WorkersReported,
        "reported_to_vllm": ReportedToVLLM,
        "sent": Sent,
        "reported_by": ReportedBy,
        "load_chosen": LoadChosen,
        "transferred": Transferred,
        "transferred_for": TransferredFor,
        "transfers_ended": TransfersEnded,
        "transfers_awaited": TransfersAwaited,
        "undecoded": Undecoded,
        "metadata_seen": MetadataSeen,
    }


payload_of = RecorderEvents.payload_of
