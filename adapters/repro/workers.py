"""What workers report of copies that they have completed, as the wrapped connector's scheduler side is told of it.

The way back from the recorder's decoders, read against vLLM 0.32. A connector that hears of its copies by
`finished_sending` and `finished_recving` alone needs none of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


def worker_metadata(completed: Mapping[str, int], children: Sequence[object] = ()) -> KVConnectorWorkerMetadata | None:
    """Metadata that says so; None where nothing is completed.

    Args:
        completed: job, as the decoders name it -> workers that have done it.
        children: of the connector, where it is a `MultiConnector`.
    """
    if not completed:
        return None
    if children:
        of_children: list[dict[str, int]] = [{} for _ in children]
        for job, count in completed.items():
            place, _, name = job.partition("/")
            of_children[int(place)][name] = count
        told = (
            worker_metadata(of_child, getattr(child, "_connectors", ()))
            for of_child, child in zip(of_children, children, strict=True)
        )
        return MultiKVConnectorWorkerMetadata(tuple(told))
    return OffloadingWorkerMetadata({int(job): count for job, count in completed.items()})
