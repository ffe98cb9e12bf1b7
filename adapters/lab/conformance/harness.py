"""Runs an engine with the connector under test. `Harness` has the methods that scenarios call. It checks the engine."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.request import Request, RequestStatus

from kvledger.adapters.lab.conformance.obligations import Check, Precondition
from kvledger.adapters.lab.conformance.subject import AbsentWorker, Subject
from kvledger.adapters.lab.simulation.clock import SimulatedClock
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.lab.simulation.expected import Expected
from kvledger.adapters.lab.simulation.hashed_model import CorruptKV
from kvledger.adapters.recorder import KVLedgerRecorder
from kvledger.lifecycle import described, raise_if_unstoppable

MAX_STEPS = 2000
"""Most steps of a run. An engine that is still busy after them counts as stuck."""
STEP_MS = 50
"""Milliseconds of the log's time per step. LIVENESS reports a missing end after a minute, which is 1,200 steps."""
_IDLE_S = 0.001
"""Seconds to wait in a step that computes nothing, for threads in which a connector copies."""
_NUM_EMPTY_STEPS = 30
"""Empty steps after the last request, for pending copies."""


@attrs.frozen
class Failure:
    """A broken rule or a failed check, with the evidence."""

    check: str
    detail: str
    event: int | None = None
    """Sequence number of the event that broke a rule; None if the harness found the failure."""


class RunOver(Exception):
    """Raised to end a run, because the engine died or is still busy after `MAX_STEPS` steps."""


