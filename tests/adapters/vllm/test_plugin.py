"""vLLM knows the connectors by name alone, from the plugin that it loads in each of its processes."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from processes import finished

from kvledger.adapters import vllm_plugin

# As EngineArgs, the engine's process and each worker do it; what was loaded is told for the test to judge.
NAMED = """
import json, sys
from vllm import plugins
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

def found(name, module=None):
    inner = {"connector": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}}
    extra_config = inner if name.startswith("KVLedgerRecorder") else {}
    transfer = KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_module_path=module, kv_connector_extra_config=extra_config
    )
    try:
        return KVConnectorFactory.get_connector_class(transfer).__name__
    except ValueError as error:
        return str(error)

before = set(sys.modules)
for _ in range(2):
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
told = {"loaded": sorted(name for name in set(sys.modules) - before if name.startswith(("kvledger", "structlog")))}
told["short"] = [found(name) for name in ("KVLedgerConnector", "KVLedgerRecorder", "KVLedgerRecorderHMA")]
told["long"] = found("KVLedgerConnector", "kvledger.adapters.vllm")
told["short afterwards"] = found("KVLedgerRecorder")
print(json.dumps(told))
"""


def named(folder: Path, **environment: str) -> dict[str, Any]:
    """What a process of vLLM finds under the names, in a folder that is not the repository."""
    ended = finished([sys.executable, "-c", NAMED], cwd=folder, env={**os.environ, **environment})
    assert ended.returncode == 0, ended.stderr
    assert "kvledger" not in ended.stderr, "nothing to warn of"
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


def test_a_name_is_enough_and_loading_the_plugin_loads_no_connector(tmp_path: Path) -> None:
    """Loaded twice, it says nothing and imports nothing but itself; each name then finds its class."""
    told = named(tmp_path)
    assert told["loaded"] == ["kvledger", "kvledger.adapters", "kvledger.adapters.vllm_plugin"]
    assert told["short"] == ["KVLedgerConnector", "KVLedgerRecorder", "KVLedgerRecorderHMA"]
    assert told["long"] == "KVLedgerConnector"


def test_where_vllm_leaves_the_plugin_out_the_module_path_finds_the_connector(tmp_path: Path) -> None:
    """From then on the other names are known, too, which `MultiConnector` needs."""
    told = named(tmp_path, VLLM_PLUGINS="")
    assert told["loaded"] == []
    assert told["short"][0] == "Unsupported connector type: KVLedgerConnector"
    assert told["long"] == "KVLedgerConnector"
    assert told["short afterwards"] == "KVLedgerRecorder"


def test_the_plugin_says_what_it_cannot_do_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a vLLM that has its factory elsewhere: one warning with the reason and both remedies."""
    (plugin,) = entry_points(group="vllm.general_plugins", name="kvledger")
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    plugin.load()()
    (warning,) = (record.getMessage() for record in caplog.records)
    for part in ("kvledger", "ModuleNotFoundError", "kv_connector_module_path", "VLLM_PLUGINS"):
        assert part in warning


def test_every_name_is_that_of_a_class_in_its_module() -> None:
    """What is registered is only looked up when somebody names it."""
    for name, module in vllm_plugin.CONNECTORS.items():
        assert getattr(__import__(module, fromlist=[name]), name).__name__ == name
