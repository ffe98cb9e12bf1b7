"""Removes ends that another child of a `MultiConnector` reports too early.

An end tells vLLM that a request's load or save is over (`finished_recving`, `finished_sending`). After an early end,
vLLM would compute on blocks that a load is still filling, or free blocks that a copy is still using. If vLLM
does not wait for an end of the request, or has forgotten the request, an assertion in vLLM fails. kvledger removes
an early end before vLLM acts on it, and records the removal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.journal import Journal
from kvledger.adapters.vllm.log_ids import LogIds
from kvledger.adapters.vllm.prefix_cache import PrefixCache
from kvledger.lifecycle import events as e

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_MAX_ENDED = 1024
"""Number of ended requests that are remembered, because another child may report an end after vLLM forgot its
request."""


class EarlyEnds:
    """Finds early ends in the output of the workers, and removes them."""

    def __init__(
        self, journal: Journal, requests: Mapping[str, Request], ids: LogIds, prefix_cache: PrefixCache
    ) -> None:
        self._journal = journal
        self._owed = journal.owed
        self._requests = requests
        """Id in the log → request, for the requests that vLLM knows."""
        self._ids = ids
        self._prefix_cache = prefix_cache
        self._ended_with_blocks: deque[str] = deque(maxlen=_MAX_ENDED)
        """Ids in the log of the `_MAX_ENDED` requests that ended most recently and had blocks."""

    def ended_with_blocks(self, request_id: str) -> None:
        """Record that a request with blocks has finished; `request_id` is its id in the log."""
        self._ended_with_blocks.append(request_id)

    def refuse(self, output: KVConnectorOutput) -> None:
        """Remove early ends from the output of the workers, and record each."""
        receipts = {
            request_id: life
            for request_id in output.finished_recving or ()
            if (life := self._owed.early_receipt(logged := self._ids.logged(request_id))) != e.NO_LIFE
            or self._waits_for_no_load(logged)
            or self._is_gone(logged, request_id)
        }
        releases = {
            request_id: life
            for request_id in output.finished_sending or ()
            if (life := self._owed.early_release(logged := self._ids.logged(request_id))) != e.NO_LIFE
            or logged in self._requests
            or self._is_gone(logged, request_id)
        }
        if receipts:
            output.finished_recving = set(output.finished_recving or ()) - receipts.keys()
        if releases:
            output.finished_sending = set(output.finished_sending or ()) - releases.keys()
        for field, lives in (("finished_recving", receipts), ("finished_sending", releases)):
            for request_id in sorted(lives):
                logged = self._ids.logged(request_id)
                self._journal.messages.error(
                    "another connector reported an end too early (the end of a load or save of this request); kvledger "
                    "removed this end before vLLM acted on it",
                    request_id=logged,
                    field=field,
                )
                self._journal.observe(e.EndRefused(logged, lives[request_id], field, self._journal.now()))

    def _waits_for_no_load(self, request_id: str) -> bool:
        """Whether vLLM knows the request and does not wait for a load of the request."""
        request = self._requests.get(request_id)
        return request is not None and not versions.is_waiting_for_load(request)

    def _is_gone(self, request_id: str, given_id: str) -> bool:
        """Whether vLLM has freed the request's blocks and forgotten the request. `given_id` is vLLM's id.

        False if the request had no blocks when it finished. vLLM may then still know the request, because another child
        may have asked vLLM to keep it.
        """
        return (
            request_id in self._ended_with_blocks
            and request_id not in self._requests
            and self._prefix_cache.is_freed(given_id)
        )
