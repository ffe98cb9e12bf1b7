"""Digests of the pages that a wrapped connector copies.

The scheduler's side names the pages that a step saves and loads, in an envelope around the connector's metadata. After
the step has computed and before `wait_for_save`, workers compute digests of the saved pages and of the pages that are
loaded within the step. Digests of other loads are computed when the loads are reported. The workers send the
digests in an envelope around the worker metadata. The connector sees neither envelope. Pages are only read, never
written. After a failure, no more digests are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorder import decoders
from kvledger.adapters.vllm.journal import Fallback, guarded
from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.worker_side import describe_pages
from kvledger.lifecycle import described
from kvledger.storage.kv import PageDigests

if TYPE_CHECKING:
    import torch


@attrs.frozen(slots=False)
class CopiedPages:
    """Full blocks of a copy that are consecutive in a request's block table."""

    life: tuple[str, int, int]
    """Three values: the request id in the log, the ordinal, and the generation."""
    vllm_id: str
    """The request's id in the workers' reports."""
    job: str
    is_load: bool
    ends_with: str
    """As in `payloads.Transferred`."""
    group: int
    first_block: int
    """Index of the first block among the request's blocks in this group."""
    block_ids: tuple[int, ...]


@attrs.frozen(slots=False)
class AskedPages(KVConnectorMetadata):
    """Envelope with the wrapped connector's metadata and the pages whose digests the workers must compute."""

    wrapped: KVConnectorMetadata
    pages: tuple[CopiedPages, ...]


@attrs.frozen(slots=False)
class FoundDigests:
    """Digests that one rank computed, one for each block of `pages`."""

    pages: CopiedPages
    rank: int
    digests: tuple[int, ...]


@attrs.frozen(slots=False)
class RecordedReports(KVConnectorWorkerMetadata):
    """Envelope with the wrapped connector's worker metadata, digests, and ends that connectors reported."""

    wrapped: KVConnectorWorkerMetadata | None
    digested: tuple[FoundDigests, ...]
    ends: tuple[payloads.ReportedBy, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RecordedReports:
        """Return an envelope with the contents of this one and of `other`, which is from another rank."""
        if not isinstance(other, RecordedReports):
            return self
        both = [each.wrapped for each in (self, other) if each.wrapped is not None]
        wrapped = both[0].aggregate(both[1]) if len(both) > 1 else next(iter(both), None)
        return RecordedReports(wrapped, self.digested + other.digested, self.ends + other.ends)


HOOKS: Final = {
    "register": Fallback(),
    "step_begins": Fallback(),
    "step_has_computed": Fallback(),
    "received": Fallback(),
    "reported": Fallback(),
    "taken": Fallback(()),
}
"""Method that the recorder's connector calls → the value to return if the method raises."""
_Opened = tuple[tuple[FoundDigests, ...], tuple[payloads.ReportedBy, ...]]


@guarded(HOOKS)
class RecordedPages:
    """Computes the digests of pages on one rank."""

    def __init__(self, rank: int, num_blocks: int) -> None:
        self._rank = rank
        self._num_blocks = num_blocks
        self._digests: PageDigests | None = None
        self._of_step: list[CopiedPages] = []
        """Pages whose digests are computed when the step has computed."""
        self._loading: list[CopiedPages] = []
        """Pages whose digests are computed when their load is reported."""
        self._found: list[tuple[CopiedPages, torch.Tensor]] = []

    def hook_failed(self, hook: str, _request_id: str, error: BaseException) -> None:
        """Compute no more digests, because another method raised. The decorator `guarded` calls this."""
        self._digests = None
        self._found, self._of_step, self._loading = [], [], []
        messages.warning(
            "no more digests of pages are computed; the connector continues",
            hook=hook,
            error=described(error),
        )

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Note where the pages are in the KV tensors."""
        self._digests = PageDigests(describe_pages(kv_caches, self._num_blocks))

    def step_begins(self, metadata: object) -> None:
        """Note the pages that a step copies and whose digests are to be computed."""
        self._of_step = []
        for copied in metadata.pages if isinstance(metadata, AskedPages) else ():
            (self._loading if copied.is_load and copied.ends_with != payloads.STEP else self._of_step).append(copied)

    def step_has_computed(self) -> None:
        """Compute the digests of the pages that the step copies. These pages are full now. No save has ended yet."""
        copies, self._of_step = self._of_step, []
        self._digest(copies)

    def received(self, request_ids: Iterable[str], failed: Iterable[str]) -> None:
        """Compute the digests of the pages that were loaded for `request_ids`. Forget loads of requests in `failed`."""
        came = set(request_ids)
        self._ended(lambda copied: copied.vllm_id in came, failed)

    def reported(self, worker_metadata: object) -> None:
        """Compute the digests of the pages of loads whose jobs `worker_metadata` reports as done."""
        jobs = {job for job, _ in decoders.completed(worker_metadata)} if self._loading else ()
        self._ended(lambda copied: copied.job in jobs, ())

    def taken(self) -> tuple[FoundDigests, ...]:
        """Return the digests that were computed since the last call of this method."""
        found, self._found = self._found, []
        return tuple(FoundDigests(copied, self._rank, tuple(digests.tolist())) for copied, digests in found)

    def _ended(self, has_ended: Callable[[CopiedPages], bool], failed: Iterable[str]) -> None:
        lost = set(failed)
        here = [each for each in self._loading if each.vllm_id not in lost]
        self._loading = [each for each in here if not has_ended(each)]
        self._digest(each for each in here if has_ended(each))

    def _digest(self, copies: Iterable[CopiedPages]) -> None:
        if self._digests is not None:
            self._found += [(copied, self._digests.of_blocks(copied.block_ids)) for copied in copies]


def opened(metadata: KVConnectorMetadata) -> KVConnectorMetadata:
    """Return the wrapped connector's metadata, without the recorder's envelope."""
    return metadata.wrapped if isinstance(metadata, AskedPages) else metadata


def is_or_holds(outer: object, metadata: object) -> bool:
    """Whether `outer` is `metadata` itself, or an envelope of a recorder around it."""
    while outer is not metadata and isinstance(outer, AskedPages):
        outer = outer.wrapped
    return outer is metadata


def enveloped(
    worker_metadata: KVConnectorWorkerMetadata | None,
    found: tuple[FoundDigests, ...],
    ends: tuple[payloads.ReportedBy, ...],
) -> RecordedReports | None:
    """Return an envelope with worker metadata, digests and ends; None if all three are missing."""
    return RecordedReports(worker_metadata, found, ends) if worker_metadata is not None or found or ends else None


def taken_out(output: Any) -> _Opened:
    """Replace the envelope in `output` by the worker metadata inside it. Return the envelope's digests and ends."""
    reports = getattr(output, "kv_connector_worker_meta", None)
    if not isinstance(reports, RecordedReports):
        return (), ()
    output.kv_connector_worker_meta = reports.wrapped
    return reports.digested, reports.ends
