"""A seeded world: which engine, which requests, and what goes wrong when. The seed and the commit reproduce all of it.

Each seed switches a random subset of faults on, so that rare ones also meet each other alone. Time is virtual.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Self
from unittest import mock

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput

from kvledger.adapters.lab.simulation.connectors import KVLEDGER, ConnectorSetup
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.lab.simulation.expected import Expected
from kvledger.adapters.lab.simulation.hashed_model import BLOCK_SIZE
from kvledger.adapters.lab.simulation.tiny_model import VOCABULARY_SIZE
from kvledger.adapters.vllm import KVLedgerConnector, configuration
from kvledger.adapters.vllm.metadata import WorkerReports
from sim.cached_blocks import CachedBlocks
from sim.clock import VirtualClock
from sim.copies import Copies
from sim.faults import FAULTS, FailingCopies, Fault, draw_faults
from sim.logs import LogEnd, abandon, read_end
from sim.meter import Meter
from sim.pages import PageWatch
from sim.settings import DIMENSIONS, MAX_MODEL_LEN, draw, widen
from sim.subscriber import WHOLE_HASHES, Subscriber, assert_told
from sim.virtual_copies import VirtualCopies
from sim.vllm_mended import withdraw_what_is_not_computed

MAX_ALIVE = 14
STRANDED_EVERY = 2_000
"""So often, in steps, vLLM's queue is looked at: it may be stranded, which is no fault of a connector's."""
MAX_STEPS = 6_001
"""More than any world took. World 796017 took 3,352: 49 requests, one after another, and most reports dropped."""


@attrs.define(eq=False)
class Life:
    """One request of a client, from its arrival to its end, also over a restart of the engine."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    cache_salt: str | None
    priority: int
    truth: Expected
    outputs: list[int] = attrs.field(factory=list)
    is_aborted: bool = False
    is_failed: bool = False
    """Whether vLLM ended it because of a load that failed, as `kv_load_failure_policy` "fail" says."""
    request: Any = None
    """VLLM's own."""
    num_known_blocks: int = 0
    """Block hashes that `cached_blocks.py` has taken up."""
    num_right_outputs: int = 0


