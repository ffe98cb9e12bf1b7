"""Real vLLM with one connector in a process of its own, which serves what it is told and says when which token came.

A process for each contender: their turns do not meet in one interpreter, LMCache needs an environment of its own, and
the CPU time of the process and of all below it (LMCache's server, vLLM's engine core) is the contender's. Whatever ends
on the way, by whatever signal, nothing of it stays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import psutil
from processes import ENDING_WITH_ITS_PARENT, started

from kvledger.adapters.lab.demo.engine import ENVIRONMENT
from kvledger.adapters.lab.demo.recompute_counter import RecomputeCounter
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle.events import LoadIssued

TESTS = Path(__file__).resolve().parents[1]
MODEL_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""A prompt of 2,000 tokens takes one core two seconds; its KV are 47 MiB."""
BLOCK_SIZE = 32
NUM_BLOCKS = 96
ENGINE = {
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_model_len": 2944,
    "enable_prefix_caching": True,
    "scheduling_policy": "priority",
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}


@attrs.frozen
class Contender:
    """A connector, by what it is made of, so that it can be sent to a process."""

    name: str
    kind: str
    """`none`, `kvledger`, `watched` (the same, see `WatchedConnector`), `offloading` or `lmcache`."""
    host_bytes: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    """Of kvledger: further keys; of LMCache: `chunk_size`."""
    has_own_core: bool = False
    """Whether the engine core is in yet another process, as vLLM has it by default; then steps cannot be watched."""


@attrs.frozen
class Ask:
    """A request: it arrives when so many steps have run; a lower priority goes first."""

    prompt: tuple[int, ...]
    max_tokens: int
    arrives_at_step: int = 0
    priority: int = 0


@attrs.frozen
class Token:
    """One token, and when it was there: CPU time and wall time since serving began, in seconds."""

    token_id: int
    cpu_s: float
    wall_s: float


@attrs.frozen
class Served:
    """What became of the requests, in their order, and what all took until nothing was under way any more."""

    tokens: tuple[tuple[Token, ...], ...]
    cpu_s: float
    wall_s: float
    num_preemptions: int
    num_tokens_recomputed: int


COPIES, STEPS = "copies.jsonl", "steps.jsonl"
"""What `WatchedConnector` writes, next to the folder of logs: a line for each load."""


@attrs.frozen
class WatchedLoad:
    """One asynchronous load, of the only request that there is; times are `time.perf_counter_ns` of this machine."""

    begun_ns: int
    ended_ns: int
    steps_ns: tuple[int, ...]
    """When each step was scheduled, from the last load to this one's notice."""
    noticed_ns: int
    """When vLLM had been told."""

    def num_steps(self, *, after_ns: int) -> int:
        """How many steps there were from then on, with the one that was under way then."""
        return 1 + sum(step_ns > after_ns for step_ns in self.steps_ns)


class EngineProcess:
    """The process, seen from outside."""

    def __init__(self, connection: Connection, folder: Path) -> None:
        self._connection = connection
        self.folder = folder
        """kvledger's logs are here, under `log`."""

    def serve(self, asks: Sequence[Ask], *, forgets: bool = False, load_bytes_per_s: float = 0.0) -> Served:
        """Serve these, alone; with `forgets` nothing is left in vLLM's own prefix cache before.

        With `load_bytes_per_s` kvledger's loads are no faster than that.
        """
        self._connection.send((tuple(asks), forgets, load_bytes_per_s))
        answer: Served = self._connection.recv()
        return answer

    def num_loads(self) -> int:
        """Of kvledger, as its log says, so far."""
        logs = (open_log(path) for path in (self.folder / "log").glob("*"))
        return sum(isinstance(event, LoadIssued) for log in logs for _, event in log.events())

    def watched_loads(self) -> list[WatchedLoad]:
        """All so far, of a contender that is `watched`."""
        copies, steps = ((self.folder / name).read_text().splitlines() for name in (COPIES, STEPS))
        return [WatchedLoad(*json.loads(copy), *json.loads(its)) for copy, its in zip(copies, steps, strict=True)]


