"""`kvledger check`: what a configuration would do is said before an engine starts, and is what the engine then does."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from log_torture.mounts import fill, run_on_small_disk

from kvledger.adapters.tools.cli.main import main
from kvledger.storage.kv import most_memory

pytestmark = pytest.mark.xdist_group("check")


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
    assert plan["bytes_a_pool"] == 64 * 1024**2 // num_ranks == plan["num_tokens"] * bytes_a_token
    assert plan["num_slots"] == plan["num_tokens"] // 32
    assert plan["num_ranks"] == num_ranks


def test_a_model_s_own_figures_are_said_for_people(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """With every default; an eighth of the memory."""
    assert main(["check", "{}", "--model", str(model), "--block-size", "32"]) == 0
    said = capsys.readouterr().out
    assert "KVLedgerConnector" in said
    assert f"{(most_memory() or 0) // 8 / 1024**3:.1f} GiB" in said
    assert "32 tokens each, in 1 group of layers; tokens that a group reads: all" in said
    assert "chunks      64 tokens" in said


def written(tmp_path: Path, architecture: str, model_type: str, **sizes: Any) -> Path:
    """The config.json of a small model of a kind."""
    configuration = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 128),
        "max_position_embeddings": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    return tmp_path


def latent_model(directory: Path, **more: Any) -> Path:
    """DeepSeek's: compressed KV and a rotary part for all heads."""
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64}
    sizes = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "q_lora_rank": None, "topk_method": "greedy"}
    grouped = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_key_value_heads": 4}
    return written(directory, "DeepseekV2ForCausalLM", "deepseek_v2", **latent, **experts, **sizes, **grouped, **more)


def leave_chunked_prefill_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a platform whose latent attention reads prefixes."""
    from vllm.platforms.cpu import CpuPlatform

    switch_off = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def leave_on(platform: Any, vllm_config: Any) -> None:
        switch_off(platform, vllm_config)
        vllm_config.scheduler_config.enable_chunked_prefill = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(leave_on))


def test_latent_attention_is_counted_once_a_token(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16; every rank has all of it."""
    leave_chunked_prefill_on(monkeypatch)
    model = latent_model(tmp_path)
    for num_ranks in (1, 2):
        exit_code, records = check(transfer(host_bytes="64MiB"), "--model", model, "-tp", str(num_ranks))
        assert exit_code == 0
        assert "the size of blocks that vLLM chooses on this machine (cpu)" in records["note"]["text"]
        plan = records["plan"]
        assert (plan["declined"], plan["num_groups"], plan["num_pools"]) == ([], 1, 1)
        assert plan["bytes_a_token"] == 3 * (512 + 64) * 2
        assert plan["num_tokens"] * plan["bytes_a_token"] == pytest.approx(64 * 1024**2, rel=0.01)


@pytest.mark.skipif("amx_tile" in Path("/proc/cpuinfo").read_text(), reason="vLLM lets a CPU with AMX cut prefills")
def test_latent_attention_without_chunked_prefill_is_declined(check: Any, tmp_path: Path) -> None:
    """A CPU without AMX computed other tokens behind a hit, and the command said that an engine would serve it."""
    exit_code, records = check(transfer(), "--model", latent_model(tmp_path))
    assert exit_code == 0
    (reason,) = records["plan"]["declined"]
    assert reason == (
        "with the attention backend CPU_MLA vLLM turns chunked prefill and prefix caching off, and does not promise "
        "that attention reads a prefix that was loaded; serve this model on a GPU or on a CPU with AMX"
    )


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("rope", "options", "is_declined"),
    [
        ({}, ["--enforce-eager"], True),
        ({}, [], False),
        ({"rope_parameters": YARN}, ["--enforce-eager"], False),
    ],
)
def test_a_model_that_the_kernel_for_cpu_rotates_by_row_is_declined(
    check: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rope: dict[str, Any],
    options: list[str],
    is_declined: bool,
) -> None:
    """VLLM uses the kernel where it does not compile the model, and not for DeepSeek's yarn."""
    leave_chunked_prefill_on(monkeypatch)
    exit_code, records = check(transfer(), "--model", latent_model(tmp_path, **rope), *options)
    assert exit_code == 0
    assert ["rotary kernel" in reason for reason in records["plan"]["declined"]] == [True] * is_declined


