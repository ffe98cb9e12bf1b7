"""Digests of the pages that a wrapped connector copies: asked for by the scheduler, found by the workers.

The scheduler's side knows whose blocks a step saves and loads, and hands them to the workers in an envelope around the
connector's metadata. What is saved is digested when the step has computed and before the connector is asked to end its
saves; what is loaded, when it is reported. What was found travels back in an envelope around the connector's own worker
metadata. Both are taken off before the connector sees them. No page is ever touched, and where this fails there are no
digests.
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
    """Blocks of a copy that stand in a row in the table of a request, all of them full."""

    life: tuple[str, int, int]
    """Request id in the log, ordinal and generation."""
    vllm_id: str
    """Request id by which the workers report the end of its load."""
    job: str
    is_load: bool
    ends_with: str
    """As of the copy, see `payloads.ENDS`."""
    group: int
    first_block: int
    """Where in the group's table they begin."""
    block_ids: tuple[int, ...]


@attrs.frozen(slots=False)
class AskedPages(KVConnectorMetadata):
    """The wrapped connector's own metadata, in an envelope with what the workers are to digest."""

    wrapped: KVConnectorMetadata
    pages: tuple[CopiedPages, ...]


@attrs.frozen(slots=False)
class FoundDigests:
    """What one rank has found of them, one digest for each block."""

    pages: CopiedPages
    rank: int
    digests: tuple[int, ...]


@attrs.frozen(slots=False)
class RecordedReports(KVConnectorWorkerMetadata):
    """The wrapped connector's own metadata of its workers, in an envelope with the digests."""

    wrapped: KVConnectorWorkerMetadata | None
    digested: tuple[FoundDigests, ...]
    ends: tuple[payloads.ReportedBy, ...] = ()
    """Who has reported which ends; see `ends.py`."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RecordedReports:
        """Both ranks'; the wrapped connector's are put together as it does."""
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
"""What the recorder's connector calls → what it is answered if that raises."""
_Opened = tuple[tuple[FoundDigests, ...], tuple[payloads.ReportedBy, ...]]


@guarded(HOOKS)
class RecordedPages:
    """Of one rank."""

    def __init__(self, rank: int, num_blocks: int) -> None:
        self._rank = rank
        self._num_blocks = num_blocks
        self._digests: PageDigests | None = None
        self._of_step: list[CopiedPages] = []
        """To be digested when the step has computed."""
        self._loading: list[CopiedPages] = []
        """To be digested when they are reported."""
        self._found: list[tuple[CopiedPages, torch.Tensor]] = []

    def hook_failed(self, hook: str, _request_id: str, error: BaseException) -> None:
        """Called by the guard: no more digests."""
        self._digests = None
        self._found, self._of_step, self._loading = [], [], []
        messages.warning("no more digests of pages are made, the connector goes on", hook=hook, error=described(error))

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Learn where pages lie."""
        self._digests = PageDigests(describe_pages(kv_caches, self._num_blocks))

    def step_begins(self, metadata: object) -> None:
        """What is to be copied in this step."""
        self._of_step = []
        for copied in metadata.pages if isinstance(metadata, AskedPages) else ():
            (self._loading if copied.is_load and copied.ends_with != payloads.STEP else self._of_step).append(copied)

    def step_has_computed(self) -> None:
        """Its blocks are full, and its saves are about to end."""
        copies, self._of_step = self._of_step, []
        self._digest(copies)

    def received(self, request_ids: Iterable[str], failed: Iterable[str]) -> None:
        """The loads of these requests have come; of others it is known that they have not."""
        came = set(request_ids)
        self._ended(lambda copied: copied.vllm_id in came, failed)

    def reported(self, worker_metadata: object) -> None:
        """The jobs in it are done."""
        jobs = {job for job, _ in decoders.completed(worker_metadata)} if self._loading else ()
        self._ended(lambda copied: copied.job in jobs, ())

    def taken(self) -> tuple[FoundDigests, ...]:
        """What was found since the last call."""
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
    """The wrapped connector's own."""
    return metadata.wrapped if isinstance(metadata, AskedPages) else metadata


def is_or_holds(outer: object, metadata: object) -> bool:
    """Whether `outer` is this metadata of a connector, or an envelope around it."""
    while outer is not metadata and isinstance(outer, AskedPages):
        outer = outer.wrapped
    return outer is metadata


def enveloped(
    worker_metadata: KVConnectorWorkerMetadata | None,
    found: tuple[FoundDigests, ...],
    ends: tuple[payloads.ReportedBy, ...],
) -> RecordedReports | None:
    """The wrapped connector's metadata, with what was found since the last call."""
    return RecordedReports(worker_metadata, found, ends) if worker_metadata is not None or found or ends else None


def taken_out(output: Any) -> _Opened:
    """Digests and ends in what the workers report, which then is what the wrapped connector's own workers said."""
    reports = getattr(output, "kv_connector_worker_meta", None)
    if not isinstance(reports, RecordedReports):
        return (), ()
    output.kv_connector_worker_meta = reports.wrapped
    return reports.digested, reports.ends
