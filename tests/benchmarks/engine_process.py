"""Real vLLM with one connector in a process of its own, which serves what it is told and says when which token came.

A process for each contender: their turns do not meet in one interpreter, LMCache needs an environment of its own, and
the CPU time of the process, and of the server that LMCache copies with, is the contender's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import attrs

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

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
    """`none`, `kvledger`, `offloading` or `lmcache`."""
    host_bytes: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    """Of kvledger: further keys; of LMCache: `chunk_size`."""


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


class EngineProcess:
    """The process, seen from outside."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def serve(self, asks: Sequence[Ask], *, forgets: bool = False) -> Served:
        """Serve these, alone; with `forgets` nothing is left in vLLM's own prefix cache before."""
        self._connection.send((tuple(asks), forgets))
        answer: Served = self._connection.recv()
        return answer


@contextmanager
def engine_process(contender: Contender, model: Path, python: Path) -> Iterator[EngineProcess]:
    """Start one; it has said what went wrong on stderr where it could not."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/socket"
        with Listener(address) as listener:
            command = [str(python), str(Path(__file__)), address, str(model), folder]
            process = subprocess.Popen(command, stdout=sys.stderr)
            try:
                connection = listener.accept()
                connection.send(contender)
                connection.recv()
                yield EngineProcess(connection)
                connection.send(None)
                process.wait(60)
            finally:
                process.kill()
                process.wait()


# --- inside of the process ----------------------------------------------------------------------------


def main(address: str, model: str, folder: str) -> None:
    """Serve until told to end."""
    with Client(address) as connection:
        contender: Contender = connection.recv()
        with _transfer(contender, Path(folder)) as (transfer, helper_seconds), _engine(model, transfer) as llm:
            connection.send("ready")
            while (told := connection.recv()) is not None:
                asks, forgets = told
                connection.send(_serve(llm, asks, helper_seconds, forgets=forgets))


@contextmanager
def _transfer(contender: Contender, folder: Path) -> Iterator[tuple[dict[str, Any] | None, Callable[[], float]]]:
    """The `kv_transfer_config`, and the CPU time of processes that copy for the engine."""
    match contender.kind:
        case "none":
            yield None, float
        case "kvledger":
            from kvledger.adapters.demo.workload import connector

            yield (
                connector(folder / "log", offer="auto", host_bytes=contender.host_bytes, **dict(contender.settings)),
                float,
            )
        case "offloading":
            from benchmarks.offloading_on_cpu import connector as offloading_connector

            yield offloading_connector(contender.host_bytes), float
        case "lmcache":
            from e2e.lmcache import connector as lmcache_connector
            from e2e.lmcache import running_server, uncompiled

            os.environ["LMCACHE_TRACK_USAGE"] = "false"
            sys.modules["numba"] = uncompiled()
            chunk_size = dict(contender.settings)["chunk_size"]
            with running_server(chunk_size, contender.host_bytes / 1024**3, folder / "server.txt") as server:
                yield lmcache_connector(server.port), lambda: _cpu_seconds(server.process.pid)


def _cpu_seconds(pid: int) -> float:
    import psutil

    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


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


def _serve(llm: Any, asks: Sequence[Ask], helper_seconds: Callable[[], float], *, forgets: bool) -> Served:
    from e2e.engines import settle
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from kvledger.adapters.demo.recompute_counter import RecomputeCounter

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if forgets and not llm.reset_prefix_cache():
        message = "something holds blocks, the prefix cache could not be reset"
        raise RuntimeError(message)
    counter = RecomputeCounter()
    unwatched = scheduler.schedule
    counter.watch(scheduler)
    tokens: list[list[Token]] = [[] for _ in asks]
    begun_cpu, begun_wall = time.process_time() + helper_seconds(), time.perf_counter()
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
        cpu_s, wall_s = time.process_time() + helper_seconds() - begun_cpu, time.perf_counter() - begun_wall
        for output in outputs:
            said = output.outputs[0].token_ids
            tokens[int(output.request_id)] += [Token(token_id, cpu_s, wall_s) for token_id in said]
    settle(llm)
    scheduler.schedule = unwatched
    return Served(
        tuple(map(tuple, tokens)),
        time.process_time() + helper_seconds() - begun_cpu,
        time.perf_counter() - begun_wall,
        counter.num_preemptions,
        counter.num_tokens_recomputed,
    )


if __name__ == "__main__":
    from kvledger.adapters.demo.engine import ENVIRONMENT

    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", **ENVIRONMENT}
    from benchmarks import engine_process  # what is sent is of this module, not of `__main__`

    engine_process.main(*sys.argv[1:])
