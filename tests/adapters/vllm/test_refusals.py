"""What is refused of a configuration: by the connector or the recorder when vLLM creates it, and by `kvledger check`.

Looking the class up refuses nothing: vLLM does that when it puts its own configuration together, and does not say for
which one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvledger.adapters import vllm_plugin
from kvledger.adapters.lab.simulation.engine import kv_cache_config, vllm_config
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.vllm import versions
from kvledger.lifecycle import ConfigurationError

pytestmark = [pytest.mark.scheduler, pytest.mark.xdist_group("check")]

BLOCK_SIZE = 32
"""Tokens; vLLM's attention on CPU takes multiples of it."""


def transfer(name: str, **extra_config: Any) -> dict[str, Any]:
    """The object of --kv-transfer-config."""
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra_config}


def ours(**extra_config: Any) -> dict[str, Any]:
    """That of kvledger's connector."""
    return transfer("KVLedgerConnector", **extra_config)


def recorder(connector: dict[str, Any], *, name: str = "KVLedgerRecorder", **extra_config: Any) -> dict[str, Any]:
    """That of a recorder around a connector."""
    return transfer(name, connector=connector, **extra_config)


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    """That of a `MultiConnector`."""
    return transfer("MultiConnector", connectors=list(connectors))


OFFLOADING = transfer("OffloadingConnector", cpu_bytes_to_use=1 << 20)
EXAMPLE = transfer("ExampleConnector")


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], model: Path) -> Callable[..., str]:
    """Runs the command with the model; returns what it refuses, as an error says it, empty if it refuses nothing."""

    def refused(configuration: dict[str, Any], *options: str) -> str:
        given = ["check", json.dumps(configuration), "--json", "--model", str(model), "--block-size", str(BLOCK_SIZE)]
        exit_code = main([*given, *options])
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        found = [record for record in records if record["type"] == "refused"]
        assert exit_code == (77 if found else 0)
        return "\n".join(f"{each['key']}: {each['value']!r}: {each['reason']}; {each['remedy']}" for each in found)

    return refused


def configured(configuration: dict[str, Any], **of_parallel_config: Any) -> Any:
    """VLLM's whole configuration with it; vLLM looks the connector's class up for that."""
    vllm_plugin.register()
    whole = vllm_config(num_blocks=20, block_size=BLOCK_SIZE, kv_transfer=configuration)
    for name, value in of_parallel_config.items():
        setattr(whole.parallel_config, name, value)
    return whole


def create(whole: Any) -> None:
    """Create both sides as an engine does: the worker's, and then the scheduler's."""
    with contextlib.ExitStack() as stack:
        for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
            connector: Any = KVConnectorFactory.create_connector(whole, role, kv_cache_config(20, BLOCK_SIZE))
            stack.callback(connector.shutdown)


@attrs.frozen
class Refused:
    """A configuration, and a part of what is said when it is refused."""

    configuration: dict[str, Any]
    reason: str
    options: tuple[str, ...] = ()
    """Of the command."""
    parallel: Mapping[str, Any] = MappingProxyType({})
    """What vLLM's parallel configuration is in an engine that is started with these options."""


