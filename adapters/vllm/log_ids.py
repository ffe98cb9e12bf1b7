"""Maps vLLM's request ids to the ids in the log, and back.

A log cuts long ids and appends a hash (`lifecycle/request_ids.py`). The rest of kvledger uses the id in the log, but
vLLM must get its own id back. `LogIds` keeps both ids of a request if they differ. If they are equal, its methods
return the request or the id that they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from kvledger.adapters.vllm import versions
from kvledger.lifecycle import cut_request_id, logged_request_id

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class _Renamed:
    """A live request with its id in the log. All other attributes are read from and written to vLLM's request."""

    __slots__ = ("_request", "request_id")

    def __init__(self, request: Request, request_id: str) -> None:
        object.__setattr__(self, "_request", request)
        object.__setattr__(self, "request_id", request_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._request, name, value)


def vllm_id(request: Request) -> str:
    """Return the id that vLLM knows the request by."""
    found: object = request
    return found._request.request_id if isinstance(found, _Renamed) else request.request_id  # noqa: SLF001


class LogIds:
    """Maps vLLM's request ids to the ids in the log of one engine, and back."""

    def __init__(self) -> None:
        self.renamed: dict[str, str] = {}
        """vLLM's id → the id in the log, if they differ."""
        self._given: dict[str, str] = {}
        """Id in the log → vLLM's id, for the same requests as `renamed`."""
        self._ended: dict[str, None] = {}
        """Ids in the log of renamed requests that vLLM has ended."""

    def arrived(self, request: Request, is_known: Callable[[str], bool]) -> Request:
        """Return the new request with an id in the log that no other known request has.

        `is_known` returns whether an id in the log belongs to a request that is alive, or for whose copy vLLM waits.
        """
        given = request.request_id
        logged = self.logged(given)
        while self._is_of_another(logged, given, is_known):  # a client has sent the cut id of another request
            logged = cut_request_id(logged + given)
        if logged == given:
            return request
        self.renamed[given], self._given[logged] = logged, given
        self._ended.pop(logged, None)
        return _renamed(request, logged)

    def _is_of_another(self, logged: str, given: str, is_known: Callable[[str], bool]) -> bool:
        holder = self._given.get(logged)
        if holder is not None:
            return holder != given
        return logged != given and is_known(logged)

    def of(self, request: Request) -> Request:
        """Return the request with its id in the log."""
        logged = self.logged(request.request_id)
        return request if logged == request.request_id else _renamed(request, logged)

    def of_step(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Return the scheduler's output for a step, with the ids in the log instead of vLLM's."""
        return versions.renamed_step(scheduler_output, self.renamed, self.given)

    def logged(self, request_id: str) -> str:
        """Return the id in the log for vLLM's id."""
        return self.renamed.get(request_id) or logged_request_id(request_id)

    def given(self, logged: str) -> str:
        """Return vLLM's id for an id in the log. Only for a request that is alive, or for whose copy vLLM waits."""
        return self._given.get(logged, logged)

    def all_given(self, logged: Iterable[str]) -> tuple[str, ...]:
        """Return vLLM's ids for several ids in the log; see `given`."""
        return tuple([self.given(each) for each in logged])

    def ended(self, request: Request) -> None:
        """Record that the request has finished. vLLM may still wait for a copy of the request."""
        if request.request_id in self._given:
            self._ended[request.request_id] = None

    def forget(self, is_known: Callable[[str], bool]) -> None:
        """Forget the ids of each ended request, unless vLLM waits for a copy of the request (`is_known`)."""
        for logged in [each for each in self._ended if not is_known(each)] if self._ended else ():
            del self._ended[logged], self.renamed[self._given.pop(logged)]

    def __len__(self) -> int:
        """Return the number of requests whose two ids differ. Tests check that it is 0 when all requests have ended."""
        return len(self.renamed)


def _renamed(request: Request, logged: str) -> Request:
    return cast("Request", _Renamed(request, logged))
