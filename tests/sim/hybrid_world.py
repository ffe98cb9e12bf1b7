"""A seeded world around a hybrid model: groups of layers with sliding windows, a pool under pressure, broken copies.

Of its own, beside `world.py`, because what a seed decides there would change with every question asked here.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import attrs

from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.lab.simulation.hashed_model import block_bytes
from kvledger.adapters.lab.simulation.tiny_model import VOCABULARY_SIZE
from kvledger.adapters.vllm import KVLedgerConnector
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventDecoder
from sim.clock import VirtualClock
from sim.virtual_copies import VirtualCopies

BLOCK_SIZE = 16
MAX_MODEL_LEN = 160
MAX_ALIVE = 10
MAX_STEPS = 5000


@attrs.frozen
class HybridSettings:
    """What a seed decides before the first step."""

    windows: tuple[int, ...]
    num_blocks: int
    chunk_size: int
    num_slots: int
    max_num_batched_tokens: int
    max_num_seqs: int
    enable_prefix_caching: bool
    async_scheduling: bool
    model_runner_v2: bool
    num_steps: int
    abort_share: float
    reset_share: float
    failed_save_share: float
    failed_load_share: float
    defer_finalize: bool = False
    """Whether workers report before they save, as vLLM's with a drafter; drawn apart."""


def draw(rng: random.Random) -> HybridSettings:
    """Two or three groups in any order, at least one of which sees everything."""
    windows = rng.choice([(0, 48), (48, 0), (0, 64), (17, 0), (0, 32, 80), (64, 64, 0), (0, 0, 40)])
    return HybridSettings(
        windows=windows,
        num_blocks=rng.randrange(13, 26) * len(windows),
        chunk_size=rng.choice([8, 16, 32, 64]),
        num_slots=rng.choice([8, 20, 60, 400]) * len(windows),
        max_num_batched_tokens=rng.choice([32, 64, 256]),
        max_num_seqs=rng.choice([3, 6, 12]),
        enable_prefix_caching=rng.random() < 0.5,
        async_scheduling=rng.random() < 0.4,
        model_runner_v2=rng.random() < 0.5,
        num_steps=rng.choice([100, 250]),
        abort_share=rng.choice([0.0, 0.02, 0.08]),
        reset_share=rng.choice([0.0, 0.0, 0.004, 0.02]),
        failed_save_share=rng.choice([0.0, 0.0, 0.05]),
        failed_load_share=rng.choice([0.0, 0.0, 0.2]),
    )


class HybridWorld:
    """One engine and its clients."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = random.Random(seed)
        has_drafter = random.Random(f"drafter {seed}").random() < 0.5
        self.settings = settings = attrs.evolve(draw(self._rng), defer_finalize=has_drafter)
        self._clock = VirtualClock(random.Random(f"clock {seed}"))
        with self._clock.read_by(KVLedgerConnector):
            self.engine = self._make_engine(settings)
        worker_side = self.engine.worker._worker_side
        worker_side._async_engine.close()
        rng = random.Random(f"copies {seed}")
        worker_side._async_engine = VirtualCopies(worker_side._engine, self._clock, rng)
        self._shared_prefix = self._tokens(80)
        self._alive: list[str] = []
        self._num_arrived = 0
        self.aborted: set[str] = set()
        self.max_tokens: dict[str, int] = {}
        self._break_copies()

    def _make_engine(self, settings: HybridSettings) -> SimulatedEngine:
        return SimulatedEngine(
            windows=settings.windows,
            num_blocks=settings.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=settings.enable_prefix_caching,
            async_scheduling=settings.async_scheduling,
            model_runner_v2=settings.model_runner_v2,
            defer_finalize=settings.defer_finalize,
            chunk_size=settings.chunk_size,
            host_bytes=block_bytes(BLOCK_SIZE) * settings.num_slots,
        )

    @property
    def side(self):  # noqa: ANN201 -- the type would pull the adapter into every reader's way
        """The scheduler's half of the connector."""
        return self.engine.connector.scheduler_side

    def run(self) -> None:
        """Live through all steps, then let everybody finish."""
        for _ in range(self.settings.num_steps):
            self._clients()
            self._step()
        for _ in range(MAX_STEPS):
            if not self.engine.scheduler.has_requests() and not self.engine.is_computing:
                break
            self._step()
        else:
            message = f"still busy after {MAX_STEPS} steps: {self.engine.scheduler.get_request_counts()}"
            raise AssertionError(message)
        self.side.ledger.commit()

    def _step(self) -> None:
        self._clock.pass_step()
        if self.engine.scheduler.has_requests():
            self.engine.step()
        else:
            self.engine.update()

    def events(self) -> Iterator[tuple[int, e.Event]]:
        """The log, decoded."""
        store = self.side.log.store
        decoder = EventDecoder(Core.standard(), store.header)
        for frame in store.read():
            yield from enumerate(decoder.decode(frame.payload), frame.first_sequence)

    def _clients(self) -> None:
        rng, settings = self._rng, self.settings
        if rng.random() < 0.2 and len(self._alive) < MAX_ALIVE:
            request_id = f"r{self._num_arrived}"
            self._num_arrived += 1
            prompt = self._shared_prefix[: rng.randrange(70)] + self._tokens(rng.randrange(1, 30))
            self.max_tokens[request_id] = rng.randrange(1, 60)
            self.engine.add(request_id, prompt, self.max_tokens[request_id])
            self._alive.append(request_id)
        if self._alive and rng.random() < settings.abort_share:
            request_id = rng.choice(self._alive)
            self.aborted.add(request_id)
            self.engine.abort(request_id)
        if rng.random() < settings.reset_share:
            # vLLM refuses where blocks are still in use: by a step in flight or a load.
            with contextlib.suppress(RuntimeError):
                self.engine.scheduler.reset_prefix_cache(
                    reset_running_requests=True, reset_connector=rng.random() < 0.5
                )
        self._alive = [request_id for request_id in self._alive if request_id in self.engine.scheduler.requests]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY_SIZE) for _ in range(count)]

    def _break_copies(self) -> None:
        """Let some copies fail on the worker, as a full or broken host would."""
        side = self.engine.worker._worker_side
        shares = {"start_save": self.settings.failed_save_share, "start_load": self.settings.failed_load_share}
        rng = random.Random(self.seed + 1)
        for name, share in shares.items():
            engine = side._engine if name == "start_save" else side._async_engine
            copy = getattr(engine, name)

            def perhaps(*arguments, copy=copy, share=share):  # noqa: ANN002, ANN001, ANN202
                if rng.random() < share:
                    message = "a copy that this seed breaks"
                    raise RuntimeError(message)
                return copy(*arguments)

            setattr(engine, name, perhaps)