class World:
    """One engine at a time, its clients, and what goes wrong. A context manager: faults reach outside of it."""

    def __init__(
        self,
        seed: int,
        *,
        setup: ConnectorSetup = KVLEDGER,
        faults: frozenset[str] | None = None,
        in_files: bool = False,
        dimensions: Collection[str] = DIMENSIONS,
        named: Callable[[str], str] = str,
        **changes: Any,
    ) -> None:
        """Draw everything.

        Args:
            seed: of everything that is drawn.
            setup: who is the connector.
            faults: names of those that may be on; None for all that the seed switches on.
            in_files: whether the log is in files, also where no fault needs it there.
            dimensions: of `settings.DIMENSIONS`, those that the seed may widen this world by.
            named: makes a request's id of its name in this world.
            changes: settings to use instead of the drawn ones.
        """
        self.seed = seed
        self.setup = setup
        self.named = named
        drawn_settings = draw(random.Random(f"settings {seed}"))
        if setup is KVLEDGER:
            drawn_settings = widen(drawn_settings, random.Random(f"wider settings {seed}"), dimensions)
        self.settings = attrs.evolve(drawn_settings, **changes)
        self.clock = VirtualClock(random.Random(f"clock {seed}"))
        self.meter = Meter()
        self.notes: list[tuple[int, str]] = []
        self.num_steps = 0
        self.weights = 0
        self.is_draining = False
        self.lives: list[Life] = []
        self.alive: list[Life] = []
        self.ended_in_last_step: list[Life] = []
        self.dead_logs: list[LogEnd] = []
        self.needs_files = in_files
        self._rng = random.Random(f"clients {seed}")
        self._wider_rng = random.Random(f"wider clients {seed}")
        self._shared_prefix = self.tokens(self._rng, 80)
        self._by_ordinal: dict[int, Life] = {}
        self._exits = contextlib.ExitStack()
        self._exits.enter_context(mock.patch.dict(os.environ, WHOLE_HASHES))
        names = draw_faults(seed) | ({FailingCopies.name} if self.settings.loads_fail_anywhere else set())
        names = names if faults is None else names & faults
        chosen = [fault for fault in FAULTS if fault.name in names and fault.suits(self.settings)]
        self.faults: list[Fault] = [fault(self) for fault in chosen]
        self._reports_are_lost = any(type(fault).reports is not Fault.reports for fault in self.faults)
        for fault in self.faults:
            self._exits.callback(fault.detach)
        self.log_dir: Path | None = None
        if self.needs_files:
            # The process that makes snapshots for an engine which was killed outlives it, and may be writing still.
            directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            self.log_dir = Path(self._exits.enter_context(directory))
        self._start_engine()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave nothing behind: no files, nothing stood in for."""
        self._exits.close()

    @property
    def fault_names(self) -> list[str]:
        """Those that are on."""
        return [fault.name for fault in self.faults]

    @property
    def side(self):  # noqa: ANN201 -- the type would pull the adapter into every reader's way
        """The scheduler's half of kvledger."""
        return self.engine.connector.scheduler_side

    @property
    def worker_side(self):  # noqa: ANN201 -- see above
        """The worker's half of kvledger."""
        return self.engine.worker._worker_side

    # --- what faults and tests may do ---------------------------------------------------------

    def note(self, what: str) -> None:
        """Remember for the transcript."""
        self.notes.append((self.num_steps, what))

    def tokens(self, rng: random.Random, count: int) -> list[int]:
        """Tokens that nobody else has."""
        return [rng.randrange(VOCABULARY_SIZE) for _ in range(count)]

    def prompt(self, rng: random.Random, num_tokens: int) -> list[int]:
        """A prompt that shares its beginning with others."""
        num_shared = min(rng.randrange(len(self._shared_prefix)), num_tokens - 1)
        return self._shared_prefix[:num_shared] + self.tokens(rng, num_tokens - num_shared)

    def arrive(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        request_id: str = "",
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        """A request comes in."""
        if not request_id:
            is_theirs = (
                self.settings.neighbour is not None
                and random.Random(f"theirs {self.seed} {len(self.lives)}").random() < 0.5
            )
            request_id = self.named(f"{'theirs' if is_theirs else 'r'}{len(self.lives)}")
        life = Life(request_id, list(prompt), max_tokens, cache_salt, priority, Expected(prompt, self.weights))
        self.lives.append(life)
        self._add(life)

    def abort(self, life: Life) -> None:
        """Its client goes away."""
        life.is_aborted = True
        self.engine.abort(life.request_id)

    def restart(self) -> None:
        """Kill the engine, read its log back, start another one, send it what was not answered."""
        self.dead_logs.append(read_end(self.side))
        abandon(self.side)
        left = [life for life in self.alive if life.request_id in self.engine.scheduler.requests]
        self.meter.end()
        self._start_engine()
        for life in left:
            life.outputs.clear()
            life.num_right_outputs = life.num_known_blocks = 0
            life.truth = Expected(life.prompt, self.weights)
            self._add(life)

    def load_new_weights(self) -> None:
        """Whatever was computed before is wrong from now on; nobody may be running, no step be in flight."""
        self.weights += 1
        self._set_weights()
        self.cached_blocks.forget()
        for life in self.alive:
            life.num_known_blocks = 0
            life.truth.load_new_weights(self.weights, len(life.outputs))

    # --- its life -----------------------------------------------------------------------------

    def run(self) -> None:
        """Live through all steps, then let everybody finish; the log is committed and complete."""
        while self.num_steps < self.settings.num_steps:
            self.step()
        self.is_draining = True
        while self.engine.scheduler.has_requests() or self.engine.is_computing:
            self.step()
            if self.num_steps % STRANDED_EVERY == 0 and self.engine.is_stranded:
                self.note("vLLM has stranded its queue; all clients go away")
                for life in self.alive:
                    self.abort(life)
            elif self.num_steps > MAX_STEPS:
                counts = self.engine.scheduler.get_request_counts()
                message = f"still busy after {MAX_STEPS} steps: {counts} running and waiting"
                raise AssertionError(message)
        self.meter.end()
        if self.setup is KVLEDGER:
            for fault in self.faults:
                fault.repair()
            self.side.ledger.commit()
            self.side.log.store.flush()
            self.log = read_end(self.side)

    def step(self) -> None:
        """Whatever happens between two engine steps, then one."""
        self.clock.pass_step()
        for fault in self.faults:
            fault.before_step()
        if not self.is_draining:
            self._arrivals()
        self.num_steps += 1
        num_processed = self.engine.num_steps_processed
        if self.engine.scheduler.has_requests():
            self.engine.step()
        else:
            self.engine.update()
        if self.subscriber is not None and self.engine.num_steps_processed > num_processed:
            assert_told(self.subscriber, self.side)
        self._look_at_answers()
        requests = self.engine.scheduler.requests
        self.ended_in_last_step = [life for life in self.alive if life.request_id not in requests]
        self.alive = [life for life in self.alive if life.request_id in requests]
        if self.setup is KVLEDGER:
            self.pages.raise_if_wrong()

    def _look_at_answers(self) -> None:
        for life in self.alive:
            num_outputs = len(life.outputs)
            if num_outputs > life.num_right_outputs:
                right = life.truth.output(num_outputs)[life.num_right_outputs :]
                assert life.outputs[life.num_right_outputs :] == right, f"{life.request_id} got a wrong token"
                life.num_right_outputs = num_outputs
            reason = self.engine.finish_reasons.pop(life.request_id, "")
            life.is_failed |= reason == "error" and life.request_id in self.engine.may_fail
        self.cached_blocks.look(self.alive)

    def _arrivals(self) -> None:
        rng = self._rng
        comes = rng.random() < self.settings.arrival_share
        num_prompt_tokens, max_tokens = _draw_lengths(rng, self.settings.connector)
        prompt = self.prompt(rng, num_prompt_tokens)
        if self._wider_rng.random() < self.settings.one_output_share:
            max_tokens = 1
        salt, priority = rng.choice(self.settings.salts), rng.choice([0, 0, 1])
        if comes and len(self.alive) < MAX_ALIVE:
            self.arrive(prompt, max_tokens, cache_salt=salt, priority=priority)

    def _add(self, life: Life) -> None:
        if self.setup is KVLEDGER:
            self._by_ordinal[self.side.ledger.projections.tracker.num_arrived] = life
        self.alive.append(life)
        self.engine.outputs[life.request_id] = life.outputs
        life.request = self.engine.add(
            life.request_id,
            life.prompt,
            life.max_tokens,
            cache_salt=life.cache_salt,
            priority=life.priority,
            arrival_time=self.clock() / 1e9,
        )

    def _start_engine(self) -> None:
        settings = self.settings
        extra: dict[str, Any] = dict(settings.connector)
        if self.log_dir is not None:
            # Small segments, so that some are seen to be full.
            extra |= {"log_dir": str(self.log_dir), "segment_bytes": 20_000}
        setup = settings.neighbour or self.setup
        self.subscriber = subscriber = Subscriber() if setup is KVLEDGER else None
        with self.clock.read_by(KVLedgerConnector), _large_loads(settings.large_load_bytes):
            self.engine = engine = SimulatedEngine(
                windows=settings.windows,
                num_blocks=settings.num_blocks * len(settings.windows),
                block_size=BLOCK_SIZE,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_model_len=MAX_MODEL_LEN,
                enable_prefix_caching=settings.enable_prefix_caching,
                async_scheduling=settings.async_scheduling,
                model_runner_v2=settings.model_runner_v2,
                policy=settings.policy,
                setup=setup,
                long_prefill_token_threshold=settings.long_prefill_token_threshold,
                defer_finalize=settings.defer_finalize,
                kv_transfer={"kv_load_failure_policy": settings.load_failure_policy},
                subscriber=subscriber,
                **extra,
            )
        if settings.policy == "priority":
            withdraw_what_is_not_computed(engine.scheduler)
        self.cached_blocks = CachedBlocks(engine)
        self._set_weights()
        self.meter.attach(engine.scheduler)
        self.alive = []
        self._by_ordinal = {}
        engine.before_update = self._let_faults_act
        if self.setup is KVLEDGER:
            engine_in_step = self.worker_side._engine
            if self.worker_side._async_engine is not None:
                self.worker_side._async_engine.close()
                rng = random.Random(f"copies {self.seed}")
                self.worker_side._async_engine = VirtualCopies(engine_in_step, self.clock, rng)
            if settings.late_reports:
                rng = random.Random(f"copies in the step {self.seed}")
                self.worker_side._engine = VirtualCopies(engine_in_step, self.clock, rng)
            self.copies = Copies(self.worker_side)
            self.pages = PageWatch(engine, lambda ordinal: self._by_ordinal[ordinal].truth, settings.ns_per_page)
            if self.log_dir is not None:
                store: Any = self.side.log.store
                store._clock = lambda: self.clock.now_ns / 1e9  # a disk is tried again by time, too
            engine.on_output = self._pass_through_faults
            for fault in self.faults:
                fault.attach()
            self.pages.attach(self.copies)  # outermost: it must see copies that a fault lets fail, too

    def _set_weights(self) -> None:
        self.engine.model.weights = self.weights
        for child in getattr(self.engine.workers[0], "sub_connectors", ()):
            child.weights = self.weights

    def _let_faults_act(self, output: KVConnectorOutput | None) -> None:
        for fault in self.faults:
            fault.before_update(output)

    def _pass_through_faults(self, output: KVConnectorOutput) -> None:
        meta: Any = output.kv_connector_worker_meta
        children = list(meta.metadata) if isinstance(meta, MultiKVConnectorWorkerMetadata) else [meta]
        ours = [child for child in children if isinstance(child, WorkerReports)]
        reports = [report for child in ours for report in child.reports]
        for fault in self.faults:
            reports = fault.reports(reports)
        # A wire that loses reports would lose with them that they are missing.
        steps = () if self._reports_are_lost else tuple(step for child in ours for step in child.steps)
        passed = WorkerReports(tuple(reports), steps=steps) if reports or steps else None
        if self.settings.neighbour is None:
            output.kv_connector_worker_meta = passed
        else:
            neighbour_first = self.settings.neighbour.is_first
            both = (None, passed) if neighbour_first else (passed, None)
            output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(both) if passed else None


@contextlib.contextmanager
def _large_loads(num_bytes: int | None) -> Iterator[None]:
    """With `load_mode` "auto", loads of that size run asynchronously; production's would need a real model."""
    real = configuration.LARGE_LOAD_BYTES
    configuration.LARGE_LOAD_BYTES = num_bytes or real
    try:
        yield
    finally:
        configuration.LARGE_LOAD_BYTES = real


def _draw_lengths(rng: random.Random, connector: dict[str, Any]) -> tuple[int, int]:
    """Prompt and output: mostly ordinary, now and then one of the sizes at which something begins or ends.

    Never more than `MAX_MODEL_LEN` in all: vLLM's front end refuses longer ones, and the scheduler of 0.32 would keep
    a prompt that its pool cannot hold at the head of the queue for ever, with everybody else behind it.
    """
    num_prompt_tokens, max_tokens = rng.randrange(1, 100), rng.randrange(1, 60)
    odd = rng.choice(["ordinary"] * 6 + ["one token", "one output", "whole chunks", "longest"])
    whole = int(connector["chunk_size"]) * rng.randint(1, 2)
    if odd == "one token":
        num_prompt_tokens = 1
    elif odd == "one output":
        max_tokens = 1
    elif odd == "whole chunks":
        num_prompt_tokens = whole
    elif odd == "longest":
        max_tokens = MAX_MODEL_LEN
    return num_prompt_tokens, min(max_tokens, MAX_MODEL_LEN - num_prompt_tokens)