def test_sliding_windows_are_named_with_how_many_groups_have_them(
    capsys: pytest.CaptureFixture[str], check: Any, tmp_path: Path
) -> None:
    """Gemma's: vLLM makes as many groups of layers as one of each kind takes."""
    sizes = {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 128, "query_pre_attn_scalar": 32}
    layers = {"layer_types": [*["sliding_attention"] * 5, "full_attention"]}
    model = written(tmp_path, "Gemma3ForCausalLM", "gemma3_text", **sizes, **layers)
    assert main(["check", "{}", "--model", str(model), "--block-size", "32"]) == 0
    text = "32 tokens each, in 6 groups of layers; tokens that a group reads: the last 128 (5 groups), all"
    assert text in capsys.readouterr().out
    exit_code, records = check(transfer(host_bytes="6MiB"), "--model", model, "--block-size", "32")
    assert exit_code == 0
    assert records["plan"]["bytes_a_token"] == 6 * 2 * 2 * 32 * 2
    assert "note" not in records


def test_a_hybrid_model_is_declined_with_each_reason_once(check: Any, tmp_path: Path) -> None:
    """Granite's: states stand for a whole prefix. Its attention has pages of the same size as them, as in an engine."""
    states = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
    kinds = {"num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "mamba"]}
    model = written(tmp_path, "GraniteMoeHybridForCausalLM", "granitemoehybrid", **states, **experts, **kinds)
    exit_code, records = check(transfer(), "--model", model)
    assert exit_code == 0
    (reason,) = records["plan"]["declined"]
    assert reason.startswith("each of the groups 0, 1, 2 (MambaSpec) does not keep the KV of every token")


def test_a_model_that_vllm_does_not_know_is_refused_in_one_line(check: Any, tmp_path: Path) -> None:
    """With vLLM's reason, and without what surrounds it."""
    exit_code, records = check(transfer(), "--model", written(tmp_path, "NobodyForCausalLM", "nobody"))
    assert exit_code == 77
    reason = records["refused"]["reason"]
    assert f"vLLM cannot create a KV cache for {tmp_path} on this machine (cpu): The checkpoint" in reason
    assert "model type `nobody`" in reason
    assert "\n" not in reason
    assert "pydantic" not in reason


def test_what_does_not_fit_the_model_is_refused_with_the_figures(check: Any, model: Path) -> None:
    """As vLLM's start refuses it, which has the configuration as well."""
    exit_code, records = check(transfer(chunk_size=24), "--model", model, "--block-size", "32")
    assert exit_code == 77
    assert records["refused"] == {
        "type": "refused",
        "key": "chunk_size",
        "value": 24,
        "reason": "is neither a multiple nor a divisor of block_size 32",
        "remedy": "write a multiple or a divisor of 32",
    }


@pytest.mark.parametrize("block_size", [8, 16, 48])
def test_a_block_size_that_vllm_s_start_refuses_is_refused(check: Any, model: Path, block_size: int) -> None:
    """`--block-size 16` was said to start on CPU; vLLM's worker then found no kernel for it (trial H5)."""
    exit_code, records = check(transfer(chunk_size=block_size), "--model", model, "--block-size", str(block_size))
    assert exit_code == 77
    refused = records["refused"]
    assert (refused["key"], refused["value"]) == ("--block-size", block_size)
    assert f"No common block size for {block_size} (CPU_ATTN: [MultipleOf(32)])" in refused["reason"]
    assert refused["remedy"] == "write 32, 64, 128 or 256, or run this command on the server's machine"
    assert "plan" not in records


def test_what_a_kernel_for_cpu_refuses_at_start_is_refused(check: Any, tmp_path: Path) -> None:
    """Heads of 48 numbers have no kernel for a cache of 8 bits; vLLM's worker says so when it sets the backend up."""
    sizes = {"head_dim": 48, "num_hidden_layers": 2}
    model = written(tmp_path, "LlamaForCausalLM", "llama", **sizes)
    exit_code, records = check(transfer(), "--model", model, "--block-size", "32", "--kv-cache-dtype", "fp8")
    assert exit_code == 77
    assert "FP8 KV cache requires head_size divisible by 32 on CPU" in records["refused"]["reason"]
    assert check(transfer(), "--model", model, "--block-size", "32")[0] == 0


@pytest.mark.parametrize("block_size", [32, 96, 160])
def test_a_block_size_that_vllm_takes_is_taken(check: Any, model: Path, block_size: int) -> None:
    """Every multiple of what the kernel reads."""
    exit_code, records = check(transfer(chunk_size=block_size), "--model", model, "--block-size", str(block_size))
    assert (exit_code, records["plan"]["block_size"]) == (0, block_size)


@pytest.mark.parametrize(
    ("host_bytes", "reason", "remedy"),
    [("1KiB", "0 slots of 16.0 KiB", 'write "32KiB" or more'), ("900TiB", "asks for 921600.0 GiB, but", "or less")],
)
def test_a_pool_that_is_too_small_or_too_large_is_refused(
    check: Any, model: Path, host_bytes: str, reason: str, remedy: str
) -> None:
    """With sizes that a person can read, and one that can be written instead."""
    exit_code, records = check(transfer(host_bytes=host_bytes), "--model", model, "--block-size", "32")
    assert exit_code == 77
    assert records["refused"]["key"] == "host_bytes"
    assert reason in records["refused"]["reason"]
    assert remedy in records["refused"]["remedy"]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--dtype", "floot32", "dtype: 'floot32': must be 'auto', "),
        ("--tensor-parallel-size", "3", "must be divisible by tensor parallel size (3); if"),
    ],
)
def test_what_vllm_refuses_of_a_model_is_said_without_words_of_pydantic(
    capsys: pytest.CaptureFixture[str], model: Path, option: str, value: str, words: str
) -> None:
    """Its reason in one line."""
    assert main(["check", "{}", "--model", str(model), option, value]) == 77
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("refused"))
    assert words in line
    assert "type=" not in line


