"""Gives the figures of a single request, such as its loaded tokens, to a client that asks for them.

A client sends `"kv_transfer_params": {"kvledger_figures": true}` and finds the figures in the response, in
`kv_transfer_params["kvledger"]`. `kvledger.adapters.figures` defines how much each event adds to each figure. This
module adds these amounts up for one request. Snapshots do not contain the figures, because a request does not outlive
its engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvledger.adapters.figures import ADDS, About, State, add_row
from kvledger.lifecycle import Projections, RequestRecord, Subject, described, raise_if_unstoppable
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Spent

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

IN_REQUEST: Final = "kvledger_figures"
IN_RESPONSE: Final = "kvledger"
_MS: Final = 1_000_000


def _asks(kv_transfer_params: Any) -> bool:
    """Whether a request asks for its figures. The client sends `kv_transfer_params`, so its type may be anything."""
    return isinstance(kv_transfer_params, Mapping) and kv_transfer_params.get(IN_REQUEST) is True


@attrs.define
class _Asked:
    """The figures of one life so far, for a request that asks for its figures."""

    ordinal: int
    since_ns: int
    """Time up to which `spent` is complete, in nanoseconds since the log was opened."""
    state: State = attrs.field(factory=State)
    spent: Spent = attrs.field(factory=Spent)
    num_cached_tokens: int | None = None
    """Tokens of the request that vLLM's prefix cache had at the request's first admission; None before that."""


class AskedFigures:
    """Counts the figures of requests that ask for them. Follows the log from the first such request on.

    If counting raises, an error goes to `messages`, and no request gets figures any more.
    """

    def __init__(self, projections: Projections, messages: BoundLogger) -> None:
        self._projections = projections
        self._messages = messages
        self._asked: dict[str, _Asked] = {}
        """Request id in the log → the request's figures."""
        self._now_ns = 0
        self._follows = False
        self._is_off = False

    def arrived(self, event: e.RequestArrived, kv_transfer_params: Any) -> None:
        """Begin to count for the life that begins with this event, if the request asks for its figures."""
        self._asked.pop(event.request_id, None)
        if self._is_off or not _asks(kv_transfer_params):
            return
        if not self._follows:
            self._projections.follow(dict.fromkeys(e.STANDARD_EVENTS.values(), self._see))
            self._follows = True
        self._asked[event.request_id] = _Asked(event.ordinal, event.time_ns)

    def take(self, request_id: str) -> dict[str, Any] | None:
        """Return the figures for the response to a finished request; None if the request did not ask for figures."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return None
        figures, spent = asked.state.figures, asked.spent
        return {
            IN_RESPONSE: {
                "num_cached_tokens": asked.num_cached_tokens or 0,
                "num_loaded_tokens": figures.num_tokens_loaded,
                "num_missed_tokens": asked.state.num_tokens_missed_by,
                "num_recomputed_tokens": asked.state.num_tokens_recomputed_by,
                "num_preemptions": figures.num_preemptions,
                "queued_ms": spent.queued_ns / _MS,
                "running_ms": spent.running_ns / _MS,
                "preempted_ms": spent.preempted_ns / _MS,
            }
        }

    def _see(self, event: e.Event, _sequence: int, subject: Subject) -> None:
        if not self._asked:
            return
        self._now_ns = getattr(event, "time_ns", self._now_ns)
        try:
            if isinstance(event, e.StepScheduled):
                self._count_step(event)
            elif subject.request is not None and not subject.is_refused:
                self._count(event, subject.request, subject)
        except BaseException as error:  # noqa: BLE001 -- a wrong figure must cost no request anything
            raise_if_unstoppable(error)
            self._is_off = True
            self._asked.clear()
            self._messages.error(
                "responses have no figures (kvledger_figures) until the engine restarts, because computing them "
                "failed; report this with the log",
                error=described(error),
            )

    def _count(self, event: e.Event, request: RequestRecord, subject: Subject) -> None:
        asked = self._of(request)
        if asked is None:
            return
        self._spend(asked, request)
        if isinstance(event, e.BlocksAllocated) and asked.num_cached_tokens is None:
            asked.num_cached_tokens = 0 if request.answer is None else request.answer.num_computed_tokens
        add = ADDS.get(type(event))
        if add is not None:
            add(asked.state, event, About(request, request.answer, subject.copy))

    def _count_step(self, step: e.StepScheduled) -> None:
        for row in step.advanced:
            request = self._projections.tracker.of(row[0])
            asked = None if request is None else self._of(request)
            if request is not None and asked is not None:
                self._spend(asked, request)
                add_row(asked.state, step, row, request, request.claimed)

    def _of(self, request: RequestRecord) -> _Asked | None:
        asked = self._asked.get(request.request_id)
        return asked if asked is not None and asked.ordinal == request.ordinal else None

    def _spend(self, asked: _Asked, request: RequestRecord) -> None:
        asked.spent = asked.spent.with_time_in(request.state, self._now_ns - asked.since_ns)
        asked.since_ns = max(asked.since_ns, self._now_ns)
