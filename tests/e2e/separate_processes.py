"""Generates with the engine core in a process of its own, as vLLM does by default; prints the outputs as JSON.

A script and not a test, because that process starts by importing the main module again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvledger.adapters.lab.demo.engine import generate, start
from kvledger.adapters.lab.demo.workload import Workload, connector

PATIENCE_S = 600.0
"""vLLM kills an engine core that has not ended after 5 s, before its last words where the machine is slow."""


def main() -> None:
    """Read model, folder of logs (or "-"), workload, number of ranks and extra configuration from the command line."""
    model, log_dir, workload, num_ranks, extra_config = (
        sys.argv[1],
        sys.argv[2],
        Workload(**json.loads(sys.argv[3])),
        int(sys.argv[4]),
        {"host_bytes": "64MiB", **json.loads(sys.argv[5])},
    )
    replaced = extra_config.pop("replaced_connector", {})
    engine_arguments = extra_config.pop("engine_arguments", {})
    ours = connector(Path(log_dir), chunk_size=workload.chunk_size, **extra_config) if log_dir != "-" else None
    ours = None if ours is None else {**ours, **replaced}
    more = {"tensor_parallel_size": num_ranks, "gpu_memory_utilization": 0.3} if num_ranks > 1 else {}
    llm = start(model, workload, ours, **more, **engine_arguments)
    outputs = generate(llm, workload.prompts(), workload.max_tokens)
    llm.llm_engine.engine_core.shutdown(timeout=PATIENCE_S)
    print(json.dumps(outputs))


if __name__ == "__main__":
    main()
