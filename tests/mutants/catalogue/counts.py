"""Mutants that count settled or computed tokens wrongly: one too many or one too few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvledger.adapters.vllm.observe import RequestReader, StepReader
from kvledger.lifecycle import events as e
from kvledger.lifecycle.ledger import Ledger
from kvledger.lifecycle.steps import StepEncoder
from mutants.catalogue.parts import wrapped
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import HybridWorlds, Walks, Worlds

TWO_IN_FLIGHT = Worlds(settings=(("num_steps", 120), ("async_scheduling", True)))


def counted_as(touch: Touch, change: Callable[[e.Event], e.Event]) -> Patch:
    """Patch that records every observation as `change` returns it."""

    def observe(original: Any, ledger: Ledger, event: e.Event) -> Any:
        counted = change(event)
        if counted != event:
            touch()
        return original(ledger, counted)

    return wrapped(Ledger, "observe", observe)


def by(touch: Touch, event_class: type[e.Event], difference: int) -> Patch:
    """Patch that adds `difference` to `num_settled_tokens` of every event of one class."""

    def change(event: e.Event) -> e.Event:
        if not isinstance(event, event_class) or event.num_settled_tokens + difference < 0:  # type: ignore[attr-defined]
            return event
        return msgspec.structs.replace(event, num_settled_tokens=event.num_settled_tokens + difference)  # type: ignore[attr-defined]

    return counted_as(touch, change)


@mutant("SETTLED_EXACT", "LMCache#653", scene=Worlds())
def settled_before_it_is_written(touch: Touch) -> Sequence[Patch]:
    """When a request loses its blocks, the connector counts one token too many as settled."""

    def num_written_tokens(original: Any, reader: RequestReader, request: Any, num_computed_tokens: int) -> int:
        written: int = original(reader, request, num_computed_tokens)
        if num_computed_tokens:
            touch()
            written += 1
        return written

    return [wrapped(RequestReader, "num_written_tokens", num_written_tokens)]


@mutant("SETTLED_EXACT", "vllm#53498", scene=TWO_IN_FLIGHT)
def written_counted_as_in_flight(touch: Touch) -> Sequence[Patch]:
    """When a request loses its blocks, tokens in flight are not saved, though the save runs after their steps."""

    def num_written_tokens(original: Any, reader: RequestReader, request: Any, num_computed_tokens: int) -> int:
        written: int = original(reader, request, num_computed_tokens)
        fewer = max(0, written - request.num_in_flight_tokens)
        if fewer != written:
            touch()
        return fewer

    return [wrapped(RequestReader, "num_written_tokens", num_written_tokens)]


@mutant("SETTLED_EXACT", "vllm#54193", "vllm#49285", scene=Worlds())
def stop_token_counted_as_computed(touch: Touch) -> Sequence[Patch]:
    """The last sampled token of an ended request counts as settled, though no step computed it."""

    def change(event: e.Event) -> e.Event:
        if isinstance(event, e.RequestFinished) and event.num_settled_tokens == event.num_tokens - 1:
            return msgspec.structs.replace(event, num_settled_tokens=event.num_tokens)
        return event

    return [counted_as(touch, change)]


@mutant("SETTLED_EXACT", "vllm#53498", scene=Worlds())
def one_short_at_the_end(touch: Touch) -> Sequence[Patch]:
    """At a request's end, the last computed token does not count as settled, so a chunk that it fills is not saved."""
    return [by(touch, e.RequestFinished, -1)]


@mutant("SETTLED_EXACT", "vllm#53498", scene=Walks())
def one_short_at_a_preemption(touch: Touch) -> Sequence[Patch]:
    """The last computed token of a preempted request does not count as settled."""
    return [by(touch, e.RequestPreempted, -1)]


@mutant("SETTLED_EXACT", "vllm#46014", scene=TWO_IN_FLIGHT)
def in_flight_counted_as_settled(touch: Touch) -> Sequence[Patch]:
    """A step counts tokens as settled, though another step in flight still computes them."""

    def settled(original: Any, encoder: StepEncoder, record: Any, num_settled: int, num_in_flight: int = -1) -> Any:
        counts = num_settled, num_settled + max(0, num_in_flight)
        right, entry = (original(encoder, record, count, num_in_flight) for count in counts)
        if entry != right:
            touch()
        return entry

    return [wrapped(StepEncoder, "settled", settled)]


@mutant("SETTLED_EXACT", "vllm#53498", scene=Worlds(connector=(("chunk_size", 8),)))
def one_short_in_a_step(touch: Touch) -> Sequence[Patch]:
    """A step counts one settled token too few."""

    def settled(original: Any, encoder: StepEncoder, record: Any, num_settled: int, num_in_flight: int = -1) -> Any:
        right, entry = (original(encoder, record, num, num_in_flight) for num in (num_settled, num_settled - 1))
        if entry is not None and entry != right:
            touch()
        return entry

    return [wrapped(StepEncoder, "settled", settled)]


@mutant("SETTLED_EXACT", "vllm#47728", scene=HybridWorlds())
def window_left_too_late(touch: Touch) -> Sequence[Patch]:
    """When a sliding window frees blocks, the recorded number of settled tokens is one too high."""

    def left(original: Any, reader: StepReader, record: Any, processed: Any, time_ns: int) -> None:
        if processed is not None:
            touch()
            processed = processed[0] + 1, processed[1]
        original(reader, record, processed, time_ns)

    return [wrapped(StepReader, "_window_left", left)]


@mutant("SETTLED_EXACT", "LMCache#653", scene=Worlds())
def later_part_counted_from_one_further(touch: Touch) -> Sequence[Patch]:
    """If a prompt takes several steps, the tokens of a later step are recorded one position too far in the prompt."""

    def advanced(original: Any, reader: StepReader, counts: Any, num_scheduled: Any) -> list[Any]:
        rows = original(reader, counts, num_scheduled)
        written = []
        for ordinal, count, num_tokens, num_known in rows:
            end = count + num_tokens
            has_place = end % reader._projections.configuration.block_size > 0
            further = has_place and 0 < reader._tracker.computed.count(ordinal) == count and end < num_known
            if further:
                touch()
            written.append((ordinal, count + further, num_tokens, num_known))
        return written

    return [wrapped(StepReader, "_advanced", advanced)]


@mutant("SETTLED_EXACT", "LMCache#653", scene=Walks())
def next_turn_keeps_too_much(touch: Touch) -> Sequence[Patch]:
    """A session's next turn keeps one token more than the previous turn computed."""

    def change(event: e.Event) -> e.Event:
        if isinstance(event, e.SessionContinued):
            return msgspec.structs.replace(event, num_computed_tokens=event.num_tokens)
        return event

    return [counted_as(touch, change)]
