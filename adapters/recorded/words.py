"""Puts a recorder's events into English, yields figures and evidence, and finds the hook call in which a log ends.

This module must not know vLLM or any connector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorded.payloads import RecorderEvents, payload_of
from kvledger.lifecycle import LedgerConfiguration, SequencedEvent
from kvledger.lifecycle import events as e

SLOW_NS = 10 * 10**6
"""Nanoseconds. Only hook calls that take longer are mentioned. A whole step of a small model takes about as long."""

_MAX_NAMED = 8
"""Maximum number of a copy's blocks that are listed."""
_CALLS: Mapping[type[e.Event], str] = MappingProxyType(
    {
        e.RequestArrived: "on_new_request",
        e.LookupRequested: "get_num_new_matched_tokens",
        e.BlocksAllocated: "update_state_after_alloc",
        e.StepScheduled: "build_connector_meta",
        e.RequestFinished: "request_finished",
        e.CacheReset: "reset_cache",
    }
)
"""Observation → the hook of the wrapped connector that is called after it."""


_WORDS: Mapping[type[msgspec.Struct], Callable[[Any], str]] = MappingProxyType(
    {
        payloads.LookupReturned: lambda answer: _slow("get_num_new_matched_tokens", answer.duration_ns),
        payloads.Returned: lambda returned: _slow(returned.hook, returned.duration_ns),
        payloads.EndReturned: lambda answer: (
            "the connector keeps the request's blocks"
            if answer.keeps_blocks
            else _slow("request_finished", answer.duration_ns)
        ),
        payloads.Sent: lambda _: "the connector no longer needs the request's blocks, and vLLM frees them",
        payloads.Transferred: lambda copy: f"the connector gives its workers a copy: {_copy(copy)}",
        payloads.TransferredFor: lambda each: (
            f"the connector gives its workers a copy for request {each.request_id}, "
            f"which has ended or no longer holds the blocks: {_copy(each.copy)}"
        ),
        payloads.TransfersEnded: lambda ended: f"the workers have finished {', '.join(ended.jobs)}",
        payloads.TransfersAwaited: lambda awaited: f"the workers finish {', '.join(awaited.jobs)} before this step",
        payloads.WorkersReported: lambda ends: _ends("the workers report: ", ends),
        payloads.ReportedBy: lambda ends: _ends(f"worker {ends.rank} of {ends.connector} reports: ", ends),
        payloads.LoadChosen: lambda chosen: f"{chosen.connector} loads",
        payloads.ReportedToVLLM: lambda ends: _ends("reported to vLLM: ", ends),
    }
)


def _slow(hook: str, duration_ns: int) -> str:
    return f"{hook} took {duration_ns / 1e6:.0f} ms" if duration_ns > SLOW_NS else ""


def _copy(copy: payloads.Transferred) -> str:
    num_blocks = len(copy.block_ids)
    blocks = ", ".join(map(str, copy.block_ids[:_MAX_NAMED])) + ", …" * (num_blocks > _MAX_NAMED)
    where = f"from block {copy.first_block} of the block table on" if copy.first_block >= 0 else "of the block table"
    group = f" of group {copy.group}" * (copy.group > 0)
    verb = "load" if copy.is_load else "save"
    return f"{verb} {copy.job}, {num_blocks} block{'s' * (num_blocks != 1)} ({blocks}){group}, {where}"


def _ends(prefix: str, ends: payloads.WorkersReported) -> str:
    reports = (
        ("blocks of {} are no longer needed", ends.finished_sending),
        ("the load of {} has arrived", ends.finished_recving),
        ("the load of {} has failed", ends.failed_recving),
        ("blocks {} could not be filled", tuple(map(str, ends.invalid_block_ids))),
    )
    parts = [text.format(", ".join(which)) for text, which in reports if which]
    return prefix + "; ".join(parts) if parts else ""


def _saved(events: Sequence[SequencedEvent], configuration: LedgerConfiguration) -> str:
    """Return a text about the request's blocks that the connector gave its workers to save; empty if it gave none."""
    num_blocks: Counter[int] = Counter()
    last = 0
    for sequence, event in events:
        payload = payload_of(event) if isinstance(event, e.ExtensionObserved) else None
        if isinstance(payload, payloads.Transferred) and not payload.is_load:
            num_blocks[payload.group] += len(payload.block_ids)
            last = sequence
    if not num_blocks:
        return ""
    most = max(num_blocks.values())
    num_tokens = most * configuration.block_size
    return (
        f"the connector gave its workers {most} of the request's blocks to save ({num_tokens} tokens), last at event "
        f"{last}"
    )


class InWords(RecorderEvents):
    """A recorder's events, with the texts and figures that tools show about them."""

    def words(self, payload: msgspec.Struct) -> str | None:
        """Return the event with this payload in English.

        "": there is nothing to say, or the decision after the event says the same. None: tools print the event's name
        and fields instead.
        """
        describe = _WORDS.get(type(payload))
        return None if describe is None else describe(payload)

    def evidence(self, events: Sequence[SequencedEvent], configuration: LedgerConfiguration) -> Iterator[str]:
        """If the last event shows that the connector keeps the request's blocks, yield a line that may explain why.

        The line says how many blocks the connector gave its workers to save, or that the log does not show the reason.
        """
        _, event = events[-1]
        payload = payload_of(event) if isinstance(event, e.ExtensionObserved) else None
        if isinstance(payload, payloads.EndReturned) and payload.keeps_blocks:
            yield _saved(events, configuration) or "the log does not show why the connector keeps the blocks"

    def figures(self, payload: msgspec.Struct) -> Mapping[str, int]:
        """Return figure → amount, for the event with this payload.

        The figures are times in hooks, and numbers of answers, copies and blocks.
        """
        match payload:
            case payloads.LookupReturned():
                num = payload.num_external_tokens
                answer = "to ask again" if num is None else "with tokens" if num else "without tokens"
                return {"get_num_new_matched_tokens_ns": payload.duration_ns, f"answers {answer}": 1}
            case payloads.EndReturned():
                kept = {"ended requests whose blocks are kept": 1} if payload.keeps_blocks else {}
                return {"request_finished_ns": payload.duration_ns, **kept}
            case payloads.Returned():
                return {f"{payload.hook}_ns": payload.duration_ns}
            case payloads.TransferredFor():
                return self.figures(payload.copy)
            case payloads.Transferred():
                direction = "load" if payload.is_load else "save"
                return {f"copies to {direction}": 1, f"blocks to {direction}": len(payload.block_ids)}
        return {}

    def under_way(self, event: e.Event) -> str | None:
        """Return the hook call in which the connector is after `event`.

        "": the connector is in no call. None: `event` does not show in which call the connector is.
        """
        hook = _CALLS.get(type(event))
        if hook is not None:
            request_id = getattr(event, "request_id", "")
            return f"in {hook} of request {request_id}" if request_id else f"in {hook}"
        if isinstance(event, e.HookFailed | e.LogNote):
            return ""
        payload = payload_of(event) if isinstance(event, e.ExtensionEvent) else None
        if isinstance(payload, payloads.Called):
            step = "" if payload.step < 0 else f" of step {payload.step}"
            return f"in {payload.hook}{f' for {payload.layer}' * bool(payload.layer)}{step}"
        if type(payload) is payloads.WorkersReported:
            return "in update_connector_output"
        return "" if isinstance(payload, payloads.LookupReturned | payloads.EndReturned | payloads.Returned) else None