@contextmanager
def engine_process(contender: Contender, model: Path, python: Path) -> Iterator[EngineProcess]:
    """Start one, and kill all that is left of it at the end; an error has the last words of one that could not."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "said.txt").open("w+b") as said:
        ours, its = Pipe()
        command = [*ENDING_WITH_ITS_PARENT, "INT", python, Path(__file__), str(its.fileno()), model, folder]
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(contender.has_own_core)),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "LMCACHE_TRACK_USAGE": "false",
            "PYTHONPATH": str(TESTS),
        }
        output = {"stdout": said, "stderr": subprocess.STDOUT}
        with started(command, env=environment, pass_fds=[its.fileno()], **output) as process:
            its.close()
            try:
                ours.send(contender)
                ours.recv()
                yield EngineProcess(ours, Path(folder))
                ours.send(None)
                process.wait()
            except (EOFError, ConnectionError) as ended:
                message = f"{contender.name}: {Path(said.name).read_text(errors='replace')[-3000:]}"
                raise RuntimeError(message) from ended


# --- inside of the process ----------------------------------------------------------------------------


def main(connection: Connection, model: str, folder: str) -> None:
    """Serve until told to end."""
    contender: Contender = connection.recv()
    with _transfer(contender, Path(folder)) as transfer, _engine(model, transfer) as llm:
        from benchmarks.slowed_loads import SlowedLoads

        loads = SlowedLoads()
        connection.send("ready")
        while (told := connection.recv()) is not None:
            asks, forgets, loads.bytes_per_s = told
            connection.send(_serve(llm, asks, forgets=forgets))


@contextmanager
def _transfer(contender: Contender, folder: Path) -> Iterator[dict[str, Any] | None]:
    """The `kv_transfer_config`."""
    match contender.kind:
        case "none":
            yield None
        case "kvledger" | "watched":
            from kvledger.adapters.lab.demo.workload import connector

            settings = {"offer": "auto", "host_bytes": contender.host_bytes, **dict(contender.settings)}
            watched = {"kv_connector": "WatchedConnector", "kv_connector_module_path": "benchmarks.watched_connector"}
            yield connector(folder / "log", **settings) | (watched if contender.kind == "watched" else {})
        case "offloading":
            from benchmarks.offloading_on_cpu import connector as offloading_connector

            yield offloading_connector(contender.host_bytes)
        case "lmcache":
            from e2e.lmcache import connector as lmcache_connector
            from e2e.lmcache import running_server, uncompiled

            sys.modules["numba"] = uncompiled()
            chunk_size = dict(contender.settings)["chunk_size"]
            with running_server(chunk_size, contender.host_bytes / 1024**3, folder / "server.txt") as server:
                yield lmcache_connector(server.port)


@contextmanager
def _engine(model: str, transfer: dict[str, Any] | None) -> Iterator[Any]:
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory

    kv_transfer_config = None if transfer is None else KVTransferConfig(**transfer)
    llm = LLM(model=model, kv_transfer_config=kv_transfer_config, **ENGINE)  # type: ignore[arg-type]
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def _serve(llm: Any, asks: Sequence[Ask], *, forgets: bool) -> Served:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if forgets and not llm.reset_prefix_cache():
        message = "something holds blocks, the prefix cache could not be reset"
        raise RuntimeError(message)
    with _watched_scheduler(llm) as counter:
        tokens: list[list[Token]] = [[] for _ in asks]
        cpu_seconds, begun_wall = _cpu_clock(), time.perf_counter()
        waiting = sorted(range(len(asks)), key=lambda number: asks[number].arrives_at_step)
        num_steps = 0
        while waiting or llm.llm_engine.has_unfinished_requests():
            while waiting and asks[waiting[0]].arrives_at_step <= num_steps:
                number = waiting.pop(0)
                ask = asks[number]
                sampling = SamplingParams(
                    max_tokens=ask.max_tokens,
                    temperature=0,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                )
                llm.llm_engine.add_request(
                    str(number), {"prompt_token_ids": list(ask.prompt)}, sampling, priority=ask.priority
                )
            outputs = llm.llm_engine.step()
            num_steps += 1
            cpu_s, wall_s = cpu_seconds(), time.perf_counter() - begun_wall
            for output in outputs:
                said = output.outputs[0].token_ids
                tokens[int(output.request_id)] += [Token(token_id, cpu_s, wall_s) for token_id in said]
    return Served(
        tuple(map(tuple, tokens)),
        cpu_seconds(),
        time.perf_counter() - begun_wall,
        counter.num_preemptions,
        counter.num_tokens_recomputed,
    )


@contextmanager
def _watched_scheduler(llm: Any) -> Iterator[RecomputeCounter]:
    """Counts while the engine serves, and lets it finish its copies; nothing of that where its core is elsewhere."""
    counter = RecomputeCounter()
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        yield counter
        return
    from kvledger.adapters.lab.demo.engine import settle

    unwatched = core.scheduler.schedule
    counter.watch(core.scheduler)
    yield counter
    settle(llm)
    core.scheduler.schedule = unwatched


def _cpu_clock() -> Callable[[], float]:
    """Seconds from now on that this process works, and those that it has started.

    The kernel is asked for their clocks (`clock_getcpuclockid`): looking through all processes of a machine takes 7 ms,
    and this is done in every step.
    """
    clocks = [time.CLOCK_PROCESS_CPUTIME_ID]
    clocks += [~process.pid << 3 | 2 for process in psutil.Process().children(recursive=True)]
    begun_s = sum(map(time.clock_gettime, clocks))
    return lambda: sum(map(time.clock_gettime, clocks)) - begun_s


if __name__ == "__main__":
    from benchmarks import engine_process  # what is sent is of this module, not of `__main__`

    number, *paths = sys.argv[1:]
    with Connection(int(number)) as parent:
        engine_process.main(parent, *paths)
