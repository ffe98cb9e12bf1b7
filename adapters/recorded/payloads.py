"""The recorder's own events: answers of the wrapped connector, reports of its workers, and its copies.

The events are in a module of their own, so that the rules can import them.
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
"""Connector → the option that has the number of tokens that the connector saves or finds together (vLLM 0.32,
`kv_connector/v1/offloading/config.py`; LMCache 0.5.6, `lmcache/v1/config.py`)."""


class RecordingStarted(msgspec.Struct, frozen=True):
    """The wrapped connector and its engine, as vLLM's configuration describes them."""

    recorder: str
    """The recorder's class."""
    kv_transfer: dict[str, Any]
    """The wrapped connector's part of `--kv-transfer-config`. Options that `adapters/recorder/options.py` does not list
    have only their type and length as value."""
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
    """Whether the engine uses speculative decoding, which computes tokens that can be rejected."""

    def unit_tokens(self, block_size: int) -> int:
        """Return the number of tokens that the connector saves or finds together, from the connector's options.

        Returns 0 if the options do not have this number. `block_size` is vLLM's block size.
        """
        options = self.kv_transfer.get("kv_connector_extra_config")
        option = _UNITS.get(str(self.kv_transfer.get("kv_connector")))
        if not isinstance(options, dict) or option is None:
            return 0
        num_blocks, unit = options.get("blocks_per_chunk"), options.get(option)
        if option == "block_size" and isinstance(num_blocks, int):
            unit = num_blocks * block_size
        return unit if isinstance(unit, int) and 0 < unit <= MAX_INT64 else 0


class LookupReturned(msgspec.Struct, frozen=True):
    """The wrapped connector's answer to a lookup. It follows the lookup's event `lookup.requested`."""

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    num_external_tokens: Int64 | None
    """Offered tokens; None: vLLM has to ask again later."""
    is_async: bool
    duration_ns: DurationNs


