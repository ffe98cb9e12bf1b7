"""Makes vLLM 0.32 iterate over sets of request ids in the order of the ids, where the order matters.

The order in which two requests free their blocks decides which blocks the next request gets. Python orders a set of
strings differently in every process. If the ids are sorted, a seed gives the same world in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus


class _InOrder(set[str]):
    """A set that is iterated in sorted order."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


def put_in_order(scheduler: Any) -> None:
    """Let the scheduler handle finished copies, and requests that end together, in the order of request ids."""
    finish_requests = scheduler.finish_requests

    def finish_in_order(request_ids: str | Iterable[str] | None, status: RequestStatus) -> list[Request]:
        if isinstance(request_ids, set):  # from update_from_output
            return [request for request_id in sorted(request_ids) for request in finish_requests(request_id, status)]
        ended: list[Request] = finish_requests(request_ids, status)
        return ended

    scheduler.finish_requests = finish_in_order
    if scheduler.connector is None:
        return
    update_connector_output = scheduler.connector.update_connector_output

    def update_and_put_in_order(output: KVConnectorOutput) -> None:
        update_connector_output(output)
        # `_update_from_kv_xfer_finished` iterates over both after this returns.
        output.finished_recving = _InOrder(output.finished_recving or ())
        output.finished_sending = _InOrder(output.finished_sending or ())

    scheduler.connector.update_connector_output = update_and_put_in_order
