"""Copies that the connector's metadata begins and that its workers report, as the decoders read them, on the record.

Where the metadata does not say for whom a copy is, the blocks say it: they belong to the request that was given them
last. It must not know what any connector's metadata looks like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvledger.adapters.recorder import decoders, said
from kvledger.adapters.recorder.extension import Recorder
from kvledger.adapters.recorder.log import RecorderLog
from kvledger.lifecycle import events as e
from kvledger.lifecycle.windows import NULL_BLOCK

if TYPE_CHECKING:
    from kvledger.adapters.recorder.page_digests import DigestedCopy

Life = tuple[str, int, int]
"""Request id, ordinal and generation."""
_Result = TypeVar("_Result")
_NOBODY = ("", -1)
NO_PLACE = -1
_MAX_PLACED = 1 << 12
"""Copies of which it is remembered where their blocks stand; of older ones no digests are recorded."""


class Transfers:
    """Ends with the first metadata that no decoder understands; the rest is still recorded."""

    def __init__(self, log: RecorderLog, num_workers: int, *, digests: bool) -> None:
        self._log = log
        self._digests = digests
        self._num_workers = num_workers
        self._tracker = log.tracker
        self._tables = log.projections.blocks
        self._decodes = True
        self._given_to: dict[int, tuple[str, int]] = {}
        """Block -> (request id, ordinal) of the life that was given it last."""
        self._reports: Counter[str] = Counter()
        """Job -> workers that have done it, until all have."""
        self._placed: dict[tuple[str, str, bool, int], tuple[Life, tuple[int, ...]]] = {}
        """Request id, job, direction and group of a copy -> whose it is, and where in the table each block stood."""

    def given(self, life: tuple[str, int], block_ids: Iterable[int]) -> None:
        """The life's request may use these blocks."""
        self._given_to.update(dict.fromkeys(block_ids, life))

    def step(self, event: e.StepScheduled) -> None:
        """So may those that the step extends."""
        for ordinal, block_ids in event.extended:
            record = self._tracker.of(ordinal)
            if record is not None:
                self.given((record.request_id, ordinal), block_ids)

    def built(self, metadata: object) -> None:
        """This is what the workers are given."""
        jobs = self._read(metadata, lambda: tuple(decoders.awaited(metadata)))
        if jobs:
            self._log.observe(Recorder.noted(said.TransfersAwaited(jobs), self._log.now()))
        block_size = self._log.configuration.block_size
        for request_id, copy in self._read(metadata, lambda: list(decoders.copies(metadata, block_size))) or ():
            for life, part in self._for_whom(request_id, copy):
                self._observe(life, part, is_inferred=not request_id)
            if self._digests:
                self._place(request_id, copy)

    def _place(self, request_id: str, copy: said.Transferred) -> None:
        """Remember it for the digests; blocks that are stored already may be left out between those of a copy."""
        record = self._tracker.get(request_id)
        if record is None or copy.first_block < 0 or copy.group < 0:
            return
        whole = self._tables.held(request_id) or self._tables.lost(request_id)
        table = tuple(whole[copy.group :: len(self._log.configuration.windows)])
        places = tuple(
            NO_PLACE if place is None or block_id == NULL_BLOCK else place
            for block_id, place in zip(copy.block_ids, copy.places(table), strict=False)
        )
        self._placed[request_id, copy.job, copy.is_load, copy.group] = record.life, places
        while len(self._placed) > _MAX_PLACED:
            del self._placed[next(iter(self._placed))]

    def placed(self, copy: DigestedCopy) -> Iterator[tuple[Life, int, tuple[int, ...]]]:
        """Whose blocks were digested, where in the table they stand in a row, and their digests."""
        life, places = self._placed.get((copy.request_id, copy.job, copy.is_load, copy.group), (None, ()))
        if life is None:
            return
        found = enumerate(zip(places[copy.first :], copy.digests, strict=False))
        # As many as stand one behind the other have the same distance to their number.
        for distance, run in groupby(found, lambda each: None if each[1][0] == NO_PLACE else each[1][0] - each[0]):
            if distance is not None:
                row = [each for _, each in run]
                yield life, row[0][0], tuple(digest for _, digest in row)

    def reported(self, worker_metadata: object) -> None:
        """This is what the workers say, on top of what vLLM hears."""
        for job, count in self._read(worker_metadata, lambda: list(decoders.completed(worker_metadata))) or ():
            self._reports[job] += count
        ended = tuple(job for job, count in self._reports.items() if count >= self._num_workers)
        if ended:
            for job in ended:
                del self._reports[job]
            self._log.observe(Recorder.noted(said.TransfersEnded(ended), self._log.now()))

    def _for_whom(self, request_id: str, copy: said.Transferred) -> Iterator[tuple[tuple[str, int], said.Transferred]]:
        if request_id:
            yield (request_id, self._tracker.ordinal(request_id)), copy
            return
        first_block = copy.first_block
        for life, blocks in groupby(copy.block_ids, lambda block_id: self._given_to.get(block_id, _NOBODY)):
            part = tuple(blocks)
            yield life, msgspec.structs.replace(copy, block_ids=part, first_block=first_block)
            first_block += len(part) if first_block >= 0 else 0

    def _observe(self, life: tuple[str, int], copy: said.Transferred, *, is_inferred: bool) -> None:
        request_id, ordinal = life
        is_over = ordinal < 0 or self._tracker.ordinal(request_id) != ordinal
        if is_over or (is_inferred and not self._has(request_id, copy)):
            self._log.observe(Recorder.noted(said.TransferredFor(request_id, copy), self._log.now()))
        else:
            self._log.observe(Recorder.observed(request_id, copy, self._log.now()))

    def _has(self, request_id: str, copy: said.Transferred) -> bool:
        """Whether it holds the blocks, or has just lost them."""
        return set(copy.block_ids) <= {*self._tables.held(request_id), *self._tables.lost(request_id)}

    def _read(self, metadata: object, decode: Callable[[], _Result]) -> _Result | None:
        if not self._decodes:
            return None
        try:
            return decode()
        except Exception as error:  # noqa: BLE001 -- another version of the connector
            self._decodes = False
            undecoded = said.Undecoded(type(metadata).__name__, type(error).__name__)
            self._log.observe(Recorder.noted(undecoded, self._log.now()))
            self._log.messages.warning(
                "the connector's metadata is not what the recorder knows; its copies are not recorded",
                metadata=undecoded.metadata,
                error=str(error),
            )
            return None
