"""vLLM's requests under the ids that the log has for them.

A log has long ids cut, with a hash (`lifecycle/request_ids.py`), and everything else in kvledger knows a request by the
id in the log. vLLM must get its own ids back. Both are kept here for requests whose ids differ; for all others every
method returns what it is given.
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
    """A live request with the id that the log has for it; everything else is read from and written to the request."""

    __slots__ = ("_request", "request_id")

    def __init__(self, request: Request, request_id: str) -> None:
        object.__setattr__(self, "_request", request)
        object.__setattr__(self, "request_id", request_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._request, name, value)


def vllm_id(request: Request) -> str:
    """The id that vLLM knows the request by."""
    found: object = request
    return found._request.request_id if isinstance(found, _Renamed) else request.request_id  # noqa: SLF001


class LogIds:
    """Maps vLLM's request ids to those in the log of one engine, and back."""

    def __init__(self) -> None:
        self.renamed: dict[str, str] = {}
        """vLLM's id → the id in the log, where they differ."""
        self._given: dict[str, str] = {}
        """The same, the other way round."""
        self._ended: dict[str, None] = {}
        """Of these, ids in the log of requests that vLLM has ended."""

    def arrived(self, request: Request, is_known: Callable[[str], bool]) -> Request:
        """The new request under its id in the log.

        `is_known` tells of an id in the log whether a request has it that is alive, or whose end vLLM waits for. That
        other request never has the same id in the log.
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
        """The request under its id in the log."""
        logged = self.logged(request.request_id)
        return request if logged == request.request_id else _renamed(request, logged)

    def of_step(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """What the scheduler says of a step, about the ids in the log."""
        return versions.renamed_step(scheduler_output, self.renamed, self.given)

    def logged(self, request_id: str) -> str:
        """The id in the log."""
        return self.renamed.get(request_id) or logged_request_id(request_id)

    def given(self, logged: str) -> str:
        """Return vLLM's id of a request that vLLM still waits for."""
        return self._given.get(logged, logged)

    def all_given(self, logged: Iterable[str]) -> tuple[str, ...]:
        """Return vLLM's ids of several such requests."""
        return tuple([self.given(each) for each in logged])

    def ended(self, request: Request) -> None:
        """Note that vLLM has ended the request. vLLM may still wait for a copy of it."""
        if request.request_id in self._given:
            self._ended[request.request_id] = None

    def forget(self, is_known: Callable[[str], bool]) -> None:
        """Forget requests that have ended, unless `is_known` says of the id in the log that vLLM waits for them."""
        for logged in [each for each in self._ended if not is_known(each)] if self._ended else ():
            del self._ended[logged], self.renamed[self._given.pop(logged)]

    def __len__(self) -> int:
        """Requests whose ids differ, for tests: none is left when all have ended."""
        return len(self.renamed)


def _renamed(request: Request, logged: str) -> Request:
    return cast("Request", _Renamed(request, logged))
