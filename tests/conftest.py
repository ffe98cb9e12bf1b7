"""What every test relies on: vLLM's environment, one engine at a time, Hypothesis without a stopwatch."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

# Set before anything imports vLLM, which reads most of these once. A value given by the caller wins.
for name, value in {
    "OMP_NUM_THREADS": "1",  # on few cores vLLM's default of all threads is slower by an order of magnitude
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",  # models are made on the spot
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",  # silences a warning after every fork
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in the test's own process, where it can be watched
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}.items():
    os.environ.setdefault(name, value)

# CI runners, xdist and `timeout` end a run with SIGTERM; as after Ctrl-C, tests then kill what they have started.
signal.signal(signal.SIGTERM, signal.default_int_handler)

# Timing never decides a test. A failure prints the line that repeats it.
settings.register_profile("kvledger", deadline=None, print_blob=True)
settings.load_profile("kvledger")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep every test that starts an engine on one worker, so that two engines never share the machine's memory."""
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.xdist_group("vllm"))
