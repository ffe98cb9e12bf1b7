"""Starts vLLM for a workload, and generates its outputs.

vLLM is imported when an engine starts. Before that, set the variables of `ENVIRONMENT` in the environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from kvledger.adapters.lab.demo.recompute_counter import RecomputeCounter
from kvledger.adapters.lab.demo.workload import Workload, connector

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # the model is too small for two, and threads that wait for each other are slow
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # if other processes use the same cores
    "HF_HUB_OFFLINE": "1",  # the model is created locally
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process, where it can be watched
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",  # vLLM derives the root of its block hashes from it: equal seeds, equal logs
}


def start(model: str, workload: Workload, kv_transfer_config: dict[str, Any] | None, **more: Any) -> Any:
    """Return a `vllm.LLM` with the workload's sizes. `more` has further arguments of `vllm.LLM`."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None if kv_transfer_config is None else KVTransferConfig(**kv_transfer_config)
    return LLM(model=model, kv_transfer_config=transfer, **workload.engine_arguments(), **more)


def sampling(max_tokens: int) -> Any:
    """Return greedy sampling parameters for exactly `max_tokens` tokens."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)


def request_outputs(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int, **prompt_fields: Any) -> list[Any]:
    """Return one `RequestOutput` of vLLM per prompt."""
    requests = [{"prompt_token_ids": list(prompt), **prompt_fields} for prompt in prompts]
    outputs: list[Any] = llm.generate(requests, sampling(max_tokens), use_tqdm=False)
    return outputs


def settle(llm: Any) -> None:
    """Step until no copy is in flight. vLLM's front end stops at the last output, even if copies are in flight."""
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(100_000):
        if not core.scheduler.has_requests() and not core.batch_queue:
            return
        core.step_fn()
    message = "copies are still in flight"
    raise RuntimeError(message)


def generate(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int, **prompt_fields: Any) -> list[list[int]]:
    """Return the output token ids, one list per prompt."""
    outputs = request_outputs(llm, prompts, max_tokens, **prompt_fields)
    return [list(output.outputs[0].token_ids) for output in outputs]


@attrs.frozen
class RunningEngine:
    """A vLLM engine in this process, with a counter on its scheduler."""

    llm: Any
    counter: RecomputeCounter
    log_path: Path | None

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, **prompt_fields: Any) -> list[list[int]]:
        """Generate as the function `generate` does, then step until the last request's saves are done."""
        outputs = generate(self.llm, prompts, max_tokens, **prompt_fields)
        settle(self.llm)
        return outputs


@contextmanager
def running_engine(
    model: Path, workload: Workload, log_dir: Path | None = None, *, policy: str = "recompute", **extra_config: Any
) -> Iterator[RunningEngine]:
    """Yield an engine with kvledger's connector, which writes a log below `log_dir`.

    If `log_dir` is None, the engine has no connector. `policy` is vLLM's `kv_load_failure_policy`.
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    transfer = None
    if log_dir is not None:
        extra_config = {"chunk_size": workload.chunk_size, "host_bytes": "64MiB", **extra_config}
        transfer = {**connector(log_dir, **extra_config), "kv_load_failure_policy": policy}
    llm = start(str(model), workload, transfer)
    core = llm.llm_engine.engine_core.engine_core
    try:
        counter = RecomputeCounter()
        counter.watch(core.scheduler)
        log_path = None if log_dir is None else core.scheduler.connector.scheduler_side.log.directory
        yield RunningEngine(llm, counter, log_path)
    finally:
        llm.llm_engine.engine_core.shutdown()  # not core.shutdown(): vLLM repeats that when it collects the engine
        cleanup_dist_env_and_memory()
