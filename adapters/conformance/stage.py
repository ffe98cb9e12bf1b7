"""One engine with the connector that is examined, what is done to it, and what goes wrong while it is.

Where the connector raises, or what it did makes the engine raise, that is noted and the run is over.
"""

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

from kvledger.adapters.conformance.obligations import Check, Met
from kvledger.adapters.conformance.subject import AbsentWorker, Subject
from kvledger.adapters.recorder import KVLedgerRecorder
from kvledger.adapters.simulation.clock import SimulatedClock
from kvledger.adapters.simulation.engine import SimulatedEngine
from kvledger.adapters.simulation.expected import Expected
from kvledger.adapters.simulation.hashed_model import CorruptKV

MAX_STEPS = 2000
"""Of a run; an engine that is busy longer does not come to rest."""
STEP_MS = 50
"""Of the log's time. A minute, after which LIVENESS speaks, is 1,200 steps."""
_IDLE_SECONDS = 0.001
"""In a step that computes nothing: a connector may copy in a thread of its own, which must come to its turn."""
_NUM_EMPTY_STEPS = 30
"""After the last request, for what is still on its way."""


@attrs.frozen
class Broken:
    """A rule or check that does not hold, and how that was seen."""

    check: str
    detail: str
    event: int | None = None
    """In the log, where a rule was broken."""


class RunOver(Exception):
    """Nothing more can be played: the engine is dead, or does not come to rest."""


