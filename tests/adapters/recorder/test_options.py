"""What a recorder's log holds of the options of the connector that it records: an allow list, and no secret."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import vllm
from hypothesis import given
from hypothesis import strategies as st
from sim.connectors import NamedConnector, Recorded, Several

from kvledger.adapters.lab.simulation.connectors import ConnectorSetup, Offloading, SimpleCPU
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.recorder import options as options_module
from kvledger.adapters.recorder.options import is_recorded, recorded_options, without_unrecorded
from kvledger.adapters.tools.cli import conformance
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.vllm.configuration import ConnectorSettings

pytestmark = pytest.mark.scheduler

SECRET = "hunter2hunter2"  # noqa: S105 -- made up
NUMBER = 7_306_194_625_118
ALLOWED = options_module._NUMBERS | options_module._WORDS | options_module._CODE | options_module._NESTED
HOLD_SECRETS: list[dict[Any, Any]] = [
    {"password": NUMBER},
    {"pwd": SECRET},
    {"pass": SECRET},
    {"dsn": f"host=db user=u password={SECRET}"},
    {"remote_url": f"redis://u:p/{SECRET}@host:6379"},
    {"remote_url": f"redis://u:p@{SECRET}@host"},
    {"url": f"https://host/x?sig={SECRET}&access_token={SECRET}"},
    {"connection_string": f"Endpoint=sb://h/;SharedAccessKey={SECRET}"},
    {"headers": {"Cookie": SECRET}},
    {"headers": [f"Authorization: Bearer {SECRET}"]},
    {"pin": SECRET},
    {"AWS": {"id": "AKIA", "sk": SECRET}},
    {"passphrase": SECRET},
    {"jwt": SECRET},
    {"bearer": SECRET},
    {"secret": {"value": SECRET}},
    {"tokens": [SECRET]},
    {"credentials": {"user": "u", "value": SECRET}},
    {"otp": NUMBER},
    {"otp": float(NUMBER)},
    {"codes": [NUMBER, NUMBER]},
    {"secondary_tiers": [{"type": "obj", "store_config": {"access_key": SECRET, "bucket": SECRET}}]},
    {"secondary_tiers": [{"type": "fs", "root_dir": f"/mnt/{SECRET}"}]},
    {"secondary_tiers": {"type": "obj", "password": SECRET}},
    {"backpressure": {"api": SECRET}},
    {"connectors": [{"kv_connector": "A", "kv_ip": SECRET, "kv_connector_extra_config": {"pwd": SECRET}}]},
    {"connectors": [SECRET, {"kv_connector": "A"}]},
    {"connectors": SECRET},
    {"lmcache.remote_url": f"redis://:{SECRET}@host"},
    {"lmcache.extra_config": {"save_chunk_meta": SECRET}},
    {"shared_storage_path": f"/data/{SECRET}"},
    {"cpu_bytes_to_use": SECRET},
    {"load_mode": f"https://u:{SECRET}@host"},
    {"eviction_policy": f"lru {SECRET}"},
    {"block_size": [[SECRET]]},
    {"block_size": {"value": NUMBER}},
    {"kv_role": NUMBER},
    {"chunk_size": int(f"{NUMBER}{NUMBER}")},
    {"spec_module_path": f"a.b:{SECRET}"},
    {"data": SECRET.encode()},
    {"set": {SECRET}},
    {f"{SECRET} 4711": True},
    {f"sk-{NUMBER}": 1},
    {f"eyJhbGciOiJIUzI1NiJ9.{SECRET}": None},
    {"x" * 30 + SECRET + "x" * 30: 1},
    {NUMBER: 1},
]
"""Each holds `SECRET` or `NUMBER` in a place where no connector of vLLM's has a setting that may be known."""


def texts_of(options: dict[Any, Any]) -> str:
    """Everything that is recorded, in JSON and as it is encoded."""
    recorded = recorded_options(options)
    return f"{json.dumps(recorded)} {msgspec.msgpack.encode(recorded)!r}"


@pytest.mark.parametrize("options", HOLD_SECRETS, ids=repr)
def test_no_secret_of_a_recorded_connector_is_recorded(options: dict[Any, Any]) -> None:
    """Incident: only texts whose names contained one of eight words were left out."""
    texts = texts_of(options)
    assert SECRET not in texts
    assert str(NUMBER) not in texts
    assert msgspec.msgpack.encode(NUMBER) not in msgspec.msgpack.encode(recorded_options(options))


def test_type_and_length_of_what_is_left_out_are_recorded() -> None:
    """And nothing else is; `is_recorded` knows it."""
    found = recorded_options(
        {
            "text": "four",
            "number": 4.5,
            "flag": True,
            "raw": b"123",
            "mapping": {"a": 1},
            "list": [1, 2],
            "none": None,
        }
    )
    assert found == {
        "text": "(text of 4 characters, not recorded)",
        "number": "(number, not recorded)",
        "flag": "(boolean, not recorded)",
        "raw": "(3 bytes, not recorded)",
        "mapping": "(mapping of 1, not recorded)",
        "list": "(list of 2, not recorded)",
        "none": None,
    }
    assert [name for name, value in found.items() if is_recorded(value)] == ["none"]


