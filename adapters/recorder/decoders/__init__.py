"""Reads copies of blocks from the metadata that connectors and their workers exchange. Each connector has one file.

A decoder is chosen by the name of the metadata's class, so no decoder imports a connector. A decoder raises an error if
the class differs from the version for which the decoder was written. Copies in metadata without a decoder are not
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from kvledger.adapters.recorded.payloads import MetadataSeen, Transferred
from kvledger.adapters.recorder.decoders import example, lmcache_mp, nixl, offloading, simple_cpu
from kvledger.lifecycle import logged_request_id

Copies = Iterator[tuple[str, Transferred]]
"""(request id, copy). The id is empty if the metadata names no request or several requests for the copy."""
COPIES: Mapping[str, Callable[[Any, int], Copies]] = MappingProxyType(
    {
        "OffloadingConnectorMetadata": offloading.copies,
        "SimpleCPUOffloadMetadata": simple_cpu.copies,
        "NixlConnectorMetadata": nixl.copies,
        "ExampleConnectorMetadata": example.copies,
        "LMCacheMPConnectorMetadata": lmcache_mp.copies,
    }
)
COMPLETED: Mapping[str, Callable[[Any], Iterator[tuple[str, int]]]] = MappingProxyType(
    {"OffloadingWorkerMetadata": offloading.completed, "SimpleCPUOffloadWorkerMetadata": simple_cpu.completed}
)
_OF_CHILDREN = frozenset({"MultiKVConnectorMetadata", "MultiKVConnectorWorkerMetadata"})
_OF_A_RECORDER = frozenset({"AskedPages", "RecordedReports"})


def copies(metadata: object, block_size: int) -> Copies:
    """Yield the copies that this metadata tells the workers to make."""
    for place, part in _parts(metadata):
        decode = COPIES.get(type(part).__name__)
        for request_id, copy in () if decode is None else decode(part, block_size):
            yield request_id, msgspec.structs.replace(copy, job=_job(place, copy.job))


def awaited(metadata: object) -> Iterator[str]:
    """Yield the jobs that the workers must finish before the step computes anything."""
    for place, part in _parts(metadata):
        if type(part).__name__ == "OffloadingConnectorMetadata":
            yield from (_job(place, job) for job in offloading.awaited(part))


def completed(worker_metadata: object) -> Iterator[tuple[str, int]]:
    """Yield (job, number of workers that have done the job) from the workers' metadata."""
    for place, part in _parts(worker_metadata):
        decode = COMPLETED.get(type(part).__name__)
        yield from ((_job(place, job), count) for job, count in (() if decode is None else decode(part)))


def unread(worker_metadata: object) -> str:
    """Return the name of the first class in the workers' metadata that has no decoder; empty if all have one."""
    parts = (type(part).__name__ for _, part in _parts(worker_metadata) if part is not None)
    return next((name for name in parts if name not in COMPLETED), "")


def seen(metadata: object) -> Iterator[MetadataSeen]:
    """Yield an event for each connector's metadata: the metadata's class, and whether the class has a decoder."""
    for place, part in _parts(metadata):
        if part is not None:
            name = type(part).__name__
            yield MetadataSeen(place, name, name in COPIES)


def _job(place: str, job: object) -> str:
    """Return a job's name in the log. A long name is shortened, because a connector may use a request id as name."""
    return logged_request_id(f"{place}{job}")


def _parts(metadata: Any, place: str = "") -> Iterator[tuple[str, object]]:
    """Yield (prefix of the jobs' names, metadata of one connector). Metadata is taken out of a recorder's envelope.

    The prefix has the number of the child in a `MultiConnector` (`kv_connector/v1/multi_connector.py`, 0.32).
    """
    if type(metadata).__name__ in _OF_CHILDREN:
        for number, child in enumerate(metadata.metadata):
            yield from _parts(child, f"{place}{number}/")
    elif type(metadata).__name__ in _OF_A_RECORDER:
        yield from _parts(metadata.wrapped, place)
    else:
        yield place, metadata
