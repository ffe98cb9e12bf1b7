"""Digests of the pages that a wrapped connector copies.

The scheduler's side names the pages that a step saves and loads, in an envelope around the connector's metadata.
Workers digest saved pages, and those of loads within the step, after the step has computed and before `wait_for_save`;
other loads when they are reported. The digests return in an envelope around the worker metadata. The connector sees
neither envelope. Pages are only read. After a failure no more digests are computed.
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
    """Consecutive full blocks of a copy in a request's table."""

    life: tuple[str, int, int]
    """Request id in the log, ordinal and generation."""
    vllm_id: str
    """Request id in the workers' reports."""
    job: str
    is_load: bool
    ends_with: str
    """As in `payloads.Transferred`."""
    group: int
    first_block: int
    """Index of the first block in the group's table."""
    block_ids: tuple[int, ...]


@attrs.frozen(slots=False)
class AskedPages(KVConnectorMetadata):
    """Envelope with the wrapped connector's metadata and the pages to digest."""

    wrapped: KVConnectorMetadata
    pages: tuple[CopiedPages, ...]


@attrs.frozen(slots=False)
class FoundDigests:
    """Digests that one rank computed, one for each block."""

    pages: CopiedPages
    rank: int
    digests: tuple[int, ...]


@attrs.frozen(slots=False)
class RecordedReports(KVConnectorWorkerMetadata):
    """Envelope with the wrapped connector's worker metadata, digests and ends."""

    wrapped: KVConnectorWorkerMetadata | None
    digested: tuple[FoundDigests, ...]
    ends: tuple[payloads.ReportedBy, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RecordedReports:
        """Join the reports of two ranks."""
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
"""Method that the recorder's connector calls → what it returns if it raises."""
_Opened = tuple[tuple[FoundDigests, ...], tuple[payloads.ReportedBy, ...]]


@guarded(HOOKS)
class RecordedPages:
    """Computes the digests of one rank."""

    def __init__(self, rank: int, num_blocks: int) -> None:
        self._rank = rank
        self._num_blocks = num_blocks
        self._digests: PageDigests | None = None
        self._of_step: list[CopiedPages] = []
        """Pages to digest when the step has computed."""
        self._loading: list[CopiedPages] = []
        """Pages to digest when their load is reported."""
        self._found: list[tuple[CopiedPages, torch.Tensor]] = []

    def hook_failed(self, hook: str, _request_id: str, error: BaseException) -> None:
        """Compute no more digests; the guard calls this."""
        self._digests = None
        self._found, self._of_step, self._loading = [], [], []
        messages.warning(
            "no more digests of pages are computed; the connector goes on",
            hook=hook,
            error=described(error),
        )

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Learn where the pages lie."""
        self._digests = PageDigests(describe_pages(kv_caches, self._num_blocks))

    def step_begins(self, metadata: object) -> None:
        """Note the pages that a step copies."""
        self._of_step = []
        for copied in metadata.pages if isinstance(metadata, AskedPages) else ():
            (self._loading if copied.is_load and copied.ends_with != payloads.STEP else self._of_step).append(copied)

    def step_has_computed(self) -> None:
        """Digest the step's pages: they are full, and its saves have not ended."""
        copies, self._of_step = self._of_step, []
        self._digest(copies)

    def received(self, request_ids: Iterable[str], failed: Iterable[str]) -> None:
        """Digest the arrived loads of these requests; forget failed ones."""
        came = set(request_ids)
        self._ended(lambda copied: copied.vllm_id in came, failed)

    def reported(self, worker_metadata: object) -> None:
        """Digest the loads whose jobs this metadata reports as done."""
        jobs = {job for job, _ in decoders.completed(worker_metadata)} if self._loading else ()
        self._ended(lambda copied: copied.job in jobs, ())

    def taken(self) -> tuple[FoundDigests, ...]:
        """Return the digests since the last call."""
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
    """Return the wrapped connector's metadata."""
    return metadata.wrapped if isinstance(metadata, AskedPages) else metadata


def is_or_holds(outer: object, metadata: object) -> bool:
    """Whether `outer` is this metadata or an envelope around it."""
    while outer is not metadata and isinstance(outer, AskedPages):
        outer = outer.wrapped
    return outer is metadata


def enveloped(
    worker_metadata: KVConnectorWorkerMetadata | None,
    found: tuple[FoundDigests, ...],
    ends: tuple[payloads.ReportedBy, ...],
) -> RecordedReports | None:
    """Put worker metadata, digests and ends into an envelope, if there are any."""
    return RecordedReports(worker_metadata, found, ends) if worker_metadata is not None or found or ends else None


def taken_out(output: Any) -> _Opened:
    """Remove and return digests and ends, which leaves the wrapped connector's report."""
    reports = getattr(output, "kv_connector_worker_meta", None)
    if not isinstance(reports, RecordedReports):
        return (), ()
    output.kv_connector_worker_meta = reports.wrapped
    return reports.digested, reports.ends