@pytest.mark.parametrize(
    ("configuration", "reason"),
    [
        ({"chunksize": 64}, "chunksize: 64: unknown key; did you mean chunk_size?"),
        (transfer(host_bytes="much"), "host_bytes: 'much'"),
        (transfer(handlers=["no_such:Thing"]), "handlers: 'no_such:Thing': cannot be imported"),
        (transfer(log_dir="/dev/null/logs"), "log_dir: '/dev/null/logs': /dev/null is a file"),
        (
            {**transfer(), "host_bytes": 1},
            "host_bytes: 1: is a key of kvledger; move it into kv_connector_extra_config",
        ),
        ({**transfer(), "kv_rol": 1}, "kv_rol: 1: unknown key; did you mean kv_role?"),
        ({**transfer(), "kv_role": "kv_booth"}, "did you mean 'kv_both'?"),
        ({"kv_connector": "KVLedgerConnector"}, 'kv_role: None: a connector needs a role; write "kv_both"'),
        ({"kv_role": "kv_both"}, "kv_connector: None: no connector is named"),
        (transfer("KVLedgerConector"), "did you mean KVLedgerConnector?"),
        (transfer(log_dir="/proc/logs"), "log_dir: '/proc/logs': cannot write to /proc"),
        (transfer("MultiConnector", connectors=[transfer("KVLedgerConector")]), "did you mean KVLedgerConnector?"),
        (
            transfer("MultiConnector", connectors=3),
            "kv_connector_extra_config.connectors: 3: must be a list of objects",
        ),
        (transfer("KVLedgerRecorder"), "names no connector to record"),
        (
            transfer("KVLedgerRecorder", connector={"kv_connector": "Nobody", "kv_role": "kv_both"}),
            "connector.kv_connector: 'Nobody': unknown",
        ),
        (
            transfer("KVLedgerRecorderHMA", connector={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}),
            "wrap it in KVLedgerRecorder",
        ),
    ],
)
def test_what_would_be_refused_is_named_with_the_reason(check: Any, configuration: Any, reason: str) -> None:
    """Wherever it stands in the object."""
    exit_code, records = check(configuration)
    assert exit_code == 77
    refused = records["refused"]
    given = f"{refused['key']}: {refused['value']!r}: {refused['reason']}; {refused['remedy']}"
    assert reason in given


@pytest.mark.parametrize(
    "configuration", [transfer("NixlConnector"), transfer("MultiConnector", connectors=[transfer("NixlConnector")])]
)
def test_a_connector_of_others_is_not_judged(capsys: pytest.CaptureFixture[str], configuration: Any) -> None:
    """No name of kvledger's is suggested; how it can be recorded is said."""
    assert main(["check", json.dumps(configuration)]) == 64
    said = capsys.readouterr().err
    assert "NixlConnector: not provided by kvledger, so not checked" in said
    assert "KVLedgerRecorder" in said


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
    [("{'a': 1}", "not valid JSON"), ("[]", "neither"), ("nowhere.json", "neither a JSON object nor a readable file")],
)
def test_what_is_no_object_is_wrong_usage(capsys: pytest.CaptureFixture[str], given: str, words: str) -> None:
    """With what was read."""
    assert main(["check", given]) == 64
    assert words in capsys.readouterr().err