def test_options_of_which_only_the_names_are_hidden_stay_apart() -> None:
    """Two of the same length."""
    assert len(recorded_options({"1234567890": 1, "0987654321": 2, "plain_name": 3})) == 3


PLAIN: dict[str, Any] = {
    "block_size": 64,
    "cpu_bytes_to_use": "64MiB",
    "lazy_offload": True,
    "digests": 0.5,
    "prefill_tp_sizes": [1, 2],
    "spec_name": "CPUOffloadingSpec",
    "spec_module_path": "vllm.v1.kv_offload.cpu.spec",
    "eviction_policy": "lru",
    "backends": ["UCX", "GDS_MT"],
    "lmcache.chunk_size": 256,
    "enable_cross_layers_blocks": "True",
    "secondary_tiers": [{"type": "fs", "n_read_threads": 4, "backpressure": {"high_water_s": 0.5}}],
    "connectors": [
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"block_size": 32}}
    ],
}


def test_settings_of_known_connectors_are_recorded() -> None:
    """What is asked of a log: sizes, modes, classes, and the same of nested connectors."""
    assert recorded_options(PLAIN) == PLAIN
    assert all(is_recorded(value) for value in PLAIN.values())


@pytest.mark.parametrize("setup", [Offloading(), SimpleCPU()], ids=lambda setup: setup.name)
def test_what_a_known_connector_needs_to_be_made_again_is_recorded(setup: ConnectorSetup) -> None:
    """All of its options in the simulated engine."""
    transfer = setup.kv_transfer({"host_bytes": 1 << 20}, {})
    assert transfer is not None
    assert recorded_options(transfer) == transfer


def test_the_allow_list_has_every_setting_of_kvledger_but_paths_and_code() -> None:
    """A new setting belongs in it, or here."""
    kept = {"log_dir", "handlers", "extensions", "extension_settings"}
    assert set(ConnectorSettings.model_fields) - ALLOWED == kept


def test_the_names_that_are_allowed_are_read_by_vllm_or_lmcache() -> None:
    """A misspelt name would allow what nobody knows."""
    if not vllm.__version__.startswith("0.32."):
        pytest.skip("the list is of vLLM 0.32")
    root = Path(vllm.__file__).parent
    folders = (root / "distributed" / "kv_transfer", root / "v1" / "kv_offload")
    files = [root / "config" / "kv_transfer.py", *(file for folder in folders for file in folder.rglob("*.py"))]
    words: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Constant(str(text)):
                    words.add(text)
                case ast.arg(name) | ast.Name(name):
                    words.add(name)
    ours = set(ConnectorSettings.model_fields) | {"connector"}
    assert {name for name in ALLOWED - words - ours if not name.startswith("lmcache.")} == set()


names = st.one_of(
    st.sampled_from(sorted(options_module._NESTED)), st.text(max_size=60), st.from_regex(r"[a-z_]{1,12}")
).filter(lambda name: name not in ALLOWED - options_module._NESTED)
secrets = st.one_of(
    st.just(SECRET),
    st.just(NUMBER),
    st.just(float(NUMBER) + 0.5),
    st.builds(lambda before, after: f"{before}{SECRET}{after}", st.text(max_size=20), st.text(max_size=20)),
)
others = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))


@given(
    st.recursive(
        st.dictionaries(names, st.one_of(secrets, others), max_size=4),
        lambda children: st.dictionaries(names, st.one_of(children, st.lists(children, max_size=3)), max_size=4),
        max_leaves=20,
    )
)
def test_no_secret_is_recorded_under_any_name_that_is_not_allowed(options: dict[str, Any]) -> None:
    """At any depth, in lists, under names that nest; and whatever is configured can be encoded."""
    recorded = recorded_options(options)
    encoded = msgspec.msgpack.encode(recorded)
    json.dumps(recorded, allow_nan=False).encode()
    assert SECRET.encode() not in encoded
    for number in (NUMBER, float(NUMBER) + 0.5):
        assert msgspec.msgpack.encode(number) not in encoded


