"""A real `KVLedgerConnector` without an engine: one method per hook, real vLLM objects made from plain values.

vLLM is imported when the first one is made. It must not know recordings; see `hooks.py` for who drives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvledger.adapters.core import composed_core
from kvledger.adapters.repro.recording import NotReenactable
from kvledger.lifecycle import LedgerConfiguration, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventDecoder
from kvledger.storage.extras import CONNECTOR, require

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvledger.adapters.repro.vllm_objects import Engine
    from kvledger.adapters.vllm.metadata import JobReport, StepJobs
    from kvledger.adapters.vllm.scheduler_side import SchedulerSide

_NUM_BLOCKS = 1 << 20
"""The scheduler's half never touches a block, so there may be as many as a log can name."""
_RECENT_BYTES = 1 << 12
"""Events are read after every call; what was read may be forgotten."""


@attrs.frozen
class ScheduledRequest:
    """What a step does for one request."""

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: tuple[int, ...] = ()
    is_new: bool = False
    """Whether it stands among the step's new requests; model runner V2 lists resumed ones there as well."""
    is_resumed: bool = False
    """Whether a cached one brings a table that replaces the old one (model runner V1)."""


@attrs.frozen
class Step:
    """What `build_connector_meta` is told."""

    scheduled: Sequence[ScheduledRequest] = ()
    preempted_request_ids: frozenset[str] = frozenset()
    block_tables: dict[str, Sequence[int]] = attrs.field(factory=dict)
    """The scheduler's own table of each scheduled request."""
    zeroed_block_ids: tuple[int, ...] = ()
    ended_request_ids: frozenset[str] = frozenset()
    """Since the step before."""
    admitted_request_ids: tuple[str, ...] = ()
    """In the order in which they were given blocks; vLLM counts their tokens behind those of who ran already."""


class ConnectorUnderTest:
    """The scheduler's half of the connector.

    Args:
        configuration: as in the header of a log.
        speculates: whether the engine decodes speculatively.
        zeroes_new_blocks: whether the worker zeroes new blocks.
        handlers: state handlers of one's own, as "module:Class".

    Raises:
        NotReenactable: the connector makes another configuration of it.
    """

    def __init__(
        self,
        configuration: LedgerConfiguration,
        *,
        speculates: bool = False,
        zeroes_new_blocks: bool = False,
        handlers: Sequence[str] = (),
    ) -> None:
        require("driving the real connector", *CONNECTOR)
        from kvledger.adapters.repro import vllm_objects  # noqa: PLC0415 -- only here vLLM is needed

        self.configuration = configuration
        self.is_log_written = True
        """What the connector is to think of its log; it is in memory, and has everything."""
        engine = vllm_objects.Engine(
            configuration, speculates=speculates, zeroes_new_blocks=zeroes_new_blocks, num_blocks=_NUM_BLOCKS
        )
        self._begin(engine)
        settings = {**engine.extra_config(), "handlers": list(handlers), "memory_log_bytes": _RECENT_BYTES}
        self.connector = engine.connector(settings, lambda: self.now_ns)
        made = self._side.ledger.projections.configuration
        if made != configuration:
            different = [
                f"{name} {given!r} became {getattr(made, name)!r}"
                for name, given in attrs.asdict(configuration).items()
                if getattr(made, name) != given
            ]
            raise NotReenactable(f"the connector cannot be started as it was: {', '.join(different)}")
        self._side.journal.is_behind = lambda: not self.is_log_written
        self.core = composed_core(handlers)
        """With which its log is read."""

    def _begin(self, engine: Engine) -> None:
        """Before there is a connector."""
        self._engine = engine
        self.now_ns = 0
        """The time that the connector reads from its clock."""
        self.requests: dict[str, Request] = {}
        """By id; what the connector reads of them is set before a hook is called."""
        self._decoder: EventDecoder | None = None
        self._next_sequence = 1
        self._is_closed = False

    @property
    def _side(self) -> SchedulerSide:
        return self.connector.scheduler_side

    @property
    def _store(self) -> Any:  # noqa: ANN401 -- whichever store it is, its header is read
        return self._side.log.store

    def _commit(self) -> None:
        self._side.journal.commit()

    @property
    def _vllm(self) -> Any:  # noqa: ANN401 -- a module
        from kvledger.adapters.repro import vllm_objects  # noqa: PLC0415 -- as above

        return vllm_objects

    def take_events(self) -> list[SequencedEvent]:
        """The events that the connector wrote since the last call; what waits for a frame is committed first."""
        if not self._is_closed:
            self._commit()
        decoder = self._decoder = self._decoder or EventDecoder(self.core, self._store.header)
        events = [
            (sequence, event)
            for frame in self._store.read(self._next_sequence)
            for sequence, event in enumerate(decoder.decode(frame.payload), frame.first_sequence)
            if sequence >= self._next_sequence
        ]
        if events:
            self._next_sequence = events[-1][0] + 1
        return events

    # --- hooks ----------------------------------------------------------------------------------

    def on_new_request(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A request with this prompt was accepted."""
        self.accept(request_id, token_ids)
        self.connector.on_new_request(self.requests[request_id])

    def get_num_new_matched_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask what can be loaded."""
        return self.connector.get_num_new_matched_tokens(self.requests[request_id], num_computed_tokens)

    def update_state_after_alloc(self, request_id: str, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Give blocks: the whole flat table."""
        blocks = self._vllm.kv_cache_blocks(block_ids, len(self.configuration.windows))
        self.connector.update_state_after_alloc(self.requests[request_id], blocks, num_external_tokens)

    def build_connector_meta(self, step: Step) -> StepJobs:
        """One engine step; returns its jobs."""
        output: SchedulerOutput = self._vllm.scheduler_output(step, self.requests, len(self.configuration.windows))
        return self.connector.build_connector_meta(output)

    def update_connector_output(
        self, reports: Iterable[JobReport] = (), load_errors: Iterable[int] = (), heard: Iterable[int] = ()
    ) -> None:
        """What the workers report; and the lives, by ordinal, of which they tell vLLM as they were to."""
        told = self._side.journal.obligations.state.told
        finished = {told[ordinal] for ordinal in heard if ordinal in told}
        self.connector.update_connector_output(self._vllm.connector_output(tuple(reports), set(load_errors), finished))

    def request_finished(self, request_id: str, status: str, block_ids: Sequence[int]) -> None:
        """A request ends."""
        request = self.requests[request_id]
        request.status = self._vllm.status(status)
        groups = self._vllm.tables(block_ids, len(self.configuration.windows))
        self.connector.request_finished_all_groups(request, groups)

    def reset_cache(self) -> None:
        """Everything cached is stale."""
        self.connector.reset_cache()

    def get_kv_connector_stats(self) -> None:
        """Figures are taken."""
        self.connector.get_kv_connector_stats()

    def has_pending_push_work(self) -> None:
        """The engine asks whether to go on."""
        self.connector.has_pending_push_work()

    def shutdown(self) -> None:
        """The engine stops."""
        self.connector.shutdown()
        self._is_closed = True

    # --- what requests look like ---------------------------------------------------------------------

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Let there be a request with this prompt, without a word to the connector."""
        self.requests[request_id] = self._engine.request(request_id, token_ids)

    def set_tokens(self, request_id: str, first: int, token_ids: Sequence[int]) -> None:
        """Let a request have these tokens from position `first` on, and no others behind them."""
        self._engine.set_tokens(self.requests[request_id], first, token_ids)

    def reports(self, report: e.TransferReported) -> list[JobReport]:
        """What each rank says, so that together they say this."""
        reports: list[JobReport] = self._vllm.job_reports(report)
        return reports