CASES = {
    "unknown key": Refused(ours(chunksize=64), "chunksize: 64: unknown key; did you mean chunk_size?"),
    "by its module": Refused(
        {**ours(chunksize=64), "kv_connector_module_path": "kvledger.adapters.vllm"}, "did you mean chunk_size?"
    ),
    "value": Refused(ours(load_mode="later"), "load_mode: 'later': "),
    "handler": Refused(ours(handlers=["no_such_module:Class"]), "'no_such_module:Class': cannot be imported"),
    "extension": Refused(ours(extensions=["no_such_module:Class"]), "'no_such_module:Class': cannot be imported"),
    "extension's setting": Refused(ours(extension_settings={"nobody": {"key": 1}}), "nobody"),
    "log_dir": Refused(ours(log_dir="/dev/null/logs"), "log_dir: '/dev/null/logs': /dev/null is a file; name a"),
    "chunk_size": Refused(
        ours(log_dir=None, chunk_size=24), "chunk_size: 24: is neither a multiple nor a divisor of block_size 32"
    ),
    "interval": Refused(ours(save_interval_tokens=48), "save_interval_tokens: 48: is less than a chunk of 64 tokens"),
    "memory": Refused(ours(host_bytes="2TiB"), "host_bytes: '2TiB': asks for 2048.0 GiB, but "),
    "too small a pool": Refused(ours(host_bytes="1KiB"), "host_bytes: '1KiB': gives "),
    "size of one log": Refused(
        ours(max_log_bytes="64MiB"), "is too small: a log needs 3 segments of 64MiB to be readable"
    ),
    "pipeline": Refused(
        ours(),
        "pipeline_parallel_size: 2: KVLedgerConnector supports only 1",
        ("-pp", "2"),
        {"pipeline_parallel_size": 2},
    ),
    "decode context": Refused(
        ours(),
        "decode_context_parallel_size: 2: KVLedgerConnector supports only 1",
        ("-dcp", "2"),
        {"decode_context_parallel_size": 2},
    ),
    "prefill context": Refused(
        ours(),
        "prefill_context_parallel_size: 2: KVLedgerConnector supports only 1",
        ("-pcp", "2"),
        {"prefill_context_parallel_size": 2},
    ),
    "logs of several engines": Refused(
        ours(max_log_bytes="300MiB"),
        "max_log_bytes: '300MiB': is too small: this server writes 2 logs at once",
        ("-dp", "2"),
        {"data_parallel_size_local": 2},
    ),
    "logs of several engines that are told that they are alone": Refused(
        ours(max_log_bytes="300MiB"),
        "max_log_bytes: '300MiB': is too small: this server writes 2 logs at once",
        ("-dp", "2"),
        {"data_parallel_rank_local": 1},
    ),
    "child": Refused(
        several(OFFLOADING, ours(log_dir=None, chunk_size=24)), "chunk_size: 24: is neither a multiple nor a divisor"
    ),
    "no connector to record": Refused(transfer("KVLedgerRecorder"), "names no connector to record; write"),
    "unknown connector": Refused(recorder(transfer("Nobody")), "connector.kv_connector: 'Nobody': unknown connector"),
    "module": Refused(
        recorder({**transfer("Theirs"), "kv_connector_module_path": "no_such_module"}),
        "connector.kv_connector: 'Theirs': vLLM cannot load it (ModuleNotFoundError",
    ),
    "no connector at all": Refused(
        recorder({**transfer("Path"), "kv_connector_module_path": "pathlib"}), "connector.kv_connector: 'Path': "
    ),
    "recorder's key": Refused(recorder(EXAMPLE, logdir="x"), "logdir: 'x': unknown key; did you mean log_dir?"),
    "recorder's log_dir": Refused(recorder(EXAMPLE, log_dir="/dev/null/logs"), "/dev/null is a file"),
    "logs of the workers": Refused(
        recorder(OFFLOADING, max_log_bytes="300MiB"),
        "max_log_bytes: '300MiB': is too small: this server writes 2 logs at once",
    ),
    "hybrid memory": Refused(
        recorder(EXAMPLE, name="KVLedgerRecorderHMA"),
        "connector.kv_connector: 'ExampleConnector': it does not support vLLM's hybrid memory; "
        "wrap it in KVLedgerRecorder",
    ),
    "recorded": Refused(
        recorder(ours(log_dir=None, chunk_size=24), log_dir=None), "chunk_size: 24: is neither a multiple nor"
    ),
    "recorded child": Refused(
        several(OFFLOADING, recorder(ours(chunksize=24), log_dir=None)), "chunksize: 24: unknown"
    ),
    "child that is recorded with its parent": Refused(
        recorder(several(OFFLOADING, ours(log_dir=None, chunk_size=24)), log_dir=None),
        "chunk_size: 24: is neither a multiple nor a divisor",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_what_cannot_work_is_refused_when_vllm_creates_the_connector(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: Refused
) -> None:
    """One message says so, and names the command that says it before weights are loaded; so does the exception."""
    monkeypatch.chdir(tmp_path)
    whole = configured(case.configuration, **case.parallel)
    with pytest.raises(ConfigurationError) as caught:
        create(whole)
    assert case.reason in str(caught.value)
    (said,) = (
        record.getMessage() for record in caplog.records if record.name == "vllm.kvledger" and record.levelno >= 40
    )
    assert said.startswith(f"kvledger: {caught.value}\n")
    assert said.count("kvledger check") == 1
    assert [note.count("kvledger check") for note in caught.value.__notes__] == [1]


@pytest.mark.vllm  # it asks vLLM for the platform's whole configuration
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_what_cannot_work_is_refused_by_the_command(check: Callable[..., str], case: Refused) -> None:
    """In the words of the connector."""
    assert case.reason in check(case.configuration, *case.options)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "configuration",
    [
        ours(log_dir=None),
        several(OFFLOADING, ours(log_dir=None)),
        recorder(OFFLOADING, log_dir=None),
        recorder(ours(log_dir=None), log_dir=None),
        recorder(several(OFFLOADING, ours(log_dir=None)), name="KVLedgerRecorderHMA", log_dir=None),
    ],
)
def test_what_works_is_refused_by_neither(check: Callable[..., str], configuration: dict[str, Any]) -> None:
    """The same shapes as above."""
    assert check(configuration) == ""


def test_logs_that_are_written_on_other_machines_are_not_counted() -> None:
    """Ray may place engines and workers anywhere."""
    whole = configured(ours(), data_parallel_size_local=2)
    assert versions.least_num_logs(whole) == 2
    assert versions.least_num_logs(whole, workers_log=True) == 4
    whole.parallel_config.data_parallel_backend = "ray"
    assert versions.least_num_logs(whole, workers_log=True) == 1
    whole.parallel_config.data_parallel_backend = "mp"
    whole.parallel_config.distributed_executor_backend = "ray"
    assert versions.least_num_logs(whole, workers_log=True) == 1