@pytest.mark.parametrize("is_nested", [False, True], ids=["alone", "in a MultiConnector"])
def test_no_file_of_an_engine_holds_a_secret_of_the_connector_that_it_records(tmp_path: Path, is_nested: bool) -> None:
    """The scheduler's log and the workers', their names, and what `check` says of the same configuration."""
    extra: dict[str, Any] = {"layout": "HND", "max_tokens": NUMBER}
    for number, options in enumerate(HOLD_SECRETS):
        extra |= {f"{name}{chr(97 + number % 26)}" if name in extra else str(name): options[name] for name in options}
    extra = {name: value for name, value in extra.items() if name not in {"connectors", "data", "set"}}
    inner: ConnectorSetup = NamedConnector(name="Witness", module="sim.witness", options=extra)
    if is_nested:
        inner = Several(children=(inner, NamedConnector(name="Witness", module="sim.witness", options=extra)))
    engine = SimulatedEngine(
        setup=Recorded(inner=inner, name="KVLedgerRecorder"),
        num_blocks=20,
        host_bytes=1 << 20,
        chunk_size=16,
        log_dir=tmp_path / "logs",
    )
    engine.add("a", range(40), 3)
    engine.run()
    engine.shutdown()
    contents = b"".join(file.read_bytes() for file in (tmp_path / "logs").rglob("*") if file.is_file())
    assert b"Witness" in contents
    assert SECRET.encode() not in contents
    assert str(NUMBER).encode() not in contents
    assert msgspec.msgpack.encode(NUMBER) not in contents


def test_check_shows_of_a_recorded_connector_what_a_log_would_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Incident: `check --json` printed the nested configuration with its passwords."""
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 4096, "password": SECRET, "url": f"redis://u:{SECRET}@h"},
    }
    given_options = json.dumps({"log_dir": str(tmp_path), "connector": connector})
    assert main(["check", "--json", given_options]) == 0
    captured = capsys.readouterr()
    assert SECRET not in captured.out + captured.err
    settings = json.loads(captured.out.splitlines()[0])["kv_connector_extra_config"]
    options = settings["connector"]["kv_connector_extra_config"]
    assert options["cpu_bytes_to_use"] == 4096
    assert options["password"] == f"(text of {len(SECRET)} characters, not recorded)"


@given(
    st.dictionaries(names, st.one_of(secrets, others, st.lists(secrets, max_size=2)), max_size=4),
    st.sampled_from(["{}", "cannot reach redis://u:{}@host", "[{}] and again {}"]),
)
def test_a_message_that_quotes_the_options_loses_what_a_log_does_not_hold(options: dict[str, Any], form: str) -> None:
    """Exceptions of connectors quote what they were given."""
    message = form.replace("{}", f"{options} {SECRET if SECRET in str(options) else ''}")
    shown = without_unrecorded(message, options)
    if SECRET in options.values():
        assert SECRET not in shown
    if NUMBER in options.values():
        assert str(NUMBER) not in shown


FAILING = """
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

class Failing(ExampleConnector):
    def __init__(self, config, role, kv_cache_config=None):
        options = config.kv_transfer_config.kv_connector_extra_config
        raise ConnectionError(f"cannot log in at {options['url']} with {options['password']}")
"""


def test_conformance_does_not_show_what_a_connector_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception of the connector's is printed, without the password that it quotes."""
    (tmp_path / "failing_login.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    given_options = json.dumps({"url": f"redis://u:p/{SECRET}@host", "password": f"x{SECRET}"})
    words = ["conformance", "failing_login:Failing", "--extra-config", given_options, "-o", str(tmp_path / "out")]
    assert main(words) != 0
    captured = capsys.readouterr()
    assert "cannot log in at" in captured.err
    assert SECRET not in captured.out + captured.err


def test_the_command_for_one_run_again_shows_no_secret() -> None:
    """What may be one is to be filled in; places in the run's directory stay."""
    options = {"shared_storage_path": "{run_dir}/files", "block_size": 32, "password": SECRET}
    examined = conformance.Examined("a:B", extra_config=options)
    command = shlex.split(conformance._again(examined, "world 7"))
    shown = json.loads(command[command.index("--extra-config") + 1])
    assert shown == {**options, "password": f"(text of {len(SECRET)} characters, not recorded)"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "redis://user:hunter2@host"}, "user 'user' with password 'hunter2' was refused"),
        ({"url": "redis://user:hun%2Fter2@host"}, "password 'hun/ter2' was refused"),
        ({"url": "redis://user:p:hunter2@host"}, "password p:hunter2 was refused"),
        ({"url": "nats://hunter2@host"}, "token hunter2 was refused"),
        ({"phrase": 'hun"\\ter2'}, f"""cannot open {json.dumps('hun"' + chr(92) + "ter2")}"""),
        ({"phrase": "hun\nter2"}, f"cannot open {'hun' + chr(10) + 'ter2'!r}"),
        ({"phrase": "hun/t?er2"}, "GET http://host/hun%2Ft%3Fer2"),
    ],
)
def test_a_message_shows_no_other_form_of_what_is_not_recorded(options: dict[str, str], message: str) -> None:
    """A connector's client quotes texts, and names the password of its address alone."""
    shown = without_unrecorded(message, options)
    assert "ter2" not in shown
    assert "er2" not in shown
    assert "…" in shown
