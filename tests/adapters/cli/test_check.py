"""`kvledger check`: what a configuration would do is said before an engine starts, and is what the engine then does."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.adapters.cli.main import main
from kvledger.adapters.demo.model import make_model
from kvledger.storage.kv import most_memory

pytestmark = pytest.mark.xdist_group("check")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's, without its weights: 2 layers, 2 heads of 32 numbers."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_model(directory)
    (directory / "model.safetensors").unlink()
    return directory


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; returns its exit code and the records, by type."""

    def checked(configuration: object, *options: str | Path) -> tuple[int, dict[str, dict[str, Any]]]:
        given = configuration if isinstance(configuration, str) else json.dumps(configuration)
        exit_code = main(["check", given, "--json", *map(str, options)])
        said = capsys.readouterr()
        assert not said.err, said.err
        return exit_code, {record["type"]: record for record in map(json.loads, said.out.splitlines())}

    return checked


def transfer(name: str = "KVLedgerConnector", **extra_config: Any) -> dict[str, Any]:
    """The object of --kv-transfer-config."""
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra_config}


@pytest.mark.parametrize(("num_ranks", "bytes_a_token"), [(1, 2 * 2 * 2 * 32 * 2), (2, 2 * 2 * 1 * 32 * 2)])
def test_slots_tokens_and_bytes_of_a_model_without_its_weights(
    check: Any, model: Path, num_ranks: int, bytes_a_token: int
) -> None:
    """K and V, layers, heads of one rank, head size, bytes of a number; the pool is divided among ranks."""
    options = ("--model", model, "--block-size", "32", "--dtype", "bfloat16", "--tensor-parallel-size", str(num_ranks))
    exit_code, records = check(transfer(host_bytes="64MiB"), *options)
    assert exit_code == 0
    plan = records["plan"]
    assert plan["declined"] == []
    assert plan["bytes_a_token"] == bytes_a_token
    assert plan["bytes_a_rank"] == 64 * 1024**2 // num_ranks == plan["num_tokens"] * bytes_a_token
    assert plan["num_slots"] == plan["num_tokens"] // 32
    assert plan["num_ranks"] == num_ranks


def test_a_model_s_own_figures_are_said_for_people(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """With every default; an eighth of the memory."""
    assert main(["check", "{}", "--model", str(model), "--block-size", "32"]) == 0
    said = capsys.readouterr().out
    assert "KVLedgerConnector" in said
    assert f"{(most_memory() or 0) // 8 / 1024**3:.1f} GiB" in said
    assert "32 tokens, in 1 group of layers that see: all" in said
    assert "chunks      64 tokens" in said


def test_what_does_not_fit_the_model_is_refused_with_the_figures(check: Any, model: Path) -> None:
    """As vLLM's start refuses it, which has the configuration as well."""
    exit_code, records = check(transfer(chunk_size=24), "--model", model, "--block-size", "32")
    assert exit_code == 77
    assert records["refused"]["reason"].startswith("chunk_size 24 and block_size 32")


@pytest.mark.parametrize(
    ("configuration", "reason"),
    [
        ({"chunksize": 64}, "chunksize: 64: unknown key; did you mean chunk_size?"),
        (transfer(host_bytes="much"), "host_bytes: 'much'"),
        (transfer(handlers=["no_such:Thing"]), "'no_such:Thing' cannot be imported"),
        (transfer(log_dir="/dev/null/logs"), "log_dir: cannot write to /dev/null/logs"),
        ({**transfer(), "host_bytes": 1}, "host_bytes: 1: a key of kvledger's; write it in kv_connector_extra_config"),
        ({**transfer(), "kv_rol": 1}, "kv_rol: 1: unknown key; did you mean kv_role?"),
        ({**transfer(), "kv_role": "both"}, "vLLM refuses it"),
        (transfer("KVLedgerConector"), "did you mean KVLedgerConnector?"),
        (transfer("OffloadingConnector"), "unknown connector of kvledger"),
        (transfer("KVLedgerRecorder"), "names no connector to record"),
        (transfer("KVLedgerRecorder", connector={"kv_connector": "Nobody", "kv_role": "kv_both"}), "finds no 'Nobody'"),
        (
            transfer("KVLedgerRecorderHMA", connector={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}),
            "name KVLedgerRecorder around it",
        ),
    ],
)
def test_what_would_be_refused_is_named_with_the_reason(check: Any, configuration: Any, reason: str) -> None:
    """Wherever it stands in the object."""
    exit_code, records = check(configuration)
    assert exit_code == 77
    assert reason in records["refused"]["reason"]


@pytest.mark.parametrize(
    "configuration",
    [
        transfer(log_dir=None, chunk_size=32),
        {"log_dir": None, "chunk_size": 32},
        transfer("MultiConnector", connectors=[transfer("ExampleConnector"), transfer(log_dir=None, chunk_size=32)]),
    ],
)
def test_the_object_its_inner_part_and_a_child_of_others_are_taken_alike(check: Any, configuration: Any) -> None:
    """What every key comes to is said."""
    exit_code, records = check(configuration)
    assert exit_code == 0
    assert records["settings"]["kv_connector"] == "KVLedgerConnector"
    every = records["settings"]["kv_connector_extra_config"]
    assert (every["log_dir"], every["chunk_size"], every["save_interval_tokens"]) == (None, 32, None)


def test_a_recorder_s_object_is_taken_too(check: Any) -> None:
    """What is in it is looked up."""
    exit_code, records = check({"connector": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}})
    assert exit_code == 0
    assert records["settings"]["kv_connector"] == "KVLedgerRecorder"
    assert "records ExampleConnector" in records["note"]["text"]


def test_a_file_and_stdin_are_read(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is too long for a shell."""
    (tmp_path / "transfer.json").write_text(json.dumps(transfer(chunk_size=32)))
    assert check(str(tmp_path / "transfer.json"))[1]["settings"]["kv_connector_extra_config"]["chunk_size"] == 32
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(transfer(chunk_size=16))))
    assert check("-")[1]["settings"]["kv_connector_extra_config"]["chunk_size"] == 16


@pytest.mark.parametrize(
    ("given", "words"),
    [("{'a': 1}", "no JSON"), ("[]", "neither"), ("nowhere.json", "neither a JSON object nor a file")],
)
def test_what_is_no_object_is_wrong_usage(capsys: pytest.CaptureFixture[str], given: str, words: str) -> None:
    """With what was read."""
    assert main(["check", given]) == 64
    assert words in capsys.readouterr().err
