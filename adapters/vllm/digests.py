"""Chooses for which pages of a job the workers compute digests, and records the digests.

A digest is a hash of 64 bits over the bytes of a page (`storage/kv/digests.py`). Only full blocks are digested, because
the bytes after the last token of a part-filled block are arbitrary. A slot is digested in every copy or in none, so
that the bytes that a load reads from the slot can be compared with the bytes that a save wrote there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvledger.adapters.vllm.metadata import DigestedJob, JobReport
from kvledger.lifecycle import PageJob as Issued
from kvledger.lifecycle import Projections
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT

NOT_DIGESTED = -1
_SPREADS = 0x9E3779B97F4A7C15
"""Multiplier of slot numbers. It is odd, so that the products spread evenly over 64 bits."""
_ALL = 1 << 64


def is_chosen(number: int, share: float) -> bool:
    """Whether the slot or block with this number is in the digested share. Depends on the two arguments only."""
    return number * _SPREADS % _ALL < share * _ALL


class DigestedPages:
    """Chooses which pages of one engine are digested, and turns the reported digests into observations."""

    share: float = 0
    """Share of the slots that are digested, from 0 (none) to 1 (all)."""

    def __init__(self, projections: Projections) -> None:
        self._jobs = projections.jobs
        self._geometry = projections.geometry
        self._num_groups = len(projections.configuration.windows)

    def of_job(self, job: Issued) -> tuple[int, ...]:
        """Return, for each copied block, its place in the request's flat table, or `NOT_DIGESTED`.

        The flat table has the blocks of all groups. The result is empty if no block is digested.
        """
        if not self.share or isinstance(job, e.TailSaveIssued):
            return ()
        size = self._geometry.block_size
        if isinstance(job, e.LoadIssued):
            pages = self._geometry.pages_spanning(job.first_token, job.num_tokens)
            whole = range(-(-job.first_token // size), (job.first_token + job.num_tokens) // size)
            places = [page if page // self._num_groups in whole else NOT_DIGESTED for page in pages]
        else:
            ends = {(chunk + 1) * self._geometry.chunk_size for chunk in job.chunks}
            is_part = 0 < self._geometry.chunk_size < size
            places = [
                page if not is_part or (page // self._num_groups + 1) * size in ends else NOT_DIGESTED
                for page in self._geometry.pages_of(job.chunks)
            ]
        copied = [
            (place if is_chosen(slot, self.share) else NOT_DIGESTED)
            for place, slot in zip(places, job.slots, strict=False)
            if slot != NO_SLOT
        ]
        if len(places) != len(job.slots):  # a foreign handler made the job; it is refused elsewhere
            return ()
        return tuple(copied) if any(place != NOT_DIGESTED for place in copied) else ()

    def events(self, reports: Iterable[JobReport], time_ns: int) -> Iterator[e.PagesDigested]:
        """Yield the digests in these reports, one event for each run of consecutive blocks.

        Digests of jobs that are already settled are left out.
        """
        for rank, digested in [(report.rank, digested) for report in reports for digested in report.digested]:
            job = self._jobs.get(digested.job_id)
            if job is None:
                continue
            for group, run in self._runs(digested):
                digests = tuple(digest for _, digest, _ in run)
                stored = tuple(digest for _, _, digest in run if digest is not None)
                is_load, first_block = job.kind.value == "load", run[0][0]
                yield e.PagesDigested(*job.life, rank, is_load, group, first_block, digests, stored, time_ns)

    def _runs(self, digested: DigestedJob) -> Iterator[tuple[int, list[tuple[int, int, int | None]]]]:
        """Yield (group, run) for each run of consecutive blocks. A run lists (block, digest, digest of its slot)."""
        by_group: dict[int, list[tuple[int, int, int | None]]] = {}
        stored = digested.stored_digests or (None,) * len(digested.digests)
        for page, digest, of_slot in zip(digested.pages, digested.digests, stored, strict=True):
            by_group.setdefault(page % self._num_groups, []).append((page // self._num_groups, digest, of_slot))
        for group, found in sorted(by_group.items()):
            run: list[tuple[int, int, int | None]] = []
            for each in sorted(found):
                if run and each[0] != run[-1][0] + 1:
                    yield group, run
                    run = []
                run.append(each)
            yield group, run
