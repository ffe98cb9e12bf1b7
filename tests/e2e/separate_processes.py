"""Generates with the engine core in a process of its own, as vLLM does by default; prints the outputs as JSON.

A script and not a test, because that process starts by importing the main module again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvledger.adapters.demo.engine import generate, start
from kvledger.adapters.demo.workload import Workload, connector


def main() -> None:
    """Read model, folder of logs and workload from the command line."""
    model, log_dir, workload = sys.argv[1], Path(sys.argv[2]), Workload(**json.loads(sys.argv[3]))
    llm = start(model, workload, connector(log_dir, chunk_size=workload.chunk_size, host_bytes="64MiB"))
    outputs = generate(llm, workload.prompts(), workload.max_tokens)
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps(outputs))


if __name__ == "__main__":
    main()