def test_a_full_disk_is_named_and_not_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Old segments are deleted at start; without any the log begins later."""

    def work() -> None:
        fill(tmp_path / "disk")
        assert main(["check", json.dumps({"log_dir": str(tmp_path / "disk" / "logs")}), "--json"]) == 0
        assert "is full (No space left on device): at start kvledger deletes the oldest" in capsys.readouterr().out

    run_on_small_disk(tmp_path / "disk", 1 << 16, work)


@pytest.mark.parametrize(
    ("configuration", "options", "reason"),
    [
        ({"max_log_bytes": "64MiB"}, (), "is too small: a log needs 3 segments of 64MiB to be readable"),
        (
            {"connector": {"kv_connector": "OffloadingConnector"}, "max_log_bytes": "300MiB"},
            ("-tp", "2"),
            "this server writes 3 logs at once, and each needs 3 segments of 64MiB",
        ),
    ],
)
def test_a_size_of_logs_that_is_too_small_for_a_reader_is_refused(
    check: Any, configuration: object, options: tuple[str, ...], reason: str
) -> None:
    """Of one log, and of those that a recorded engine and its workers write at once."""
    exit_code, records = check(configuration, *options)
    assert exit_code == 77
    assert reason in records["refused"]["reason"]


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("with_model", [False, True])
def test_a_hash_with_which_keys_could_collide_is_refused(
    check: Any, model: Path, algorithm: str, *, with_model: bool
) -> None:
    """As an engine refuses it, because one tenant could get another's KV."""
    options = ("--model", model, "--block-size", "32") if with_model else ()
    exit_code, records = check(transfer(), "--prefix-caching-hash-algo", algorithm, *options)
    assert exit_code == 77
    assert (records["refused"]["key"], records["refused"]["value"]) == ("prefix_caching_hash_algo", algorithm)
    assert check(transfer(), "--prefix-caching-hash-algo", "sha256_cbor", *options)[0] == 0


WRAPPED = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize("configuration", [transfer(), transfer("KVLedgerRecorder", connector=WRAPPED)])
@pytest.mark.parametrize(
    ("seed", "reason"),
    [
        (None, "PYTHONHASHSEED is not set, so"),
        ("random", "PYTHONHASHSEED is 'random', so"),
        ("", "PYTHONHASHSEED is '', so"),
        ("0", "PYTHONHASHSEED is '0', so"),
        ("0042", "PYTHONHASHSEED is '0042', so"),
        ("3141592653", None),
    ],
)
def test_a_public_hash_seed_is_said(
    check: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    configuration: dict[str, Any],
    seed: str | None,
    reason: str | None,
) -> None:
    """With it a reader of the log can test guesses (security review). To vLLM "random" is a text like any other.

    A small number, such as 0 from vLLM's own guides, counts as public.
    """
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    exit_code, records = check(configuration)
    assert exit_code == 0
    assert records["keys"]["algorithm"] == "sha256"
    assert (records["keys"]["guessable"] or "").startswith(reason or "")
    assert main(["check", json.dumps(configuration)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("keys"))
    assert (reason or "from the seed in PYTHONHASHSEED") in line


def test_the_keys_of_a_recorder_with_a_weak_hash_are_no_secret(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder keeps no KV that could be mixed up, so it is not refused."""
    monkeypatch.setenv("PYTHONHASHSEED", "3141592653")
    exit_code, records = check(
        transfer("KVLedgerRecorder", connector=WRAPPED), "--prefix-caching-hash-algo", "xxhash_cbor"
    )
    assert exit_code == 0
    assert records["keys"]["guessable"].startswith("xxhash_cbor is not a cryptographic hash")


@pytest.mark.parametrize(
    ("plugins", "module", "is_noted"),
    [
        ("other", None, True),
        ("", None, True),
        ("other,kvledger", None, False),
        (None, None, False),
        ("other", "kvledger.adapters.vllm", False),
    ],
)
def test_a_list_of_plugins_without_kvledger_is_noted(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    plugins: str | None,
    module: str | None,
    is_noted: bool,
) -> None:
    """Found in a trial: `check` approved a configuration with which vLLM did not find the connector."""
    if plugins is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    given = transfer() | ({} if module is None else {"kv_connector_module_path": module})
    assert main(["check", json.dumps(given)]) == 0
    assert ("VLLM_PLUGINS does not name kvledger" in capsys.readouterr().out) is is_noted


def test_a_name_as_near_to_the_recorder_as_to_the_connector_gets_the_list_of_names(check: Any) -> None:
    """Found in a trial: "KVLedger" was answered with the recorder."""
    _, records = check(transfer("KVLedger"))
    assert records["refused"]["remedy"].startswith("use one of KVLedgerConnector, ")
