"""What a log says about an incident, as plain values: observations, and what later ones refer to of decisions.

It knows events only, those of the recorder among them. A recording is written into a test as a literal, so it is
short, and the decisions themselves are not in it: the code under test makes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs
import msgspec

from kvledger.adapters.recorder.extension import Recorder
from kvledger.adapters.recorder.said import Began, TransfersEnded, WorkersReported
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle import events as e

Recorded = tuple[int, e.Event]
"""An observation with its sequence number in the log that it comes from."""

_Event = TypeVar("_Event", bound=e.Event)
Wrapped = Began
"""A connector that a recorder was around, and its engine, as the log says when it begins."""
JOB_ISSUED = (e.LoadIssued, e.SaveIssued, e.TailSaveIssued)


class NotReenactable(ValueError):
    """A log, or a part of one, that cannot be re-enacted; the message says why."""


@attrs.frozen
class Recording:
    """A log's observations up to an incident."""

    configuration: LedgerConfiguration
    observations: tuple[Recorded, ...]
    jobs: Mapping[int, tuple[int, str]] = attrs.field(factory=dict)
    """Job id -> (sequence number of the observation that led to it, request). Job ids of the code under test differ
    where it decides otherwise, or where other requests were left out."""
    answers: Mapping[int, int | None] = attrs.field(factory=dict)
    """Sequence number of a lookup -> tokens that were answered, None where it was to be asked again; lookups that are
    not here got none."""
    speculates: bool = False
    """Whether the engine decoded speculatively; a log does not say so, but it shows."""
    zeroes_new_blocks: bool = False
    """Whether the worker zeroed new blocks before the forward."""
    guessed: tuple[int, ...] = ()
    """Sequence numbers of observations that are none: a call failed before it was recorded, and this is what it may
    have been about."""
    wrapped: Wrapped | None = None
    """The connector that a recorder was around, and its engine; None where the log is kvledger's own."""
    copies: Mapping[str, tuple[str, bool, int]] = attrs.field(factory=dict)
    """A wrapped connector's name for a copy that its workers completed -> (request, whether it is a load, how many of
    these the request had before). Names differ where other requests are left out."""

    @property
    def wrapped_name(self) -> str:
        """The wrapped connector's name; empty where the log is kvledger's own."""
        return "" if self.wrapped is None else str(self.wrapped.kv_transfer["kv_connector"])

    def until(self, sequence: int | None) -> Recording:
        """The recording up to this event."""
        if sequence is None:
            return self
        return attrs.evolve(
            self,
            observations=tuple(entry for entry in self.observations if entry[0] <= sequence),
            jobs={job_id: reason for job_id, reason in self.jobs.items() if reason[0] <= sequence},
            copies=self.copies,
            answers={cause: answer for cause, answer in self.answers.items() if cause <= sequence},
        )


def changed(event: _Event, **fields: object) -> _Event:
    """The event with other values in some fields."""
    return msgspec.structs.replace(event, **fields)


def step(
    number: int,
    time_ns: int,
    *,
    num_scheduled_tokens: int,
    advanced: tuple[tuple[int, int, int, int], ...] = (),
    paused: tuple[int, ...] = (),
    extended: tuple[tuple[int, tuple[int, ...]], ...] = (),
    settled: tuple[tuple[int, int, int], ...] = (),
) -> e.StepScheduled:
    """`step.scheduled` with defaults for what a step need not say."""
    return e.StepScheduled(number, num_scheduled_tokens, advanced, paused, extended, settled, time_ns)


def workers_reported(time_ns: int, **fields: Any) -> e.ExtensionNoted:  # noqa: ANN401 -- of several kinds
    """What the workers of a recorded connector reported; `fields` as in `WorkersReported`."""
    return Recorder.noted(WorkersReported(**fields), time_ns)


def transfers_ended(time_ns: int, *jobs: str) -> e.ExtensionNoted:
    """Copies of a recorded connector that all workers have completed."""
    return Recorder.noted(TransfersEnded(jobs), time_ns)


def ended_transfers(event: e.Event) -> tuple[str, ...]:
    """The copies of a recorded connector that an event says are completed."""
    told = Recorder.payload_of(event) if isinstance(event, e.ExtensionNoted) else None
    return told.jobs if type(told) is TransfersEnded else ()


def reported_by_workers(event: e.Event) -> WorkersReported | None:
    """What an event says that the workers of a recorded connector reported; None of any other event."""
    if not isinstance(event, e.ExtensionNoted):
        return None
    told = Recorder.payload_of(event)
    return told if type(told) is WorkersReported else None


_REPORT = e.TransferReported(
    0, (0,), (), is_repeated=False, num_bytes=0, duration_ns=0, error="", withheld="", time_ns=0
)


def report(job_id: int, time_ns: int, **fields: object) -> e.TransferReported:
    """`transfer.reported` by one rank that is done, with other values in `fields`."""
    return changed(_REPORT, job_id=job_id, time_ns=time_ns, **fields)


def quiet_steps(
    first: int, last: int, *, step: int, count: int, num_scheduled_tokens: int, from_ns: int, to_ns: int
) -> Iterable[Recorded]:
    """A run of steps that say nothing: everybody decodes as expected, or nobody is there.

    Args:
        first: sequence number of the first of them.
        last: sequence number of the last of them; those between are spread evenly.
        step: number of the first step.
        count: how many.
        num_scheduled_tokens: of each.
        from_ns: time of the first.
        to_ns: time of the last; those between are spread evenly.
    """
    intervals = max(1, count - 1)
    for number in range(count):
        yield (
            first + (last - first) * number // intervals,
            e.StepScheduled(
                step=step + number,
                num_scheduled_tokens=num_scheduled_tokens,
                advanced=(),
                paused=(),
                extended=(),
                settled=(),
                time_ns=from_ns + (to_ns - from_ns) * number // intervals,
            ),
        )
