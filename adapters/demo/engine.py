"""One engine in a process of its own: starts vLLM, serves a workload, tells what it does as it does it.

The demo starts it as `python -m kvledger.adapters.demo.engine JOB FD`: JOB is an `EngineJob` as JSON, FD a pipe that
takes one JSON object a line. What vLLM says goes to stdout and stderr, which the demo keeps in a file.
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

from kvledger.adapters.demo.meter import RecomputationMeter
from kvledger.adapters.demo.model import make_model
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
SECONDS_BETWEEN_REPORTS = 0.2

Tell = Callable[[dict[str, Any]], None]


@attrs.frozen
class EngineJob:
    """What one process is to do."""

    model: str
    kv_transfer_config: dict[str, Any] | None
    workload: Workload

    def to_json(self) -> str:
        """For the command line of the process."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineJob:
        """The job that `to_json` wrote."""
        fields = json.loads(text)
        return cls(fields["model"], fields["kv_transfer_config"], Workload(**fields["workload"]))


def serve(job: EngineJob, tell: Tell) -> None:
    """Make the model if need be, start the engine, generate greedily, and tell the result as the last message."""
    tell({"stage": "model"})
    started = time.monotonic()
    made = make_model(Path(job.model))
    tell({"stage": "engine", "model_made": made, "model_s": time.monotonic() - started})
    started = time.monotonic()
    llm = start(job.model, job.workload, job.kv_transfer_config)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    tell({"stage": "requests", "engine_s": time.monotonic() - started})
    meter = RecomputationMeter()
    meter.watch(scheduler, _reporter(tell, job.workload.num_requests))
    started = time.monotonic()
    outputs = generate(llm, job.workload.prompts(), job.workload.max_tokens)
    duration_s = time.monotonic() - started
    log_path = _log_path(scheduler.connector)
    from kvledger.adapters.vllm.versions import vllm_version  # here, because it brings vLLM in

    tell({"stage": "ending"})
    llm.llm_engine.engine_core.shutdown()
    tell(
        {
            "stage": "result",
            "outputs": outputs,
            "duration_s": duration_s,
            "log_path": log_path,
            "vllm_version": vllm_version(),
            **meter.figures(),
        }
    )


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


def _reporter(tell: Tell, num_requests: int) -> Callable[[RecomputationMeter], None]:
    last = 0.0

    def report(meter: RecomputationMeter) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_REPORTS:
            last = time.monotonic()
            num_done = num_requests - meter.num_unfinished
            tell({"stage": "step", "num_done": num_done, "num_preemptions": meter.num_preemptions})

    return report


def _log_path(connector: Any) -> str | None:  # noqa: ANN401 -- vLLM's or None
    return None if connector is None else str(connector.scheduler_side.log.directory)


def main() -> None:
    """Do the job on the command line."""
    job, descriptor = EngineJob.from_json(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(descriptor, "w", buffering=1) as pipe:
        serve(job, lambda message: print(json.dumps(message), file=pipe))


if __name__ == "__main__":
    main()
