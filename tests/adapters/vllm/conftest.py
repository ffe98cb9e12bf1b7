"""An engine that can be asked what its log says, and checks of every engine that are made when its test is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from lifecycle_driver.invariants import num_entries
from sim.modes import RUNNERS, of_runner
from sim.slow_copies import delay
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.lab.simulation.expected import chained_hash, next_token
from kvledger.lifecycle import Core, LedgerConfiguration, Replay
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.codec import EventDecoder
from kvledger.lifecycle.events import (
    Event,
    HookFailed,
    InvariantViolated,
    LoadErrorsObserved,
    LoadFailed,
    LookupAnswered,
    RequestArrived,
    RequestQuarantined,
    StepScheduled,
)
from kvledger.lifecycle.projections import Projections

TROUBLE = (InvariantViolated, RequestQuarantined, HookFailed)


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What `HashedModel` says after `prompt`, computed without any engine."""
    state = 0
    for token in prompt:
        state = chained_hash(state, token)
    output = []
    for _ in range(num_tokens):
        output.append(next_token(state))
        state = chained_hash(state, output[-1])
    return output


class RecordedEngine(SimulatedEngine):
    """A `SimulatedEngine` whose log is read back from its store, frame by frame."""

    def __init__(self, **options: Any) -> None:
        self.prompts: dict[str, list[int]] = {}
        self._is_asked_for_trouble = False
        # Copies within steps unless a test is about those beside them: how many steps such a copy takes is not fixed.
        super().__init__(**{"max_silent_ms": 0, "load_mode": "sync", "save_mode": "sync", **options})

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> Request:
        """Queue a request; what it was asked is remembered, so that its output can be checked."""
        self.prompts[request_id] = list(prompt)
        self.outputs[request_id] = []
        return super().add(request_id, prompt, max_tokens, **options)

    def serve(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, *, max_steps: int = 5000, **options: Any
    ) -> None:
        """Queue a request, and serve it and all others to their ends."""
        self.add(request_id, prompt, max_tokens, **options)
        self.run(max_steps=max_steps)

    def begin_step(self) -> None:
        """Schedule and execute a step; `update` is its other half."""
        scheduler_output = self.scheduler.schedule()
        self._in_flight.append((scheduler_output, self._execute(scheduler_output)))

    def add_crowd(self, num_requests: int = 3, num_tokens: int = 50) -> None:
        """Queue requests of 40 tokens with nothing in common; three of 90 do not fit into thirteen blocks of 16."""
        for number in range(num_requests):
            self.add(f"request {number}", range(100 * number, 100 * number + 40), num_tokens)

    def add_with(self, request_id: str, prompt: Sequence[int], sampling_params: SamplingParams) -> Request:
        """Queue a request with sampling parameters of its own."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling_params,
            pooling_params=None,
            block_hasher=self._block_hasher,
        )
        self.scheduler.add_request(request)
        self.prompts[request_id] = list(prompt)
        self.outputs[request_id] = []
        return request

    def end_session(self, request_id: str) -> None:
        """The client closes a streaming session: a request that is not resumable and has no prompt to speak of."""
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=[0],
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
                resumable=False,
            )
        )

    @property
    def projections(self) -> Projections:
        """The live ledger's."""
        return self.connector.scheduler_side.ledger.projections

    @property
    def figures(self) -> Any:
        """The totals of the live ledger."""
        return self.connector.scheduler_side.journal.totals.figures

    @property
    def header(self) -> dict[str, Any]:
        """The header of the log; a store that keeps trouble away has it from the store it is around."""
        store: Any = self.connector.scheduler_side.log.store
        return getattr(store, "header", None) or store._store.header

    @property
    def replay_configuration(self) -> LedgerConfiguration:
        """What the header says that the log was made with."""
        return LedgerConfiguration(**self.header["configuration"])

    def events(self) -> list[tuple[int, Event]]:
        """Everything in the store, with its sequence numbers; what is not committed yet is committed first."""
        side = self.connector.scheduler_side
        if not side.log.store._closed:
            side.ledger.commit()
        decoder = EventDecoder(Core.standard(), self.header)
        return [
            (frame.first_sequence + offset, event)
            for frame in side.log.store.read()
            for offset, event in enumerate(decoder.decode(frame.payload))
        ]

    def logged(self, *classes: type[Event], request_id: str | None = None) -> list[Any]:
        """The events of these classes, of one request or of all. Who asks for trouble judges it."""
        self._is_asked_for_trouble |= not set(TROUBLE).isdisjoint(classes)
        return [
            event
            for _, event in self.events()
            if isinstance(event, classes) and (request_id is None or getattr(event, "request_id", None) == request_id)
        ]

    def check_answers(self, request_id: str) -> list[LookupAnswered]:
        """Every answer must be right for the count of its own call; returns them."""
        answers = self.logged(LookupAnswered, request_id=request_id)
        for answer in answers:
            right = max(0, min(answer.num_hit_tokens, answer.num_tokens - 1) - answer.num_computed_tokens)
            assert answer.num_external_tokens == right, answer
        return answers

    def check_outputs(self) -> None:
        """Every request that was not aborted said what it says without any cache."""
        for request_id, output in self.outputs.items():
            assert output == expected_output(self.prompts[request_id], len(output)), request_id

    def check_released(self) -> None:
        """Nothing is left of any request."""
        assert set(num_entries(self.projections).values()) == {0}, num_entries(self.projections)
        assert not self.connector.scheduler_side._requests
        self.check_nothing_owed()

    def check_nothing_owed(self) -> None:
        """VLLM waits for nobody and has all of its blocks again."""
        assert not self.connector.has_pending_push_work()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def num_tokens_computed(self, request_id: str) -> int:
        """Tokens that were scheduled for a request that is not steady, in all its steps together."""
        ordinal = self.logged(RequestArrived, request_id=request_id)[-1].ordinal
        return sum(
            num_tokens
            for event in self.logged(StepScheduled)
            for other, _, num_tokens, _ in event.advanced
            if other == ordinal
        )

    def replay(self, core: Core = Core.standard()) -> Replay:
        """Decide the whole log again, the reference machine walking along."""
        replay = Replay(core, self.replay_configuration, reference=core.reference)
        replay.run(self.events())
        return replay

    def check_replay(self, core: Core = Core.standard()) -> None:
        """The log replays without divergence, to exactly what the live ledger believes."""
        replay = self.replay(core)
        assert replay.divergences == []
        assert replay.reference_differences == []
        assert replay.projections.snapshot() == self.projections.snapshot()

    def audit(self) -> Audit:
        """What every checker says about the log."""
        audit = Audit(Core.standard(), self.replay_configuration)
        audit.run(self.events())
        return audit

    def check_at_end(self, *, replays: bool = True) -> None:
        """What holds at the end of a test: right outputs, a sound log, no trouble but what the test asked for, and of
        requests that have all ended nothing is left.

        Where a test has broken the ledger (`replays=False`), vLLM has still been told all that it waits for.
        """
        was_asked = self._is_asked_for_trouble
        self.check_outputs()
        if not self.scheduler.requests:
            self.check_nothing_owed()
        if replays:
            may_quarantine = self.logged(LoadFailed, LoadErrorsObserved)
            trouble = self.logged(InvariantViolated, HookFailed, *(() if may_quarantine else (RequestQuarantined,)))
            assert was_asked or trouble == []
            if not self.scheduler.requests and not self.connector.scheduler_side.journal.is_disabled:
                self.check_released()
            self.check_replay()
            self.check_audit()
        self.shutdown()

    def check_audit(self) -> None:
        """Every checker finds the log sound, unless the connector itself has said that something went wrong."""
        if self.logged(InvariantViolated, HookFailed):
            return
        audit = self.audit()
        assert audit.violations == []
        assert audit.is_sound


