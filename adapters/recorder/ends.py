"""Which connector reported which ends.

vLLM puts the reports of all workers together, and a `MultiConnector` those of its children. The scheduler's side then
sees who has ended, but not which connector said so. A worker therefore notes the ends of the wrapped connector, and of
each child if that is a `MultiConnector`. They travel in the envelope around the worker metadata (`page_digests.py`).
A worker does not know whether another connector holds the recorder; the scheduler's side does (`place.py`), and
records the wrapped connector's own ends only then.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvledger.adapters.recorded import payloads
from kvledger.adapters.vllm.journal import Fallback, guarded
from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import described, logged_request_id


def children_of(connector: object) -> tuple[Any, ...]:
    """Children of a `MultiConnector` (`kv_connector/v1/multi_connector.py`, 0.32); none of any other connector."""
    return tuple(getattr(connector, "_connectors", ()))


def name_of(connector: object) -> str:
    """The connector's class; that of the wrapped one if it is a recorder."""
    return type(vars(connector).get("wrapped", connector)).__name__


@attrs.define(eq=False)
class Keepers:
    """Which children of a `MultiConnector` keep the blocks of an ended request; on the scheduler's side."""

    _connector: Any
    """The wrapped one."""
    _found: list[int] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        for place, child in enumerate(children_of(self._connector)):
            for hook in ("request_finished", "request_finished_all_groups"):
                if hasattr(child, hook):
                    self._watch(place, child, hook)

    def take(self) -> tuple[int, ...]:
        """Places of those that answered so since the last call."""
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
    """Ends that one rank has reported since they were last taken."""

    _connector: Any
    """The wrapped one."""
    _rank: int
    _found: list[payloads.ReportedBy] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        for place, child in enumerate(children_of(self._connector)):
            self._watch(place, child)

    def hook_failed(self, hook: str, _request_id: str, error: BaseException) -> None:
        """Called by the guard: the connector goes on."""
        messages.warning("who reported an end could not be recorded", hook=hook, error=described(error))

    def reported(self, results: Any) -> None:
        """The wrapped connector's own worker has answered `get_transfer_results`."""
        self._note(payloads.OWN, name_of(self._connector), results)

    def take(self) -> tuple[payloads.ReportedBy, ...]:
        """What was found since the last call."""
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
