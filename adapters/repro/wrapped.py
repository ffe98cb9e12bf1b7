"""A wrapped connector of a recorder's log, made again with a recorder around it, and its recorded calls made again.

The recorder writes what the connector answers now, so that the log that comes of it is read and judged as the
recorded one was. Workers are not made: what they reported is part of the recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvledger.adapters.core import composed_core
from kvledger.adapters.recorder.said import WorkersReported
from kvledger.adapters.repro.calls import HookCall
from kvledger.adapters.repro.connector import ConnectorUnderTest
from kvledger.adapters.repro.from_log import transferred
from kvledger.adapters.repro.hooks import HookRun
from kvledger.adapters.repro.recording import NotReenactable, Recording, Wrapped, ended_transfers, reported_by_workers
from kvledger.adapters.repro.scheduler_record import Life
from kvledger.lifecycle import events as e
from kvledger.storage.extras import CONNECTOR, require

RECORDER = "kvledger.adapters.recorder.extension:Recorder"
_RECENT_BYTES = 1 << 22
"""Events are read after every call; what was read may be forgotten."""


class WrappedUnderTest(ConnectorUnderTest):
    """The scheduler's half of a recorder around the connector that a log names.

    Raises:
        NotReenactable: the connector cannot be made here.
    """

    def __init__(self, recording: Recording, wrapped: Wrapped) -> None:
        require("driving a recorded connector", *CONNECTOR)
        from kvledger.adapters.repro.vllm_objects import WrappedEngine  # noqa: PLC0415 -- only here vLLM is needed

        self.configuration = recording.configuration
        self.core = composed_core((), (RECORDER,))
        self.is_log_written = True
        engine = WrappedEngine(recording.configuration, wrapped, speculates=recording.speculates)
        self._begin(engine)
        self._wrapped_engine = engine
        extra_config = {"log_dir": None, "memory_log_bytes": _RECENT_BYTES}
        try:
            self.recorder = engine.connector(extra_config, lambda: self.now_ns)
        except Exception as error:
            raise NotReenactable(
                f"{recording.wrapped_name} cannot be made here as it was: {type(error).__name__}: {error}; install "
                "what it needs, put its module on PYTHONPATH, write what the log leaves out into the test's `wrapped`"
            ) from error
        self.connector: Any = self.recorder
        self._refuse_blocks(self.recorder.wrapped)

    def _refuse_blocks(self, wrapped: Any) -> None:  # noqa: ANN401 -- any connector
        """One that is given vLLM's own blocks keeps and frees them: there are none here.

        (`kv_connector/v1/base.py`, bind_gpu_block_pool, 0.32).
        """
        children = getattr(wrapped, "_connectors", ())
        for child in children:
            self._refuse_blocks(child)
        if not children and "bind_gpu_block_pool" in vars(type(wrapped)):
            raise NotReenactable(
                f"{type(wrapped).__name__} works on vLLM's own blocks, which no recording has; a world of the "
                "simulated engine with its seed plays it again (kvledger.adapters.simulation)"
            )

    @property
    def _store(self) -> Any:  # noqa: ANN401 -- as there
        return self.connector.recording.log.log.store

    def _commit(self) -> None:
        self.connector.recording.log.commit()

    def workers_report(self, reported: WorkersReported, completed: Sequence[str]) -> None:
        """What the workers said, with today's names of the copies that they completed."""
        output = self._wrapped_engine.workers_output(reported, completed, self.recorder.wrapped)
        self.recorder.update_connector_output(output)

    def request_finished(self, request_id: str, status: str, block_ids: Sequence[int]) -> None:
        """A request ends."""
        request = self.requests[request_id]
        request.status = self._vllm.status(status)
        groups = self._vllm.tables(block_ids, len(self.configuration.windows))
        if hasattr(self.recorder, "request_finished_all_groups"):
            self.recorder.request_finished_all_groups(request, groups)
        else:
            self.recorder.request_finished(request, groups[0])


class WrappedRun(HookRun):
    """Plays what vLLM and the workers did; an exception of the connector's ends it, as it ended the engine."""

    def __init__(self, recording: Recording, connector: WrappedUnderTest) -> None:
        super().__init__(recording, connector)
        self._wrapped = connector
        self._now: dict[tuple[str, bool, int], str] = {}
        """(request, whether it is a load, how many before) -> the copy's name now."""
        self._counts: Counter[tuple[str, bool]] = Counter()
        self._arrived: set[str] = set()

    def _makes(self, reenact_call: Callable[[HookCall, Any], None], call: HookCall) -> bool:
        try:
            reenact_call(call, call.main)
        except Exception:  # noqa: BLE001 -- the recorder has written which; it is judged with the log
            return False
        return True

    def _arrive(self, call: HookCall, main: e.RequestArrived) -> None:
        self._arrived.add(main.request_id)
        super()._arrive(call, main)

    def _take(self, call: HookCall) -> None:
        events = self._connector.take_events()
        self._outcome.take(events, call.hook, call.sequence)
        known = set(self._now.values())
        for _, event in events:
            found = transferred(event)
            if found is not None and found[1].job not in known:
                request_id, copy = found
                place = self._counts[request_id, copy.is_load]
                self._counts[request_id, copy.is_load] += 1
                self._now[request_id, copy.is_load, place] = copy.job
                known.add(copy.job)

    def _output(self, call: HookCall, main: e.Event) -> None:
        reported = reported_by_workers(main)
        if reported is None:  # reported by itself, and not beside what the workers say
            return
        if call.noticed(e.LoadErrorsObserved):
            self._live.take_back(
                {event.request_id: event.num_computed_tokens for event in call.noticed(e.TokensRolledBack)}
            )
        self._wrapped.workers_report(self._of_who_is_here(reported), self._completed(call))

    def _of_who_is_here(self, reported: WorkersReported) -> WorkersReported:
        """Without requests that were left out."""

        def here(ids: Iterable[str]) -> tuple[str, ...]:
            return tuple(who for who in ids if who in self._arrived)

        sent, received, failed = reported.finished_sending, reported.finished_recving, reported.failed_recving
        return WorkersReported(here(sent), here(received), here(failed), reported.invalid_block_ids)

    def _completed(self, call: HookCall) -> list[str]:
        """What the completed copies are called now; without those that are not made any more."""
        copies = self._recording.copies
        ended = [job for _, event in call.observed for job in ended_transfers(event)]
        names = [self._now.get(copies[job]) if job in copies else job for job in ended]
        return [name for name in names if name is not None]

    def _table_at_end(self, life: Life, main: e.RequestFinished) -> Sequence[int]:  # noqa: ARG002 -- all of it
        return life.block_ids