class Stage:
    """An engine, and hands for a story; `asks_twice`: each lookup is repeated at once, as a full pool would."""

    def __init__(
        self, subject: Subject, log_dir: Path, clock: SimulatedClock, *, asks_twice: bool, **settings: Any
    ) -> None:
        self.broken: list[Broken] = []
        self.met: set[Met] = set()
        self.remarks: list[str] = []
        self.has_lost = False
        """Whether the connector was made to lose what it had offered."""
        self._subject = subject
        self._clock = clock
        self._asks_twice = asks_twice
        self._expected: dict[str, tuple[list[int], int, int]] = {}
        """request id -> prompt, number of outputs, weights; of those that are to end with all of them."""
        self._was_reset = False
        self._is_over = False
        self.engine = SimulatedEngine(setup=subject, log_dir=str(log_dir), **{"num_blocks": 40, **settings})
        if isinstance(self.engine.workers[0], AbsentWorker):
            self.engine.workers[0].scheduler = self.engine.scheduler
            self.engine.model._check = lambda *_arguments: None  # type: ignore[method-assign] # no byte was moved
        else:
            self.met.add(Met.WORKER)
        self._watch(self.engine.scheduler.connector)

    # --- what a story may do ----------------------------------------------------------------------

    def add(self, request_id: str, prompt: Sequence[int], num_outputs: int, **options: Any) -> Request:
        """A request comes; what it must say is known."""
        if not options.get("resumable"):
            self._expected[request_id] = (list(prompt), num_outputs, self.engine.model.weights)
        self.engine.outputs[request_id] = []
        with self.watched():
            return self.engine.add(request_id, prompt, num_outputs, **options)

    def abort(self, request_id: str) -> None:
        """Its client goes away."""
        self._expected.pop(request_id, None)
        with self.watched():
            self.engine.abort(request_id)

    def step(self, count: int = 1) -> None:
        """So many engine steps, empty or not."""
        for _ in range(count):
            self._clock.pass_ms(STEP_MS)
            with self.watched():
                output = self.engine.step()
            if not output.total_num_scheduled_tokens:
                time.sleep(_IDLE_SECONDS)

    def run(self) -> None:
        """Step until there is nobody left, and compare what was said."""
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
            self.remarks.append("vLLM has stranded its queue (vllm#57841, #45388): not judged to the end")
        elif not self.engine.scheduler.requests:
            detail = f"no request is left, and after {MAX_STEPS} steps the engine still has a reason to step again"
            self.broken.append(Broken(Check.COMES_TO_REST, detail))
        else:
            left = ", ".join(f"{key} {each.status.name}" for key, each in self.engine.scheduler.requests.items())
            self.broken.append(Broken(Check.ENDS, f"still busy after {MAX_STEPS} steps: {left}"))
        raise RunOver

    @property
    def is_busy(self) -> bool:
        """Whether the engine has requests, or an output to take up."""
        return self.engine.scheduler.has_requests() or self.engine.is_computing

    @property
    def waits_for_load(self) -> bool:
        """Whether a request waits for its load."""
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        return any(each.status is waiting for each in self.engine.scheduler.requests.values())

    def settle(self) -> None:
        """Let everybody end, and a few empty steps pass, so that what is on its way arrives."""
        self.run()
        self.step(_NUM_EMPTY_STEPS)

    def forget_locally(self) -> None:
        """VLLM's own cache forgets; the connector's does not, and is not told."""
        self._reset_scheduler(running=False)

    def forget_locally_while_running(self) -> None:
        """The same, and everybody who runs is preempted for that."""
        self._reset_scheduler(running=True)

    def reset(self, *, running: bool = False) -> None:
        """Both caches forget. Where nobody runs and all agree, the model has other weights from now on."""
        answers: list[bool | None] = []
        connector: Any = self.engine.scheduler.connector
        reset_cache = connector.reset_cache

        def heard() -> bool | None:
            answers.append(reset_cache())
            return answers[-1]

        connector.reset_cache = heard
        try:
            is_done = self._reset_scheduler(running, reset_connector=True)
        finally:
            connector.reset_cache = reset_cache
        if is_done and answers == [True] and not running and not self.is_busy:
            self.met.add(Met.RESET)
            self._was_reset = True
            for model in self.engine.models:
                model.weights += 1

    def lose(self) -> None:
        """As soon as vLLM takes up what the connector offers, that is lost; not without a function that can do it."""
        connector: Any = self.engine.scheduler.connector
        worker, take_up = self.engine.workers[0], connector.update_state_after_alloc

        def taken_up(request: Request, blocks: Any, num_external_tokens: int) -> None:
            take_up(request, blocks, num_external_tokens)
            if num_external_tokens and not self.has_lost and self._subject.lose is not None:
                self.has_lost = True
                self._subject.lose(connector.wrapped, getattr(worker, "wrapped", worker))

        connector.update_state_after_alloc = taken_up

    def end(self) -> None:
        """The story is told: everybody ends, and nothing is left."""
        self.run()
        self._look_for_blocks(Check.RESTS, "while the engine has no reason to step again")
        self.step(_NUM_EMPTY_STEPS)
        self.engine.drain()
        self._look_for_blocks(Check.BLOCKS_RETURNED, f"after {_NUM_EMPTY_STEPS} more steps")

    def shut_down(self) -> None:
        """Close both sides; the log is complete then."""
        try:
            self.engine.shutdown()
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is reported
            if not self._is_over:  # after another error it may be a consequence
                self.broken.append(Broken(Check.SHUTS_DOWN, f"shutdown raised {_told(error)}"))

    def _reset_scheduler(self, running: bool, **options: bool) -> bool:
        """Whether it is done. Where blocks are held it may be refused, with an error for who asked for it."""
        with self.watched():
            try:
                return self.engine.scheduler.reset_prefix_cache(running, **options)
            except RuntimeError as error:
                if not running or _is_of_connector(error):
                    raise
                self.remarks.append("vLLM refused to reset its cache: blocks are held for a copy or a load")
                return False

    # --- what is looked at --------------------------------------------------------------------------

    def _compare(self) -> None:
        for request_id, (prompt, num_outputs, weights) in self._expected.items():
            said, right = self.engine.outputs[request_id], Expected(prompt, weights).output(num_outputs)
            if said != right:
                first = next((i for i, (a, b) in enumerate(zip(said, right, strict=False)) if a != b), len(said))
                detail = f"{request_id} was told {len(said)} of {num_outputs} tokens, wrong from number {first} on"
                self.broken.append(Broken(Check.KV_RIGHT, detail))
        self._expected.clear()

    def _look_for_blocks(self, check: Check, when: str) -> None:
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        num_held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if num_held:
            self.broken.append(Broken(check, f"{num_held} blocks are not free {when}, and no request is left"))

    def _watch(self, connector: Any) -> None:
        """Stand around the hooks whose calls say more than the log."""
        lookup, build = connector.get_num_new_matched_tokens, connector.build_connector_meta
        sources = connector.get_external_cache_hit_sources

        def looked_up(request: Request, num_computed_tokens: int) -> Any:
            answer = lookup(request, num_computed_tokens)
            if not self._asks_twice or answer[0] is None:
                return answer
            again = lookup(request, num_computed_tokens)
            if again != answer:
                detail = f"{request.request_id}, {num_computed_tokens} tokens computed: first {answer}, then {again}"
                self.broken.append(Broken(Check.LOOKUP_REPEATED, detail))
            return again

        def built(scheduler_output: Any) -> Any:
            before = _fields(scheduler_output)
            metadata = build(scheduler_output)
            after = _fields(scheduler_output)
            changed = [name for name, value in before.items() if after[name] != value]
            if changed:
                self.broken.append(Broken(Check.OUTPUT_UNCHANGED, f"{', '.join(changed)} of the scheduler's output"))
            return metadata

        def counted(request: Request, num_external_tokens: int) -> Any:
            found = sources(request, num_external_tokens)
            if sum(found.values()) != num_external_tokens:
                detail = f"{sum(found.values())} tokens are named of {num_external_tokens} for {request.request_id}"
                self.broken.append(Broken(Check.HIT_SOURCES, detail))
            return found

        connector.get_num_new_matched_tokens = looked_up
        connector.build_connector_meta = built
        connector.get_external_cache_hit_sources = counted

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what is raised, and end the run."""
        try:
            yield
        except CorruptKV as error:
            self._is_over = True
            check = Check.RESET_HONOURED if self._was_reset else Check.KV_RIGHT
            self.broken.append(Broken(check, str(error)))
            raise RunOver from error
        except Exception as error:
            self._is_over = True
            if _is_of_connector(error):
                self.broken.append(Broken("RECORDED", f"a hook raised {_told(error)}"))
            else:
                self.broken.append(Broken(Check.ENGINE_LIVES, f"the engine died of {_told(error)}"))
            raise RunOver from error


def _fields(scheduler_output: Any) -> dict[str, str]:
    """What stands in the output, as text; what a connector may change, and what it builds, are left out."""
    left_out = {"new_block_ids_to_zero", "kv_connector_metadata", "kv_connector_block_state"}
    return {name: repr(value) for name, value in vars(scheduler_output).items() if name not in left_out}


def _told(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(place.filename).name}, {place.name}: {error}".rstrip(": ")


def _is_of_connector(error: Exception) -> bool:
    """Whether a hook of a connector raised, and not who called it."""
    frame = error.__traceback__
    while frame is not None:
        caller = frame.tb_frame.f_locals.get("self")
        if isinstance(caller, KVConnectorBase_V1) and not isinstance(caller, KVLedgerRecorder):
            return True
        frame = frame.tb_next
    return False


Story = Callable[[Stage], None]
