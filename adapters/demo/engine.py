"""One engine in a process of its own: starts vLLM, serves a workload, reports its progress.

The demo starts it as `python -m kvledger.adapters.demo.engine JOB FD`: JOB is an `EngineJob` as JSON, FD a pipe that
takes a JSON string for each report, and at the end one object, the result. What vLLM prints, the demo keeps in a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import msgspec

from kvledger.adapters.demo.model import make_model
from kvledger.adapters.demo.recompute_counter import RecomputeCounter
from kvledger.adapters.demo.workload import Workload

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # the model is too small for two, and threads that wait for one another are slow where
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other processes want the same cores
    "HF_HUB_OFFLINE": "1",  # the model is made here
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process, where the meter can watch it
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",  # vLLM draws the root of its block hashes from it: equal seeds, equal logs
}
SECONDS_BETWEEN_REPORTS = 0.5


@attrs.frozen
class EngineJob:
    """What one process is to do."""

    model: str
    kv_transfer_config: dict[str, Any] | None
    workload: Workload


def serve(job: EngineJob, report: Callable[[str], None]) -> dict[str, Any]:
    """Make the model if need be, start the engine, generate greedily; returns the result."""
    from kvledger.adapters.vllm.versions import vllm_version  # here, because it brings vLLM in

    started = time.monotonic()
    made = make_model(Path(job.model))
    report(f"model {'made' if made else 'found'} ({time.monotonic() - started:.1f} s)")
    started = time.monotonic()
    llm = start(job.model, job.workload, job.kv_transfer_config)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    report(f"engine started ({time.monotonic() - started:.1f} s)")
    counter = RecomputeCounter()
    counter.watch(scheduler, _reporting(report, job.workload.num_requests))
    started = time.monotonic()
    outputs = generate(llm, job.workload.prompts(), job.workload.max_tokens)
    duration_s = time.monotonic() - started
    log_path = None if scheduler.connector is None else str(scheduler.connector.scheduler_side.log.directory)
    report(f"{job.workload.num_requests} requests done, {counter.num_preemptions} preemptions ({duration_s:.1f} s)")
    llm.llm_engine.engine_core.shutdown()
    return {
        "outputs": outputs,
        "duration_s": duration_s,
        "log_path": log_path,
        "vllm_version": vllm_version(),
        **counter.figures(),
    }


def start(model: str, workload: Workload, kv_transfer_config: dict[str, Any] | None, **more: Any) -> Any:  # noqa: ANN401 -- vllm.LLM, imported late
    """A `vllm.LLM` with the workload's sizes, and whatever `more` arguments of it."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None if kv_transfer_config is None else KVTransferConfig(**kv_transfer_config)
    return LLM(model=model, kv_transfer_config=transfer, **workload.engine_arguments(), **more)


def generate(llm: Any, prompts: list[list[int]], max_tokens: int, **prompt_fields: Any) -> list[list[int]]:  # noqa: ANN401 -- see `start`
    """Greedy output token ids, one list per prompt, none shorter than `max_tokens`."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt, **prompt_fields} for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(requests, sampling, use_tqdm=False)]


def _reporting(report: Callable[[str], None], num_requests: int) -> Callable[[RecomputeCounter], None]:
    last, last_text = 0.0, ""

    def after_step(counter: RecomputeCounter) -> None:
        nonlocal last, last_text
        num_done = num_requests - counter.num_unfinished
        text = f"{num_done} of {num_requests} requests done, preemptions so far: {counter.num_preemptions}"
        if text != last_text and time.monotonic() - last >= SECONDS_BETWEEN_REPORTS:
            last, last_text = time.monotonic(), text
            report(text)

    return after_step


def main() -> None:
    """Do the job on the command line."""
    job = msgspec.json.decode(sys.argv[1], type=EngineJob)
    with os.fdopen(int(sys.argv[2]), "w", buffering=1) as pipe:
        print(json.dumps(serve(job, lambda text: print(json.dumps(text), file=pipe))), file=pipe)


if __name__ == "__main__":
    main()
