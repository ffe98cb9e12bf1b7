"""Records when copies begin and end, as decoders read it from the metadata of the connector and of its workers.

If the metadata does not name a copy's request, the copy is recorded for the request that most recently got the blocks.
This module must not know any connector's metadata.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

import msgspec

from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorder import decoders
from kvledger.adapters.recorder.log import RecorderLog
from kvledger.adapters.recorder.page_digests import CopiedPages, FoundDigests
from kvledger.adapters.vllm.digests import is_chosen
from kvledger.adapters.vllm.log_ids import LogIds
from kvledger.lifecycle import described, raise_if_unstoppable
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NULL_BLOCK

Life = tuple[str, int, int]
"""Request id, ordinal and generation."""
_Result = TypeVar("_Result")
_NOBODY = ("", -1, 0)
_MANY = 1 << 40


class _Page(NamedTuple):
    life: Life
    place: int
    """Index in the life's flat block table; see `lifecycle/geometry.py`."""


class Transfers:
    """Records copies, until a decoder fails to read metadata."""

    def __init__(self, log: RecorderLog, num_workers: int, *, digest_share: float, ids: LogIds) -> None:
        """Record into `log`. `ids` maps vLLM's request ids to the ids in the log."""
        self._log = log
        self._digest_share = digest_share
        self._ids = ids
        self._num_workers = num_workers
        self._tracker = log.tracker
        self._decodes = True
        self._seen: set[payloads.MetadataSeen] = set()
        """Classes of metadata that are in the log."""
        self._given: dict[int, _Page] = {}
        """Block → the life that got the block last, and the block's index in that life's table."""
        self._part_filled: dict[int, tuple[_Page, payloads.Transferred]] = {}
        """Block that was saved as a whole block before it was full → the block's life and index, and the copy."""
        self._reports: Counter[str] = Counter()
        """Job → number of workers that have done the job, as long as some have not."""

    def given(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Note that the request got these blocks, which are now the last blocks in its table."""
        record = self._tracker.get(request_id)
        if record is not None:
            first = len(record.block_ids or ()) - len(block_ids)
            life = record.life
            self._given.update((block_id, _Page(life, place)) for place, block_id in enumerate(block_ids, first))

    def step(self, event: e.StepScheduled) -> None:
        """Note the blocks that requests get in a step."""
        for ordinal, block_ids in event.extended:
            record = self._tracker.of(ordinal)
            if record is not None:
                self.given(record.request_id, block_ids)

    def built(self, metadata: object, loaded_to: Mapping[str, int]) -> tuple[CopiedPages, ...]:
        """Record the copies in a step's metadata. Return the pages that the workers must digest.

        `loaded_to` is request id → number of tokens up to which the request's last load fills its blocks.
        """
        for seen in self._read(metadata, lambda: tuple(decoders.seen(metadata))) or ():
            if seen not in self._seen:
                self._seen.add(seen)
                self._log.note(seen)
        jobs = self._read(metadata, lambda: tuple(decoders.awaited(metadata)))
        if jobs:
            self._log.note(payloads.TransfersAwaited(jobs))
        block_size = self._log.configuration.block_size
        asked: list[CopiedPages] = []
        for vllm_id, copy in self._read(metadata, lambda: list(decoders.copies(metadata, block_size))) or ():
            request_id = self._ids.logged(vllm_id)
            for life, part in self._for_whom(request_id, copy):
                self._observe(life, part, is_inferred=not request_id)
            if self._digest_share:
                asked += self._ask(request_id, copy, loaded_to)
        return (*self._filled_since(), *asked)

    def _filled_since(self) -> Iterator[CopiedPages]:
        """Yield blocks that were saved before they were full, if this step fills them, so that workers digest them."""
        num_groups = len(self._log.configuration.windows)
        for block_id, (page, copy) in list(self._part_filled.items()):
            record, (block, group) = self._tracker.of(page.life[1]), divmod(page.place, num_groups)
            table = () if record is None else record.block_ids or ()
            if record is None or record.life != page.life or page.place >= len(table) or table[page.place] != block_id:
                del self._part_filled[block_id]
            elif block < self._tracker.num_computed_tokens(record) // self._log.configuration.block_size:
                del self._part_filled[block_id]
                vllm_id = self._ids.given(page.life[0])
                of_copy = vllm_id, copy.job, copy.is_load, payloads.STEP
                yield CopiedPages(page.life, *of_copy, group, block, (block_id,))

    def _ask(self, request_id: str, copy: payloads.Transferred, loaded_to: Mapping[str, int]) -> Iterator[CopiedPages]:
        """Yield the blocks of a copy that are full and chosen for digests.

        Consecutive blocks of a table, in the same group, are yielded together.
        """
        num_groups = len(self._log.configuration.windows)
        record = self._tracker.get(request_id)
        table = enumerate(() if record is None else record.block_ids or ())
        places = {} if record is None else {block_id: _Page(record.life, place) for place, block_id in table}
        found = []
        for block_id in copy.block_ids:
            page = places.get(block_id) or self._given.get(block_id)
            if page is not None and block_id != NULL_BLOCK:
                block, group = divmod(page.place, num_groups)
                if not is_chosen(block, self._digest_share):
                    continue
                if block < self._num_full_blocks(page.life, copy, loaded_to):
                    found.append((page.life, group, block, block_id))
                elif copy.is_whole and not copy.is_load:
                    self._part_filled[block_id] = page, copy
        numbered = enumerate(sorted(found))
        for _, row in groupby(numbered, lambda each: (*each[1][:2], each[1][2] - each[0])):
            pages = [page for _, page in row]
            life, group, first_block, _ = pages[0]
            block_ids = tuple(block_id for *_, block_id in pages)
            vllm_id = self._ids.given(life[0])
            yield CopiedPages(life, vllm_id, copy.job, copy.is_load, copy.ends_with, group, first_block, block_ids)

    def _num_full_blocks(self, life: Life, copy: payloads.Transferred, loaded_to: Mapping[str, int]) -> int:
        """Return how many blocks of the life's table are full.

        For a load, count the blocks that are full after the load. For a save, count the blocks that are full after the
        step.
        """
        record = self._tracker.of(life[1])
        if record is None or record.life != life:
            return 0 if copy.is_load else _MANY  # the life lost its blocks: it loads nothing, and they count as full
        num_tokens = loaded_to.get(life[0], 0) if copy.is_load else self._tracker.num_computed_tokens(record)
        return num_tokens // self._log.configuration.block_size

    def digested(self, found: FoundDigests, invalid_block_ids: set[int]) -> None:
        """Record the digests that a worker found. Digests of a copy with a block in `invalid_block_ids` are dropped."""
        pages = found.pages
        if invalid_block_ids.isdisjoint(pages.block_ids):
            is_load, where, now = pages.is_load, (pages.group, pages.first_block), self._log.now()
            self._log.observe(e.PagesDigested(*pages.life, found.rank, is_load, *where, found.digests, (), now))

    def reported(self, worker_metadata: object) -> None:
        """Count the workers that have done each job. Record the jobs that all workers have now done."""
        for job, count in self._read(worker_metadata, lambda: list(decoders.completed(worker_metadata))) or ():
            self._reports[job] += count
        ended = tuple(job for job, count in self._reports.items() if count >= self._num_workers)
        if ended:
            for job in ended:
                del self._reports[job]
            self._log.note(payloads.TransfersEnded(ended))

    def _for_whom(
        self, request_id: str, copy: payloads.Transferred
    ) -> Iterator[tuple[tuple[str, int], payloads.Transferred]]:
        if request_id:
            yield (request_id, self._tracker.ordinal(request_id)), copy
            return
        first_block = copy.first_block
        for life, blocks in groupby(copy.block_ids, self._whose):
            part = tuple(blocks)
            yield life, msgspec.structs.replace(copy, block_ids=part, first_block=first_block)
            first_block += len(part) if first_block >= 0 else 0

    def _whose(self, block_id: int) -> tuple[str, int]:
        page = self._given.get(block_id)
        return _NOBODY[:2] if page is None else page.life[:2]

    def _observe(self, life: tuple[str, int], copy: payloads.Transferred, *, is_inferred: bool) -> None:
        request_id, ordinal = life
        is_over = ordinal < 0 or self._tracker.ordinal(request_id) != ordinal
        if is_over or (is_inferred and not self._has(request_id, copy)):
            self._log.note(payloads.TransferredFor(request_id, copy))
        else:
            self._log.note(copy, request_id)

    def _has(self, request_id: str, copy: payloads.Transferred) -> bool:
        """Whether the request holds the copy's blocks, or has lost them since the last step."""
        record = self._tracker.get(request_id)
        held = set() if record is None else {*(record.block_ids or ()), *(record.lost_block_ids or ())}
        return set(copy.block_ids) <= held

    def _read(self, metadata: object, decode: Callable[[], _Result]) -> _Result | None:
        if not self._decodes:
            return None
        try:
            return decode()
        except BaseException as error:  # noqa: BLE001 -- another version of the connector
            raise_if_unstoppable(error)
            self._decodes = False
            undecoded = payloads.Undecoded(type(metadata).__name__, type(error).__name__)
            self._log.note(undecoded)
            self._log.messages.warning(
                "the recorder cannot read the connector's metadata and has stopped recording the connector's copies",
                metadata=undecoded.metadata,
                error=described(error),
            )
            return None
