"""Digests of the pages that a wrapped connector copies, on their way from the workers to the scheduler's log.

A worker reads from the connector's metadata, by its decoder, which blocks a step saves and loads. What is saved is
digested when the step has computed and before the connector is asked to end its saves; what is loaded, when it is
reported. It never touches a page, and where it fails there are no digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvledger.adapters.recorder import decoders, said
from kvledger.adapters.vllm.digests import is_chosen
from kvledger.adapters.vllm.guard import guarded
from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.worker_side import describe_pages
from kvledger.storage.kv import PageDigests

if TYPE_CHECKING:
    import torch

Copy = tuple[str, said.Transferred]


@attrs.frozen(slots=False)
class DigestedCopy:
    """Blocks in a row of one copy, as one rank had them. Where they stand in the table only the scheduler knows."""

    request_id: str
    job: str
    rank: int
    is_load: bool
    group: int
    first: int
    """Where in the copy they begin."""
    digests: tuple[int, ...]


@attrs.frozen(slots=False)
class RecordedReports(KVConnectorWorkerMetadata):
    """The wrapped connector's own metadata of its workers, in an envelope with the digests."""

    wrapped: KVConnectorWorkerMetadata | None
    digested: tuple[DigestedCopy, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RecordedReports:
        """Both ranks'; the wrapped connector's are put together as it does."""
        if not isinstance(other, RecordedReports):
            return self
        both = [each.wrapped for each in (self, other) if each.wrapped is not None]
        wrapped = both[0].aggregate(both[1]) if len(both) > 1 else next(iter(both), None)
        return RecordedReports(wrapped, self.digested + other.digested)


_NOTHING: tuple[DigestedCopy, ...] = ()


class RecordedPages:
    """Of one rank; `share` of the places in a table are digested, so that a page always is or never.

    Where a copy leaves blocks out, the places behind these are taken for earlier ones: such a page may be digested when
    it is saved and not when it is loaded.
    """

    def __init__(self, rank: int, share: float, *, block_size: int, num_blocks: int) -> None:
        self._rank = rank
        self._share = share
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._digests: PageDigests | None = None
        self._of_step: list[Copy] = []
        """To be digested when the step has computed."""
        self._loading: list[Copy] = []
        """To be digested when they are reported."""
        self._found: list[tuple[DigestedCopy, torch.Tensor]] = []

    def hook_failed(self, hook: str, _request_id: str, error: Exception) -> None:
        """Called by the guard: no more digests."""
        self._digests = None
        self._found, self._of_step, self._loading = [], [], []
        messages.warning("no more digests of pages are made, the connector goes on", hook=hook, error=str(error))

    @guarded(default=None)
    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Learn where pages lie."""
        self._digests = PageDigests(describe_pages(kv_caches, self._num_blocks))

    @guarded(default=None)
    def step_begins(self, metadata: object) -> None:
        """What is to be copied in this step."""
        self._of_step = []
        if self._digests is None:
            return
        for request_id, copy in decoders.copies(metadata, self._block_size):
            if not request_id or copy.first_block < 0 or copy.group < 0:
                continue  # whose bytes they are is not known here
            later = copy.is_load and copy.ends_with != said.STEP
            (self._loading if later else self._of_step).append((request_id, copy))

    @guarded(default=None)
    def step_has_computed(self) -> None:
        """Its blocks are full, and its saves are about to end."""
        copies, self._of_step = self._of_step, []
        self._digest(copies)

    @guarded(default=None)
    def received(self, request_ids: Iterable[str], failed: Iterable[str]) -> None:
        """The loads of these requests have come; of others it is known that they have not."""
        self._ended(lambda request_id, _: request_id in set(request_ids), failed)

    @guarded(default=None)
    def reported(self, worker_metadata: object) -> None:
        """The jobs in it are done."""
        jobs = {job for job, _ in decoders.completed(worker_metadata)} if self._loading else ()
        self._ended(lambda _, copy: copy.job in jobs, ())

    def enveloped(self, worker_metadata: KVConnectorWorkerMetadata | None) -> RecordedReports | None:
        """The wrapped connector's metadata, and what was found since the last call."""
        found = self._taken()
        return None if worker_metadata is None and not found else RecordedReports(worker_metadata, found)

    @guarded(default=_NOTHING)
    def _taken(self) -> tuple[DigestedCopy, ...]:
        found, self._found = self._found, []
        return tuple(attrs.evolve(copy, digests=tuple(digests.tolist())) for copy, digests in found)

    def _ended(self, has_ended: Callable[[str, said.Transferred], bool], failed: Iterable[str]) -> None:
        lost = set(failed)
        ended = [each for each in self._loading if has_ended(*each)]
        self._loading = [each for each in self._loading if each not in ended and each[0] not in lost]
        self._digest([each for each in ended if each[0] not in lost])

    def _digest(self, copies: Iterable[Copy]) -> None:
        if self._digests is None:
            return
        for request_id, copy in copies:
            for first, blocks in self._runs(copy):
                digested = DigestedCopy(request_id, copy.job, self._rank, copy.is_load, copy.group, first, ())
                self._found.append((digested, self._digests.of_blocks(blocks)))

    def _runs(self, copy: said.Transferred) -> Iterable[tuple[int, list[int]]]:
        """Blocks in a row that are digested, with the number of the first in the copy."""
        run: list[int] = []
        for number, block_id in enumerate((*copy.block_ids, None)):
            place = copy.first_block + number
            if block_id is not None and is_chosen(place, self._share):
                run.append(block_id)
            elif run:
                yield number - len(run), run
                run = []


def taken_out(output: Any) -> tuple[DigestedCopy, ...]:
    """The digests in what the workers report, which then is what the wrapped connector's own workers said."""
    reports = getattr(output, "kv_connector_worker_meta", None)
    if not isinstance(reports, RecordedReports):
        return ()
    output.kv_connector_worker_meta = reports.wrapped
    return reports.digested
