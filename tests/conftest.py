"""What every test relies on: vLLM's environment, one engine at a time, Hypothesis without a stopwatch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from headless_browser import find_browser
from hypothesis import HealthCheck, settings
from nats_server import find_nats_server
from needed import FIND, skip_once
from perfetto_ui import find_ui
from prometheus_server import find_prometheus

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
# Examples differ from run to run, so few in each run are many in a week.
settings.register_profile(
    "kvledger", deadline=None, max_examples=40, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvledger")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of all tests."""
    parser.addoption(
        "--rewrite", action="store_true", help="write the output in tests/transcripts/*.txt and notebooks anew"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep every test that starts an engine on one worker, so that two engines never share the machine's memory."""
    if item.get_closest_marker("vllm"):
        item.add_marker(pytest.mark.xdist_group("vllm"))


@pytest.hookimpl(trylast=True)  # after -m and -k, which might leave out the one test that says why others are skipped
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine has not got."""
    skip_once(config, items)


@pytest.fixture(scope="session")
def cuda() -> Any:
    """A device."""
    return FIND["cuda"][0]()


@pytest.fixture(scope="session")
def nats_server_path() -> str:
    """Where nats-server is."""
    return str(find_nats_server())


@pytest.fixture(scope="session")
def prometheus_path() -> str:
    """Where a Prometheus is."""
    return str(find_prometheus())


@pytest.fixture(scope="session")
def browser_path() -> str:
    """Where a Chromium is."""
    return str(find_browser())


@pytest.fixture(scope="session")
def perfetto_wheel() -> Path:
    """Where the wheel with Perfetto's UI is."""
    return Path(str(find_ui()))


@pytest.fixture(scope="session")
def lmcache() -> Any:
    """That it can be imported."""
    return FIND["lmcache"][0]()