EngineFactory = Callable[..., RecordedEngine]


@pytest.fixture
def transfers() -> str:
    """When copies run, unless a test says so: as the connector chooses. See `sim.modes`."""
    return "auto"


@pytest.fixture
def make_engine(transfers: str) -> Iterator[EngineFactory]:
    """Build engines. When the test is over, each one's outputs must be right and nothing may be left of requests that
    have ended; its log is replayed and must agree with the live ledger.

    Where `transfers` is "async", all copies are asynchronous and each takes a step.

    `replays=False` is for tests that break the ledger on purpose: what it did then follows from the breakage, not from
    the log.
    """
    engines: list[tuple[RecordedEngine, bool]] = []

    def make(*, replays: bool = True, **options: Any) -> RecordedEngine:
        options.setdefault("host_bytes", 1 << 20)
        if transfers == "async":
            options = {"load_mode": "async", "save_mode": "async", **options}
        engine = RecordedEngine(**options)
        if transfers == "async":
            delay(engine)
        engines.append((engine, replays))
        return engine

    yield make
    for engine, replays in engines:
        engine.check_at_end(replays=replays)


@pytest.fixture(params=[of_runner(name, runner, label=name) for name, runner in RUNNERS.items()])
def runner(request: pytest.FixtureRequest) -> dict[str, bool]:
    """Each of `sim.modes.RUNNERS`."""
    runner: dict[str, bool] = request.param
    return runner


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What people are told."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.kvledger")
    return caplog
