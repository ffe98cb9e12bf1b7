"""Reads what connectors hand to their workers and get from them as copies of blocks; a file for each connector.

A decoder knows the class of the metadata and nothing else of its connector. Which one is asked is decided by the name
of that class, so none imports a connector. Of a class that no decoder knows nothing is recorded; a decoder raises
where its class is not what it was in the version that the decoder was written for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from kvledger.adapters.recorder.decoders import example, lmcache_mp, multi, nixl, offloading, simple_cpu
from kvledger.adapters.recorder.payloads import Transferred

Copies = Iterator[tuple[str, Transferred]]
"""(request id, copy); the id is empty where the metadata names no request, or several."""
COPIES: Mapping[str, Callable[[Any, int], Copies]] = MappingProxyType(
    {
        "OffloadingConnectorMetadata": offloading.copies,
        "SimpleCPUOffloadMetadata": simple_cpu.copies,
        "NixlConnectorMetadata": nixl.copies,
        "ExampleConnectorMetadata": example.copies,
        "LMCacheMPConnectorMetadata": lmcache_mp.copies,
        "MultiKVConnectorMetadata": lambda metadata, block_size: multi.copies(
            metadata, lambda child: copies(child, block_size)
        ),
        # Of a recorder inside of the one that asks, as is the next one and `RecordedReports`.
        "AskedPages": lambda envelope, block_size: copies(envelope.wrapped, block_size),
    }
)
AWAITED: Mapping[str, Callable[[Any], Iterator[str]]] = MappingProxyType(
    {
        "OffloadingConnectorMetadata": offloading.awaited,
        "MultiKVConnectorMetadata": lambda metadata: multi.awaited(metadata, awaited),
        "AskedPages": lambda envelope: awaited(envelope.wrapped),
    }
)
COMPLETED: Mapping[str, Callable[[Any], Iterator[tuple[str, int]]]] = MappingProxyType(
    {
        "OffloadingWorkerMetadata": offloading.completed,
        "SimpleCPUOffloadWorkerMetadata": simple_cpu.completed,
        "RecordedReports": lambda envelope: completed(envelope.wrapped),
        "MultiKVConnectorWorkerMetadata": lambda metadata: multi.completed(metadata, completed),
    }
)


def copies(metadata: object, block_size: int) -> Copies:
    """The copies that metadata hands to the workers."""
    decode = COPIES.get(type(metadata).__name__)
    return iter(()) if decode is None else decode(metadata, block_size)


def awaited(metadata: object) -> Iterator[str]:
    """Jobs that the workers finish before the step of this metadata computes anything."""
    decode = AWAITED.get(type(metadata).__name__)
    return iter(()) if decode is None else decode(metadata)


def completed(worker_metadata: object) -> Iterator[tuple[str, int]]:
    """(job, workers that have done it) of what workers report."""
    decode = COMPLETED.get(type(worker_metadata).__name__)
    return iter(()) if decode is None else decode(worker_metadata)
