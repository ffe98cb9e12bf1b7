"""Observations in short-hand: what one hook call of vLLM would make the connector record.

The driver counts time, steps and ordinals, so that a test names only what it is about.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from kvledger.adapters.figures import Totals
from kvledger.lifecycle import (
    Channel,
    Core,
    EventSink,
    Ledger,
    LedgerConfiguration,
    PageJob,
    Ready,
    RequestState,
    Scheduled,
    StepEncoder,
    effects_delivered,
)
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit, Start, StartFolds
from kvledger.lifecycle.copy_moments import Hook
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.replay import SequencedEvent
from kvledger.lifecycle.snapshots import capture, restore
from lifecycle_driver.sink import MemorySink

_EventClass = TypeVar("_EventClass", bound=e.Event)


def keys_of(document: str, num_chunks: int, first_chunk: int = 0) -> tuple[bytes, ...]:
    """Keys of the chunks of a document; the same document gives the same keys."""
    return tuple(
        hashlib.blake2b(f"{document}/{chunk}".encode(), digest_size=16).digest()
        for chunk in range(first_chunk, first_chunk + num_chunks)
    )


def hook_of(job: PageJob) -> Hook:
    """In which hook a worker makes a copy."""
    if isinstance(job, e.LoadIssued):
        return Hook.START_LOAD_KV
    is_before_forward = isinstance(job, e.TailSaveIssued) or job.before_forward
    return Hook.HANDLE_PREEMPTIONS if is_before_forward else Hook.WAIT_FOR_SAVE


class Driver:
    """One ledger with a memory sink; methods are hook calls and return the decisions.

    Unless told otherwise, lookups are never deferred and silence is measured in steps alone.
    """

    def __init__(
        self,
        *,
        chunk_size: int = 8,
        block_size: int = 16,
        num_slots: int = 32,
        core: Core = Core.standard(),
        sink: EventSink | None = None,
        **configuration: Any,
    ) -> None:
        self.configuration = LedgerConfiguration(
            block_size=block_size,
            chunk_size=chunk_size,
            num_slots=num_slots,
            **{"max_deferred_lookups": 0, "max_silent_ms": 0, **configuration},
        )
        self.sink = MemorySink()
        """What was committed; empty where it went to another `sink`."""
        self.ledger = Ledger(core, self.configuration, sink or self.sink)
        self.totals = Totals(self.ledger.projections)
        """Counted as the ledger records."""
        self.observed: list[e.Event] = []
        """Everything in the order of the log: observations and decisions."""
        self._ordinals: dict[str, int] = {}
        self._step = 0
        self._time_ns = 0

    @property
    def projections(self) -> Any:
        """What the ledger believes."""
        return self.ledger.projections

    def observe(self, event: e.Event) -> list[e.Event]:
        """Record any event."""
        decisions = self.ledger.observe(event)
        self.observed += [event, *decisions]
        return decisions

    def again(self) -> Driver:
        """Another driver in the same state; what it observes from now on, this one does not know."""
        core, configuration, other = self.ledger.core, self.configuration, copy.copy(self)
        other.sink, other.observed, other._ordinals = MemorySink(), list(self.observed), dict(self._ordinals)
        projections = restore(core, capture(self.projections), configuration)
        next_sequence = self.ledger.next_sequence
        other.ledger = Ledger(core, configuration, other.sink, projections=projections, next_sequence=next_sequence)
        return other

    def record(self, request_id: str) -> RequestRecord:
        """The record of a request that must be known."""
        record: RequestRecord | None = self.projections.tracker.get(request_id)
        assert record is not None, f"{request_id} is not known"
        return record

    def state(self, request_id: str) -> RequestState | None:
        """The state of a request, None once it is released."""
        record = self.projections.tracker.get(request_id)
        return None if record is None else record.state

    def audited(
        self,
        events: Iterable[SequencedEvent] | None = None,
        *,
        core: Core = Core.standard(),
        start: Start | None = None,
    ) -> Audit:
        """The finished audit of the log, or of other events under its configuration."""
        self.ledger.commit()
        audit = Audit(core, self.configuration, start=start)
        audit.run(self.sink.events() if events is None else events)
        return audit

    def folded(self, num_events: int | None = None, *, core: Core = Core.standard()) -> StartFolds:
        """What is known after so many events, or after the last one."""
        self.ledger.commit()
        folds = StartFolds(core, self.configuration)
        folds.take(self.events()[:num_events])
        return folds

    def events(self) -> list[SequencedEvent]:
        """What is in the log: to be altered before it is audited."""
        return list(self.sink.events())

    def all_of(self, event_class: type[_EventClass]) -> list[_EventClass]:
        """Every event of a class so far, in order."""
        return [event for event in self.observed if isinstance(event, event_class)]

    def given_up_slots(self) -> list[int]:
        """Slots of saves that were given up without a report; they are never used again."""
        loud = {event.job_id for event in self.all_of(e.SaveFailed) if not event.quiet}
        saves = [*self.all_of(e.SaveIssued), *self.all_of(e.TailSaveIssued)]
        return [slot for save in saves if save.job_id in loud for slot in save.slots]

    # --- a request's life ------------------------------------------------------------------------

    def arrive(self, request_id: str, num_prompt_tokens: int, keys: Sequence[bytes] | None = None) -> list[e.Event]:
        """Accept a request; with keys, they are observed too."""
        ordinal = self._ordinals[request_id] = self.ledger.next_ordinal
        decisions = self.observe(e.RequestArrived(request_id, ordinal, num_prompt_tokens, self._now()))
        if keys:
            decisions += self.keys(request_id, 0, keys)
        return decisions

    def keys(self, request_id: str, first_chunk: int, keys: Sequence[bytes]) -> list[e.Event]:
        """Chunk keys became known."""
        return self.observe(e.ChunkKeysObserved(request_id, first_chunk, tuple(keys)))

    def lookup(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> e.LookupAnswered:
        """Poll; the answer is the only decision."""
        answer = self.poll(request_id, num_computed_tokens, num_tokens)
        assert isinstance(answer, e.LookupAnswered), answer
        return answer

    def poll(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> e.Event:
        """Poll, where the only decision may also be to ask again."""
        (answer,) = self.observe(e.LookupRequested(request_id, num_computed_tokens, num_tokens, self._now()))
        return answer

    def allocate(self, request_id: str, block_ids: Iterable[int], num_external_tokens: int = 0) -> list[e.Event]:
        """Give blocks, and take up `num_external_tokens` of the last answer."""
        return self.observe(e.BlocksAllocated(request_id, tuple(block_ids), num_external_tokens, self._now()))

    def step(
        self,
        *advanced: tuple[str, int, int, int],
        settled: Iterable[tuple[str, int, int]] = (),
        extended: Iterable[tuple[str, Iterable[int]]] = (),
        paused: Iterable[str] = (),
        num_scheduled_tokens: int = 0,
    ) -> list[e.Event]:
        """One engine step; each of `advanced` is (request, computed before, scheduled, known tokens)."""
        paused = tuple(paused)
        step, self._step = self._step, self._step + 1
        return self.observe(
            e.StepScheduled(
                step,
                num_scheduled_tokens or self._sum_of(advanced, paused),
                tuple((self._ordinals[request_id], *counts) for request_id, *counts in advanced),  # type: ignore[misc]
                tuple(self._ordinals[request_id] for request_id in paused),
                tuple((self._ordinals[request_id], tuple(block_ids)) for request_id, block_ids in extended),
                tuple(
                    e.SettledTokens(self._ordinals[request_id], first, tokens) for request_id, first, tokens in settled
                ),
                self._now(),
            )
        )

    def schedule(self, *scheduled: Scheduled) -> list[e.Event]:
        """One engine step, encoded as an embedder's: these are scheduled, and nobody else."""
        self._step += 1
        return self.observe(StepEncoder(self.ledger.projections).encode(scheduled, self._now()))

    def _sum_of(self, advanced: Iterable[tuple[str, int, int, int]], paused: Iterable[str]) -> int:
        """Tokens of a step: what is told of, and one for each request that decodes as before."""
        told = {request_id for request_id, *_ in advanced}.union(paused)
        others = StepEncoder(self.projections).paused(told)
        return sum(scheduled for _, _, scheduled, _ in advanced) + len(others)

    def report(
        self,
        job_id: int,
        *,
        ok: bool = True,
        num_ranks: int = 1,
        ranks: Sequence[int] | None = None,
        is_repeated: bool = False,
        error: str = "",
        withheld: str = "",
        together: Sequence[int] = (),
        num_bytes: int = 100,
        duration_ns: int = 10,
        moments: tuple[int, ...] = (),
    ) -> list[e.Event]:
        """Workers report a job: the first `num_ranks` of them, or `ranks`. Of one `withheld` it is the connector.

        Jobs that were copied `together` with it are in the same report.
        """
        ranks = tuple(range(num_ranks)) if ranks is None else tuple(ranks)
        done, failed = (ranks, ()) if ok else ((), ranks)
        error = error or ("" if ok else "it broke")
        job_ids = (job_id, *together)
        sizes = (num_bytes,) * len(job_ids)
        return self.observe(
            e.TransferReported(
                job_ids, done, failed, is_repeated, sizes, duration_ns, error, withheld, self._now(), moments
            )
        )

    def preempt(
        self,
        request_id: str,
        num_settled_tokens: int,
        num_tokens: int | None = None,
        num_in_flight_tokens: int = e.NOT_RECORDED,
    ) -> list[e.Event]:
        """Take a request's blocks; unless it is said, it has the tokens that are known or settled."""
        if num_tokens is None:
            num_tokens = max(num_settled_tokens, self.record(request_id).num_tokens)
        return self.observe(
            e.RequestPreempted(
                request_id,
                num_settled_tokens,
                num_tokens,
                self._now(),
                num_in_flight_tokens=num_in_flight_tokens,
            )
        )

    def finish(self, request_id: str, num_settled_tokens: int, num_tokens: int) -> list[e.Event]:
        """End a request."""
        return self.observe(
            e.RequestFinished(request_id, "FINISHED_STOPPED", num_settled_tokens, num_tokens, self._now())
        )

    def roll_back(self, request_id: str, num_computed_tokens: int) -> list[e.Event]:
        """The scheduler counts fewer computed tokens."""
        return self.observe(e.TokensRolledBack(request_id, num_computed_tokens, self._now()))

    def continue_session(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> list[e.Event]:
        """A streaming session's next turn."""
        return self.observe(e.SessionContinued(request_id, num_computed_tokens, num_tokens, num_tokens, self._now()))

    def reset(self) -> list[e.Event]:
        """Everything cached is stale."""
        return self.observe(e.CacheReset(self._now()))

    def deliver(self, channel: Channel, *, reported: Iterable[str] = ()) -> Ready:
        """Hand over what is owed; vLLM hears of these from the workers."""
        ready = msgspec.structs.replace(
            self.ledger.ready(channel), reported=self.projections.owed.reported_to_vllm(reported)
        )
        delivered = effects_delivered(ready)
        if delivered is not None:
            self.observe(delivered)
        return ready

    def carry_out(self) -> None:
        """Hand out what is owed, make the copies as workers do in a step, and report them with its output."""
        delivered = self.ledger.next_sequence
        ready, num_ranks, number = self.deliver(Channel.WORKERS), self.configuration.num_ranks, 1
        for hook in Hook:
            for job in [job for job in ready.jobs if hook_of(job) is hook]:
                ended = (0, number + 1, Hook.OUTPUT if getattr(job, "is_async", False) else hook)
                self.report(job.job_id, num_ranks=num_ranks, moments=(delivered, number, hook, *ended))
                number += 2
        self.observe(e.StepReported(delivered, tuple(range(num_ranks)), ()))

    # --- whole stories ---------------------------------------------------------------------------

    def save_prefix(self, request_id: str, keys: Sequence[bytes], first_block: int = 900) -> None:
        """Let a request compute and save the chunks of `keys`, finish and leave: they are committed afterwards."""
        block_size = self.configuration.block_size
        num_tokens = len(keys) * self.configuration.chunk_size + 1
        self.start(request_id, keys, num_tokens, range(first_block, first_block - (-num_tokens // block_size)))
        self.finish(request_id, num_tokens, num_tokens + 1)
        self.settle_all()

    def admit(
        self,
        request_id: str,
        keys: Sequence[bytes],
        num_tokens: int,
        block_ids: Iterable[int],
        *,
        num_computed: int = 0,
        num_external: int = 0,
    ) -> None:
        """Let a request arrive and have blocks; vLLM's cache has `num_computed` tokens, `num_external` are loaded."""
        self.arrive(request_id, num_tokens, keys)
        self.lookup(request_id, num_computed, num_tokens)
        self.allocate(request_id, block_ids, num_external)

    def start(
        self, request_id: str, keys: Sequence[bytes], num_tokens: int, block_ids: Iterable[int], num_computed: int = 0
    ) -> None:
        """Let a request arrive and compute its prompt, all but what vLLM's own cache has, without any load."""
        self.admit(request_id, keys, num_tokens, block_ids, num_computed=num_computed)
        self.step((request_id, num_computed, num_tokens - num_computed, num_tokens))

    def settle_all(self) -> list[e.Event]:
        """Report every job in flight as done."""
        return [
            decision
            for job_id in [job.job_id for job in self.projections.jobs]
            for decision in self.report(job_id, num_ranks=self.configuration.num_ranks)
        ]

    def pass_ns(self, duration_ns: int) -> None:
        """Let time pass."""
        self._time_ns += duration_ns

    def _now(self) -> int:
        self._time_ns += 1000
        return self._time_ns
