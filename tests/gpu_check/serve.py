"""`python -m gpu_check.serve DIRECTORY ANSWER`: one workload in real vLLM, without a connector and with ours."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(directory: Path, answer: Path) -> None:
    """Write what was seen to `answer`, as JSON."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from kvledger.adapters.lab.demo.engine import ENVIRONMENT, running_engine
    from kvledger.adapters.lab.demo.model import make_model
    from kvledger.adapters.lab.demo.workload import Workload
    from kvledger.adapters.tools.logs.log import open_log
    from kvledger.adapters.totals import Totals

    os.environ |= {**ENVIRONMENT, **os.environ}
    workload, model = Workload(), directory / "model"
    make_model(model)
    with running_engine(model, workload) as engine:
        expected, plain = engine.generate(workload.prompts(), workload.max_tokens), engine.counter
    modes: dict[str, object] = {}
    is_equal, num_recovered = True, 0
    for mode in ("sync", "async"):
        with running_engine(model, workload, directory / mode, load_mode=mode, save_mode=mode) as engine:
            outputs, ours = engine.generate(workload.prompts(), workload.max_tokens), engine.counter
        (log_path,) = (directory / mode).iterdir()
        log = open_log(log_path)
        projections = log.core.new_projections(log.configuration)
        totals = Totals(projections)
        for sequence, event in log.trusted_events():
            projections.fold(event, sequence)
        num_recovered += totals.figures.num_tokens_recovered
        is_equal = is_equal and outputs == expected
        modes[f"tokens computed again, {mode}"] = ours.num_tokens_recomputed
    figures = {
        "requests": workload.num_requests,
        "outputs equal": is_equal,
        "tokens recovered": num_recovered,
        "tokens computed again, without": plain.num_tokens_recomputed,
        **modes,
    }
    answer.write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
