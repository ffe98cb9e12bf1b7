"""`python -m gpu_check.serve DIRECTORY ANSWER`: workloads in real vLLM, without a connector and with ours."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvledger.adapters.lab.demo.workload import Workload

LONG_RUNS = {"hidden_size": 512, "num_key_value_heads": 4}
"""`LlamaConfig` sizes that make a page of a block of 64 tokens 256 KiB long, which vLLM's batched copy moves."""

MODES = {
    "sync": {"load_mode": "sync", "save_mode": "sync"},
    "async": {"load_mode": "async", "save_mode": "async"},
    "digests": {"load_mode": "async", "save_mode": "async", "digests": "all"},
}
"""Name → keys of the connector's configuration."""


def main(directory: Path, answer: Path) -> None:
    """Write what was seen to `answer`, as JSON: the name of a workload → its figures."""
    from kvledger.adapters.lab.demo.engine import ENVIRONMENT
    from kvledger.adapters.lab.demo.workload import Workload
    from kvledger.adapters.vllm_plugin import register

    os.environ |= {
        **ENVIRONMENT,
        # Else a token computed in another batch differs in its last bits, and the outputs need not be equal.
        "VLLM_BATCH_INVARIANT": "1",
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    register()  # a checkout that is not installed has no plugin for vLLM to find
    figures = {
        "short runs": compare(directory / "short", Workload(), {}),
        "long runs": compare(directory / "long", Workload(num_blocks=16, block_size=64, chunk_size=64), LONG_RUNS),
    }
    answer.write_text(json.dumps(figures))


def compare(directory: Path, workload: Workload, sizes: dict[str, int]) -> dict[str, object]:
    """Serve `workload` without a connector, and with ours in each of `MODES`.

    Args:
        directory: where the model and the logs go.
        workload: requests that do not fit into the KV blocks.
        sizes: `LlamaConfig`'s, other than the demo's.

    Returns:
        figures that JSON can hold.
    """
    from kvledger.adapters.lab.demo.engine import running_engine
    from kvledger.adapters.lab.demo.model import make_model
    from kvledger.adapters.tools.cli.main import main as kvledger

    model = directory / "model"
    make_model(model, **sizes)
    with running_engine(model, workload) as engine:
        expected = engine.generate(workload.prompts(), workload.max_tokens)
        figures: dict[str, object] = {
            "requests": workload.num_requests,
            "tokens computed again, without": engine.counter.num_tokens_recomputed,
        }
    for mode, keys in MODES.items():
        with running_engine(model, workload, directory / mode, **keys) as engine:
            outputs = engine.generate(workload.prompts(), workload.max_tokens)
            figures |= {
                f"outputs equal, {mode}": sum(map(list.__eq__, outputs, expected)),
                f"tokens computed again, {mode}": engine.counter.num_tokens_recomputed,
                f"moved by, {mode}": movers(),
            }
        (log_path,) = (directory / mode).iterdir()
        figures |= {
            f"tokens recovered, {mode}": num_tokens_recovered(log_path),
            f"exit code of verify, {mode}": kvledger(["verify", str(log_path)]),
        }
        print(f"{workload.block_size} tokens a block, {mode}: {figures}", flush=True)
    return figures


def movers() -> list[str]:
    """How the worker of this process moves blocks, by the names of the classes."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()._worker_side
    engines = [engine for engine in (worker._engine, worker._async_engine) if engine is not None]
    return sorted({type(mover).__name__ for engine in engines for mover in engine._movers.values()})


def num_tokens_recovered(log_path: Path) -> int:
    """How many tokens the log says were brought back after a preemption."""
    from kvledger.adapters.figures import Totals
    from kvledger.adapters.tools.logs.log import open_log

    log = open_log(log_path)
    projections = log.core.new_projections(log.configuration)
    totals = Totals(projections)
    for sequence, event in log.trusted_events():
        projections.fold(event, sequence)
    return totals.figures.num_tokens_recovered


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
