"""Starts vLLM for a workload, and generates.

vLLM is imported when an engine is started: by then `ENVIRONMENT` has to be in the environment.
"""

from __future__ import annotations

from typing import Any

from kvledger.adapters.demo.workload import Workload

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # the model is too small for two, and threads that wait for one another are slow where
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other processes want the same cores
    "HF_HUB_OFFLINE": "1",  # the model is made here
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process, where it can be watched
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",  # vLLM draws the root of its block hashes from it: equal seeds, equal logs
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
