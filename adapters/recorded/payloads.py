"""The recorder's own events: a wrapped connector's answers, its workers' reports, its copies.

Each is the payload of an event of the extension, and apart from it so that its rules can read them. All numbers are
tokens but where they say otherwise.
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
"""Connector → the option with its unit in tokens (vLLM 0.32, `kv_connector/v1/offloading/config.py`; LMCache 0.5.6,
`lmcache/v1/config.py`).
"""


class RecordingStarted(msgspec.Struct, frozen=True):
    """What is wrapped and in what engine, as vLLM's configuration says it; see `options.py` for what is left out."""

    recorder: str
    """The recorder's class."""
    kv_transfer: dict[str, Any]
    """What `--kv-transfer-config` would say without the recorder. An option that the allow list lacks has its type and
    length as its value."""
    num_blocks: Count
    block_bytes: NumBytes
    """Of one block on one rank, over all layers."""
    num_ranks: Count
    enable_prefix_caching: bool
    async_scheduling: bool
    max_num_seqs: Count
    max_num_batched_tokens: NumTokens
    max_model_len: NumTokens
    speculates: bool = False
    """Whether the engine computes tokens that it may take back."""

    def unit_tokens(self, block_size: int) -> int:
        """How many tokens the connector matches at a time, as its options say; 0: they do not."""
        options = self.kv_transfer.get("kv_connector_extra_config")
        option = _UNITS.get(str(self.kv_transfer.get("kv_connector")))
        if not isinstance(options, dict) or option is None:
            return 0
        num_blocks, unit = options.get("blocks_per_chunk"), options.get(option)
        if option == "block_size" and isinstance(num_blocks, int):
            unit = num_blocks * block_size
        return unit if isinstance(unit, int) and 0 < unit <= MAX_INT64 else 0


class LookupReturned(msgspec.Struct, frozen=True):
    """What `get_num_new_matched_tokens` returned. The call precedes it, as `lookup.requested`."""

    num_computed_tokens: NumTokens
    num_tokens: NumTokens
    num_external_tokens: Int64 | None
    """None: vLLM is to ask again."""
    is_async: bool
    duration_ns: DurationNs


class EndReturned(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `request_finished` returned: whether vLLM is to keep the blocks until the request is reported."""

    keeps_blocks: bool
    duration_ns: DurationNs
    kept_by: tuple[Int64, ...] = ()
    """Places of the children of a recorded `MultiConnector` that keep the blocks; empty: not recorded, or none."""


class Returned(msgspec.Struct, frozen=True):
    """A hook that answers nothing about one request has returned."""

    hook: str
    duration_ns: DurationNs


class WorkerStarted(msgspec.Struct, frozen=True):
    """The first event of a worker's log: whose it is. The header has the same."""

    engine_id: str
    """Of vLLM; the log of the scheduler has it in its header."""
    rank: Int64
    connector: str
    """The class that is wrapped."""


class Called(msgspec.Struct, frozen=True, omit_defaults=True):
    """A hook of the wrapped connector is about to be called: by a worker, or one for which no observation stands."""

    hook: str
    step: Int64 = -1
    """Counted as the scheduler's log counts its steps, from 0; -1: before the first step or after the last."""
    layer: str = ""
    """Of a hook for one layer, which is written for the first of a step, and where it raises."""


class Reported(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker's hook answered for the scheduler, where that is anything; request ids and blocks."""

    hook: str
    finished_sending: tuple[str, ...] = ()
    finished_recving: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()
    invalid_block_ids: tuple[Int64, ...] = ()


class WorkersReported(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `update_connector_output` is given; request ids and blocks."""

    finished_sending: tuple[str, ...] = ()
    finished_recving: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()
    invalid_block_ids: tuple[Int64, ...] = ()
    unread: str = ""
    """The class of the workers' metadata, where it is not known what it says."""


class ReportedToVLLM(WorkersReported, frozen=True, omit_defaults=True):
    """The same after the hook, which may have changed it: what vLLM acts upon. Not written where nothing is in it."""


OWN = -1
"""In the place of a child: the recorded connector itself."""


class ReportedBy(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which connector's worker reported ends: the recorded one's, or a child's of a recorded `MultiConnector`.

    Written if there are siblings, whose reports vLLM does not tell apart; request ids.
    """

    child: Int64
    """Place among the children; `OWN`: the recorded connector's own report."""
    connector: str
    """Its class."""
    rank: Int64
    finished_sending: tuple[str, ...] = ()
    finished_recving: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()


class LoadChosen(msgspec.Struct, frozen=True):
    """Whose answer a recorded `MultiConnector` has taken for a request that is given blocks to load into."""

    child: Int64
    """Place among the children."""
    connector: str
    """Its class."""


class Sent(msgspec.Struct, frozen=True):
    """No copy reads the blocks of the ended request any more; vLLM frees them."""


class Transferred(msgspec.Struct, frozen=True, omit_defaults=True):
    """A copy that the connector's metadata hands to its workers, as a decoder reads it."""

    job: str
    """The connector's own name for it."""
    is_load: bool
    group: Int64
    """Of the KV cache, counted from 0; -1 where the metadata does not say."""
    first_block: Int64
    """Where in the request's table the blocks begin; -1 where the metadata does not say."""
    block_ids: tuple[Int64, ...]
    ends_with: str = ""
    """One of `ENDS`; empty where the log does not show it."""
    is_whole: bool = False
    """Whether it copies all tokens of each of its blocks; False where the metadata does not say so."""

    def places(self, table: Sequence[int]) -> Iterator[int | None]:
        """Where in a table each block stands, behind the one before; None, and no more, for one that does not."""
        start, end = self.first_block, self.first_block + 1
        for block_id in self.block_ids:
            places = range(max(start, 0), min(end, len(table)))
            place = next((at for at in places if block_id == table[at] or NULL_BLOCK in (block_id, table[at])), None)
            yield place
            if place is None:
                return
            start, end = place + 1, len(table)


class TransferredFor(msgspec.Struct, frozen=True):
    """A copy for a request that is over or holds these blocks no more; without an id, for no known request."""

    request_id: str
    copy: Transferred


class TransfersEnded(msgspec.Struct, frozen=True):
    """Copies, by their jobs, which all workers have reported to be done."""

    jobs: tuple[str, ...]


class TransfersAwaited(msgspec.Struct, frozen=True):
    """Copies, by their jobs, which the workers finish before this step computes anything."""

    jobs: tuple[str, ...]


STEP, JOB, REQUEST = ENDS = ("step", "job", "request")
"""When a copy is done: before the next step begins, when the workers report its job, when vLLM has its request's."""


class MetadataSeen(msgspec.Struct, frozen=True):
    """A connector, which may be a child of a recorded `MultiConnector`, hands its workers metadata of this class."""

    place: str
    """What the names of the child's jobs begin with; empty for the recorded connector itself."""
    metadata: str
    """Its class."""
    is_decoded: bool
    """Whether a decoder knows the class, so that all copies are in the log."""


class Undecoded(msgspec.Struct, frozen=True):
    """The decoder did not understand the connector's metadata; from here on copies are not recorded."""

    metadata: str
    """Its class."""
    error: str


CHILD = "inside of MultiConnector"
"""Begins the note of a recorder that is not alone: vLLM's reports are of its siblings' requests as well."""


class RecorderEvents(Extension):
    """What a recorder writes."""

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