class EndReturned(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of `request_finished`: whether vLLM keeps the blocks until the connector reports the request."""

    keeps_blocks: bool
    duration_ns: DurationNs
    kept_by: tuple[Int64, ...] = ()
    """Numbers, from 0, of the children of a recorded `MultiConnector` that keep the blocks. Empty if no child keeps the
    blocks, or if the recorded connector is no `MultiConnector`."""


class Returned(msgspec.Struct, frozen=True):
    """A hook of the wrapped connector returned. Two hooks have their own events: `LookupReturned` and `EndReturned`."""

    hook: str
    duration_ns: DurationNs


class WorkerStarted(msgspec.Struct, frozen=True):
    """First event of a worker's log. The log's header block repeats its content."""

    engine_id: str
    """vLLM's engine id, as in the header of the scheduler's log."""
    rank: Int64
    connector: str
    """Class of the wrapped connector."""


class Called(msgspec.Struct, frozen=True, omit_defaults=True):
    """A hook of the wrapped connector is about to be called. The scheduler's log has this event only for `shutdown`."""

    hook: str
    step: Int64 = -1
    """Number of the step, from 0, counted like the steps in the scheduler's log. -1: the call is outside a step."""
    layer: str = ""
    """Layer, for a hook that is called for each layer; empty for other hooks. A call for a layer is recorded only if
    the layer is the first one of a step, or if the call raises."""


class Reported(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request ids and blocks that a hook of one worker reported. Written only if there are any."""

    hook: str
    finished_sending: tuple[str, ...] = ()
    finished_recving: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()
    invalid_block_ids: tuple[Int64, ...] = ()


class WorkersReported(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request ids and blocks that all workers report to the wrapped connector's `update_connector_output`."""

    finished_sending: tuple[str, ...] = ()
    finished_recving: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()
    invalid_block_ids: tuple[Int64, ...] = ()
    unread: str = ""
    """Class of the workers' metadata if no decoder reads this metadata; otherwise empty."""


class ReportedToVLLM(WorkersReported, frozen=True, omit_defaults=True):
    """The request ids and blocks that vLLM gets after `update_connector_output`, which may have changed the reports.

    Not written if vLLM gets neither request ids nor blocks.
    """


OWN = -1
"""Value of `ReportedBy.child` for the recorded connector itself."""


class ReportedBy(msgspec.Struct, frozen=True, omit_defaults=True):
    """The requests for which one connector says, on one rank, that a load or the sending of blocks has ended.

    The connector is the recorded one, or a child of a recorded `MultiConnector`. The event is written only if another
    connector merges these reports with those of other children, so that vLLM does not see who reported.
    """

    child: Int64
    """Number of the child in the `MultiConnector`, from 0, or `OWN`."""
    connector: str
    """Class of the connector."""
    rank: Int64
    finished_sending: tuple[str, ...] = ()
    finished_recving: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()


class LoadChosen(msgspec.Struct, frozen=True):
    """The child of a recorded `MultiConnector` that loads for a request. Recorded when the request gets the blocks."""

    child: Int64
    """Number of the child in the `MultiConnector`, from 0."""
    connector: str


class Sent(msgspec.Struct, frozen=True):
    """No copy reads the blocks of the ended request any more."""


class Transferred(msgspec.Struct, frozen=True, omit_defaults=True):
    """A copy that the connector gives its workers, as a decoder reads it from the connector's metadata."""

    job: str
    """The connector's name for the copy."""
    is_load: bool
    group: Int64
    """Number of the layer group, from 0; -1: the metadata does not name the group."""
    first_block: Int64
    """Index of the copy's first block in the request's block table; -1: the metadata does not have the index."""
    block_ids: tuple[Int64, ...]
    ends_with: str = ""
    """How the log shows the end of the copy, one of `ENDS`. Empty: the log does not show the end."""
    is_whole: bool = False
    """Whether the copy has all tokens of each of its blocks. False also if the metadata does not show this."""

    def places(self, table: Sequence[int]) -> Iterator[int | None]:
        """Yield the index in `table` of each of the copy's blocks.

        The copy's first block must be at `first_block`, if that index is known. In the table, each later block of the
        copy must come after the copy's previous block. At the first block that breaks this, yield None and stop.
        """
        start, end = self.first_block, self.first_block + 1
        for block_id in self.block_ids:
            places = range(max(start, 0), min(end, len(table)))
            place = next((at for at in places if block_id == table[at] or NULL_BLOCK in (block_id, table[at])), None)
            yield place
            if place is None:
                return
            start, end = place + 1, len(table)


class TransferredFor(msgspec.Struct, frozen=True):
    """A copy for a request that has ended or no longer has the copy's blocks. `request_id` is empty if unknown."""

    request_id: str
    copy: Transferred


class TransfersEnded(msgspec.Struct, frozen=True):
    """The jobs of the copies that all workers have reported as done."""

    jobs: tuple[str, ...]


class TransfersAwaited(msgspec.Struct, frozen=True):
    """The jobs of the copies that the workers must finish before the current step computes anything."""

    jobs: tuple[str, ...]


STEP, JOB, REQUEST = ENDS = ("step", "job", "request")
"""How the log shows that a copy has ended. `STEP`: the next step begins. `JOB`: the workers report the copy's job.
`REQUEST`: vLLM gets the end of the load, or of the sending, for the copy's request."""


class MetadataSeen(msgspec.Struct, frozen=True):
    """A new class of metadata that the recorded connector, or a child of a `MultiConnector`, gives its workers."""

    place: str
    """Prefix of the names of the child's jobs, for example "0/"; empty for the recorded connector."""
    metadata: str
    is_decoded: bool
    """Whether a decoder reads this metadata, so that the log has all copies of this connector."""


class Undecoded(msgspec.Struct, frozen=True):
    """A decoder could not read metadata of the class `metadata`. From this event on, the log has no copies."""

    metadata: str
    error: str


CHILD = "inside of MultiConnector"
"""First words of the note that another connector contains the recorder. The reports in the log then include those of
the other children."""


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
