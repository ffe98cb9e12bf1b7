"""A seeded world: which engine, which requests, and what goes wrong when. The seed and the commit reproduce all of it.

Each seed switches a random subset of troubles on, so that rare ones also meet each other alone.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import EventDecoder
from sim.engine import SimulatedEngine, block_bytes
from sim.tiny_model import VOCABULARY_SIZE

BLOCK_SIZE = 16
MAX_MODEL_LEN = 160
MAX_ALIVE = 14


@attrs.frozen
class Settings:
    """What a seed decides before the first step."""

    num_blocks: int
    chunk_size: int
    num_slots: int
    max_num_batched_tokens: int
    max_num_seqs: int
    enable_prefix_caching: bool
    async_scheduling: bool
    model_runner_v2: bool
    num_steps: int
    arrival_share: float
    abort_share: float
    reset_share: float
    salts: tuple[str | None, ...]
    failed_copy_share: float
    load_mode: str
    save_mode: str


def draw(rng: random.Random) -> Settings:
    """Settings that keep a small pool under pressure."""
    return Settings(
        num_blocks=rng.randrange(12, 40),
        chunk_size=rng.choice([8, 16, 32, 64]),
        num_slots=rng.choice([8, 20, 60, 400]),
        max_num_batched_tokens=rng.choice([32, 64, 256]),
        max_num_seqs=rng.choice([3, 6, 12]),
        enable_prefix_caching=rng.random() < 0.5,
        async_scheduling=rng.random() < 0.4,
        model_runner_v2=rng.random() < 0.5,
        num_steps=rng.choice([100, 250]),
        arrival_share=rng.choice([0.1, 0.2]),
        abort_share=rng.choice([0.0, 0.02, 0.08]),
        reset_share=rng.choice([0.0, 0.0, 0.004, 0.02]),
        salts=rng.choice([(None,), (None, "tenant")]),
        failed_copy_share=rng.choice([0.0, 0.0, 0.02, 0.2]),
        load_mode=rng.choice(["sync", "async", "auto"]),
        save_mode=rng.choice(["sync", "async"]),
    )


class World:
    """One engine and its clients."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = random.Random(seed)
        self.settings = draw(self._rng)
        self.engine = SimulatedEngine(
            num_blocks=self.settings.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=self.settings.enable_prefix_caching,
            async_scheduling=self.settings.async_scheduling,
            model_runner_v2=self.settings.model_runner_v2,
            chunk_size=self.settings.chunk_size,
            host_bytes=block_bytes(BLOCK_SIZE) * self.settings.num_slots,
            load_mode=self.settings.load_mode,
            save_mode=self.settings.save_mode,
            max_silent_ms=0,
        )
        self._shared_prefix = self._tokens(80)
        self._alive: list[str] = []
        self._num_arrived = 0
        self.aborted: set[str] = set()
        self.max_tokens: dict[str, int] = {}
        self._break_copies()

    @property
    def side(self):  # noqa: ANN201 -- the type would pull the adapter into every reader's way
        """The scheduler's half of the connector."""
        return self.engine.connector.scheduler_side

    def run(self) -> None:
        """Live through all steps, then let everybody finish."""
        for _ in range(self.settings.num_steps):
            self._clients()
            if self.engine.scheduler.has_requests():
                self.engine.step()
            else:
                self.engine.update()
        self.engine.run()
        self.engine.connector.scheduler_side.ledger.commit()

    def events(self) -> Iterator[tuple[int, e.Event]]:
        """The log, decoded."""
        store = self.side.log.store
        decoder = EventDecoder(store.header)
        for frame in store.read():
            yield from enumerate(decoder.decode(frame.payload), frame.first_sequence)

    def _clients(self) -> None:
        rng, settings = self._rng, self.settings
        if rng.random() < settings.arrival_share and len(self._alive) < MAX_ALIVE:
            request_id = f"r{self._num_arrived}"
            self._num_arrived += 1
            prompt = self._shared_prefix[: rng.randrange(70)] + self._tokens(rng.randrange(1, 30))
            self.max_tokens[request_id] = rng.randrange(1, 60)
            self.engine.add(request_id, prompt, self.max_tokens[request_id], cache_salt=rng.choice(settings.salts))
            self._alive.append(request_id)
        if self._alive and rng.random() < settings.abort_share:
            request_id = rng.choice(self._alive)
            self.aborted.add(request_id)
            self.engine.abort(request_id)
        if rng.random() < settings.reset_share:
            # vLLM refuses where blocks are still in use: by a step in flight, a load, a copy out of a finished request.
            with contextlib.suppress(RuntimeError):
                self.engine.scheduler.reset_prefix_cache(
                    reset_running_requests=True, reset_connector=rng.random() < 0.5
                )
        self._alive = [request_id for request_id in self._alive if request_id in self.engine.scheduler.requests]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY_SIZE) for _ in range(count)]

    def _break_copies(self) -> None:
        """Let some copies fail on the worker, as a full or broken host would."""
        if not self.settings.failed_copy_share:
            return
        engine = self.engine.worker._worker_side._engine  # type: ignore[attr-defined]
        rng = random.Random(self.seed + 1)
        # Two holes of vLLM 0.32 itself that no connector can close: with prefix caching a sharer goes on with blocks
        # whose load failed (vllm#49250), and with two steps in flight the second one has read them already.
        loads_may_fail = not self.settings.enable_prefix_caching and not self.settings.async_scheduling
        for name in ("save", "load") if loads_may_fail else ("save",):
            copy = getattr(engine, name)

            def perhaps(*arguments, copy=copy):  # noqa: ANN002, ANN001, ANN202
                if rng.random() < self.settings.failed_copy_share:
                    message = "a copy that this seed breaks"
                    raise RuntimeError(message)
                return copy(*arguments)

            setattr(engine, name, perhaps)