class Harness:
    """Runs one engine. With `asks_twice`, each lookup is repeated, as vLLM repeats it if too few blocks are free."""

    def __init__(
        self, subject: Subject, log_dir: Path, clock: SimulatedClock, *, asks_twice: bool, **settings: Any
    ) -> None:
        self.failures: list[Failure] = []
        self.met: set[Precondition] = set()
        self.remarks: list[str] = []
        self.has_lost = False
        """Whether `lose` was called."""
        self._subject = subject
        self._clock = clock
        self._asks_twice = asks_twice
        self._expected: dict[str, tuple[list[int], int, int]] = {}
        """Request id → (prompt, number of outputs, weights), for requests that must end with all of their outputs."""
        self._was_reset = False
        self._is_over = False
        self.engine = SimulatedEngine(setup=subject, log_dir=str(log_dir), **{"num_blocks": 40, **settings})
        if isinstance(self.engine.workers[0], AbsentWorker):
            self.engine.workers[0].scheduler = self.engine.scheduler
            self.engine.model._check = lambda *_arguments: None  # type: ignore[method-assign] # no byte was moved
        else:
            self.met.add(Precondition.WORKER)
        self._watch(self.engine.scheduler.connector)

    # --- actions of scenarios ---------------------------------------------------------------------

    def add(self, request_id: str, prompt: Sequence[int], num_outputs: int, **options: Any) -> Request:
        """Add a request. If the request is not resumable, `run` compares its outputs with the expected outputs."""
        if not options.get("resumable"):
            self._expected[request_id] = (list(prompt), num_outputs, self.engine.model.weights)
        self.engine.outputs[request_id] = []
        with self.watched():
            return self.engine.add(request_id, prompt, num_outputs, **options)

    def abort(self, request_id: str) -> None:
        """Abort a request. Its outputs are not compared with the expected outputs."""
        self._expected.pop(request_id, None)
        with self.watched():
            self.engine.abort(request_id)

    def step(self, count: int = 1) -> None:
        """Run `count` engine steps, even if they schedule nothing."""
        for _ in range(count):
            self._clock.pass_ms(STEP_MS)
            with self.watched():
                output = self.engine.step()
            if not output.total_num_scheduled_tokens:
                time.sleep(_IDLE_S)

    def run(self) -> None:
        """Step until no request is left, then compare the outputs with the expected outputs."""
        for _ in range(MAX_STEPS):
            if not self.is_busy:
                self._compare()
                return
            if self.engine.scheduler.has_requests():
                self.step()
            else:
                with self.watched():
                    self.engine.update()
        if self.engine.is_stranded:
            self.remarks.append("vLLM can schedule no waiting request (vllm#57841, #45388), so the run was ended early")
        elif not self.engine.scheduler.requests:
            detail = f"no request is left, but after {MAX_STEPS} steps the connector still needs another step"
            self.failures.append(Failure(Check.COMES_TO_REST, detail))
        else:
            left = ", ".join(f"{key} {each.status.name}" for key, each in self.engine.scheduler.requests.items())
            self.failures.append(Failure(Check.ENDS, f"still busy after {MAX_STEPS} steps: {left}"))
        raise RunOver

    @property
    def is_busy(self) -> bool:
        """Whether the engine has requests, or an output to process."""
        return self.engine.scheduler.has_requests() or self.engine.is_computing

    @property
    def waits_for_load(self) -> bool:
        """Whether a request waits for its load."""
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        return any(each.status is waiting for each in self.engine.scheduler.requests.values())

    def settle(self) -> None:
        """Step until no request is left. Then make some empty steps, so that copies in flight can finish."""
        self.run()
        self.step(_NUM_EMPTY_STEPS)

    def forget_locally(self) -> None:
        """Reset vLLM's own cache."""
        self._reset_scheduler(running=False)

    def forget_locally_while_running(self) -> None:
        """Reset vLLM's own cache and preempt all running requests."""
        self._reset_scheduler(running=True)

    def reset(self, *, running: bool = False) -> None:
        """Reset vLLM's and the connector's cache.

        If both caches are reset and the engine is idle, also change the model's weights. All older KV is then wrong.
        """
        answers: list[bool | None] = []
        connector: Any = self.engine.scheduler.connector
        reset_cache = connector.reset_cache

        def keep_answer() -> bool | None:
            answers.append(reset_cache())
            return answers[-1]

        connector.reset_cache = keep_answer
        try:
            is_done = self._reset_scheduler(running, reset_connector=True)
        finally:
            connector.reset_cache = reset_cache
        if is_done and answers == [True] and not running and not self.is_busy:
            self.met.add(Precondition.RESET)
            self._was_reset = True
            for model in self.engine.models:
                model.weights += 1

    def lose(self) -> None:
        """Arrange that right after the next claim, the function `Subject.lose` deletes the connector's KV.

        The function is called once in a run. If `Subject.lose` is None, nothing is deleted.
        """
        connector: Any = self.engine.scheduler.connector
        worker, update_state = self.engine.workers[0], connector.update_state_after_alloc

        def update_and_lose(request: Request, blocks: Any, num_external_tokens: int) -> None:
            update_state(request, blocks, num_external_tokens)
            if num_external_tokens and not self.has_lost and self._subject.lose is not None:
                self.has_lost = True
                self._subject.lose(connector.wrapped, getattr(worker, "wrapped", worker))

        connector.update_state_after_alloc = update_and_lose

    def end(self) -> None:
        """Step until no request is left. Check that all blocks are free, and check it again after some empty steps."""
        self.run()
        self._check_blocks(Check.RESTS, "although the engine has stopped stepping")
        self.step(_NUM_EMPTY_STEPS)
        self.engine.drain()
        self._check_blocks(Check.BLOCKS_RETURNED, f"after {_NUM_EMPTY_STEPS} more steps")

    def shut_down(self) -> None:
        """Shut down both sides of the connector. This completes the log."""
        try:
            self.engine.shutdown()
        except BaseException as error:  # noqa: BLE001 -- whatever it is, it is a failure
            raise_if_unstoppable(error)
            if not self._is_over:  # after another error, this one may be a consequence
                self.failures.append(Failure(Check.SHUTS_DOWN, f"shutdown raised {_located(error)}"))

    def _reset_scheduler(self, running: bool, **options: bool) -> bool:
        """Reset vLLM's cache, and return whether this succeeded.

        With `running`, a RuntimeError of vLLM itself counts as a failed reset.
        """
        with self.watched():
            try:
                return self.engine.scheduler.reset_prefix_cache(running, **options)
            except RuntimeError as error:
                if not running or _is_of_connector(error):
                    raise
                self.remarks.append("vLLM refused to reset its cache: blocks are held for a copy or a load")
                return False

    # --- checks -----------------------------------------------------------------------------------

    def _compare(self) -> None:
        for request_id, (prompt, num_outputs, weights) in self._expected.items():
            found, right = self.engine.outputs[request_id], Expected(prompt, weights).output(num_outputs)
            if found != right:
                first = next((i for i, (a, b) in enumerate(zip(found, right, strict=False)) if a != b), len(found))
                detail = f"{request_id} got {len(found)} of {num_outputs} output tokens, wrong from position {first} on"
                self.failures.append(Failure(Check.KV_RIGHT, detail))
        self._expected.clear()

    def _check_blocks(self, check: Check, when: str) -> None:
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        num_held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if num_held:
            self.failures.append(Failure(check, f"no request is left, but {num_held} blocks are not free {when}"))

    def _watch(self, connector: Any) -> None:
        lookup, build = connector.get_num_new_matched_tokens, connector.build_connector_meta
        sources = connector.get_external_cache_hit_sources

        def lookup_checked(request: Request, num_computed_tokens: int) -> Any:
            answer = lookup(request, num_computed_tokens)
            if not self._asks_twice or answer[0] is None:
                return answer
            again = lookup(request, num_computed_tokens)
            if again != answer:
                detail = (
                    f"two lookups of {request.request_id} with {num_computed_tokens} computed tokens "
                    f"got {answer}, then {again}"
                )
                self.failures.append(Failure(Check.LOOKUP_REPEATED, detail))
            return again

        def build_checked(scheduler_output: Any) -> Any:
            before = _fields(scheduler_output)
            metadata = build(scheduler_output)
            after = _fields(scheduler_output)
            changed = [name for name, value in before.items() if after[name] != value]
            if changed:
                detail = f"the connector changed {', '.join(changed)} of the scheduler's output"
                self.failures.append(Failure(Check.OUTPUT_UNCHANGED, detail))
            return metadata

        def sources_checked(request: Request, num_external_tokens: int) -> Any:
            found = sources(request, num_external_tokens)
            if sum(found.values()) != num_external_tokens:
                detail = (
                    f"{request.request_id}: the hit's sources add up to {sum(found.values())} tokens, "
                    f"not {num_external_tokens}"
                )
                self.failures.append(Failure(Check.HIT_SOURCES, detail))
            return found

        connector.get_num_new_matched_tokens = lookup_checked
        connector.build_connector_meta = build_checked
        connector.get_external_cache_hit_sources = sources_checked

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn any exception inside this context into a failure, and end the run."""
        try:
            yield
        except CorruptKV as error:
            self._is_over = True
            check = Check.RESET_HONOURED if self._was_reset else Check.KV_RIGHT
            self.failures.append(Failure(check, str(error)))
            raise RunOver from error
        except BaseException as error:
            raise_if_unstoppable(error)
            self._is_over = True
            if _is_of_connector(error):
                self.failures.append(Failure("RECORDED", f"a hook raised {_located(error)}"))
            else:
                self.failures.append(Failure(Check.ENGINE_LIVES, f"the engine died of {_located(error)}"))
            raise RunOver from error


def _fields(scheduler_output: Any) -> dict[str, str]:
    """Return name → value as text, for the fields of the output that a connector must not change."""
    left_out = {"new_block_ids_to_zero", "kv_connector_metadata", "kv_connector_block_state"}
    return {name: repr(value) for name, value in vars(scheduler_output).items() if name not in left_out}


def _located(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    kind, _, text = described(error).partition(": ")
    return f"{kind} in {Path(place.filename).name}, {place.name}: {text}".rstrip(": ")


def _is_of_connector(error: BaseException) -> bool:
    """Whether a hook of the connector raised the error. False if the recorder around the connector raised it."""
    frame = error.__traceback__
    while frame is not None:
        caller = frame.tb_frame.f_locals.get("self")
        if isinstance(caller, KVConnectorBase_V1) and not isinstance(caller, KVLedgerRecorder):
            return True
        frame = frame.tb_next
    return False


Play = Callable[[Harness], None]
