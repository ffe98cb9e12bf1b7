"""Records which connector reported that a load, or the sending of a request's blocks, has ended.

vLLM merges the reports of all workers, and a `MultiConnector` merges the reports of its children. Each worker therefore
notes the ends that the wrapped connector, or each child of a wrapped `MultiConnector`, reports. The noted ends reach
the scheduler's side in the envelope around the worker metadata (`page_digests.py`). If no other connector contains the
recorder, the ends that the wrapped connector itself reports are in the log already, and are not recorded again. Only
the scheduler's side can find out whether another connector contains the recorder (`place.py`).
"""

from __future__ import annotations

from typing import Any

import attrs

from kvledger.adapters.recorded import payloads
from kvledger.adapters.vllm.journal import Fallback, guarded
from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import described, logged_request_id


def children_of(connector: object) -> tuple[Any, ...]:
    """Return the children of a `MultiConnector` (`kv_connector/v1/multi_connector.py`, 0.32); empty for others."""
    return tuple(getattr(connector, "_connectors", ()))


def name_of(connector: object) -> str:
    """Return the name of the connector's class. For a recorder, return the name of the wrapped connector's class."""
    return type(vars(connector).get("wrapped", connector)).__name__


@attrs.define(eq=False)
class Keepers:
    """Notes which children of a `MultiConnector` keep the blocks of an ended request. Used on the scheduler's side."""

    _connector: Any
    _found: list[int] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        for place, child in enumerate(children_of(self._connector)):
            for hook in ("request_finished", "request_finished_all_groups"):
                if hasattr(child, hook):
                    self._watch(place, child, hook)

    def take(self) -> tuple[int, ...]:
        """Return the numbers, from 0, of the children that kept blocks since the last call of this method."""
        found, self._found = self._found, []
        return tuple(sorted(set(found)))

    def _watch(self, place: int, child: Any, hook: str) -> None:
        end = getattr(child, hook)

        def request_finished(*arguments: Any, **named: Any) -> Any:
            answer = end(*arguments, **named)
            if isinstance(answer, tuple) and answer and answer[0]:
                self._found.append(place)
            return answer

        setattr(child, hook, request_finished)


@guarded({"_note": Fallback()})
@attrs.define(eq=False)
class WorkerEnds:
    """Notes the ends that connectors report on one rank."""

    _connector: Any
    _rank: int
    _found: list[payloads.ReportedBy] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        for place, child in enumerate(children_of(self._connector)):
            self._watch(place, child)

    def hook_failed(self, hook: str, _request_id: str, error: BaseException) -> None:
        """Log a warning that an end was not noted. The decorator `guarded` calls this if another method raises."""
        messages.warning(
            "kvledger could not record which connector reported that a load, or the sending of blocks, has ended",
            hook=hook,
            error=described(error),
        )

    def reported(self, results: Any) -> None:
        """Note the ends in the wrapped connector's answer to `get_transfer_results`."""
        self._note(payloads.OWN, name_of(self._connector), results)

    def take(self) -> tuple[payloads.ReportedBy, ...]:
        """Return the ends that were noted since the last call of this method."""
        found, self._found = self._found, []
        return tuple(found)

    def _watch(self, place: int, child: Any) -> None:
        ask, name = child.get_transfer_results, name_of(child)

        def get_transfer_results(finished_req_ids: set[str]) -> Any:
            results = ask(finished_req_ids)
            self._note(place, name, results)
            return results

        child.get_transfer_results = get_transfer_results

    def _note(self, child: int, name: str, results: Any) -> None:
        ends = [
            tuple(sorted(map(logged_request_id, getattr(results, field, None) or ())))
            for field in ("finished_sending", "finished_recving", "failed_recving")
        ]
        if any(ends):
            self._found.append(payloads.ReportedBy(child, name, self._rank, *ends))
