"""Where vLLM 0.32 iterates over a set of request ids and the order matters: the order of the ids.

Which of two requests gives its blocks back first decides which blocks the next one gets. Python's order of strings in a
set is another one in every process; with this one a seed decides a world in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus


class _InOrder(set[str]):
    """A set that is iterated in order."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


def put_in_order(scheduler: Any) -> None:
    """Frees the blocks whose copies have ended, and ends the requests whose loads have failed, in the order of ids."""
    finish_requests = scheduler.finish_requests

    def finish_in_order(request_ids: str | Iterable[str] | None, status: RequestStatus) -> list[Request]:
        if isinstance(request_ids, set):  # those of update_from_output
            return [request for request_id in sorted(request_ids) for request in finish_requests(request_id, status)]
        ended: list[Request] = finish_requests(request_ids, status)
        return ended

    scheduler.finish_requests = finish_in_order
    if scheduler.connector is None:
        return
    update_connector_output = scheduler.connector.update_connector_output

    def update_and_put_in_order(output: KVConnectorOutput) -> None:
        update_connector_output(output)
        # `_update_from_kv_xfer_finished` goes through both when it returns from here.
        output.finished_recving = _InOrder(output.finished_recving or ())
        output.finished_sending = _InOrder(output.finished_sending or ())

    scheduler.connector.update_connector_output = update_and_put_in_order
