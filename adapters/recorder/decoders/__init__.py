"""What connectors hand to their workers, read as copies of blocks; a file for each connector.

A decoder knows the class of the metadata and nothing else of its connector. Which one is asked is decided by the name
of that class, so none imports a connector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from kvledger.adapters.recorder.decoders import lmcache_mp, multi, offloading
from kvledger.adapters.recorder.said import Transferred

Copies = Iterator[tuple[str, Transferred]]
"""(request id, copy)."""
DECODERS: Mapping[str, Callable[[Any], Copies]] = MappingProxyType(
    {
        "OffloadingConnectorMetadata": offloading.copies,
        "LMCacheMPConnectorMetadata": lmcache_mp.copies,
        "MultiKVConnectorMetadata": lambda metadata: multi.copies(metadata, decoded),
    }
)


def decoded(metadata: object) -> Copies:
    """The copies that metadata hands to the workers; none of a class that no decoder knows.

    Raises:
        Exception: the metadata is not what its class had in the version that the decoder was written for.
    """
    decoder = DECODERS.get(type(metadata).__name__)
    return iter(()) if decoder is None else decoder(metadata)
