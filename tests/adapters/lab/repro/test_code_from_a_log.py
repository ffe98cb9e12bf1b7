"""A recorder's log names a connector: unless a user says so, kvledger runs none of that, nor goes where it says.

Incident: `kvledger repro` imported the module that a log named, called what it found there with the log's options, and
did so while it wrote the test; with a `log_dir` and a retention of the log's it deleted logs elsewhere.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_logs import write_log

from kvledger.adapters.lab.repro import NotRerunnable, read_recording, rerun
from kvledger.adapters.lab.repro.chosen import HARMLESS_OPTIONS, Chosen
from kvledger.adapters.lab.repro.run_once import Ended, run_once
from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.recorded.payloads import RecordingStarted
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.log_settings import LogSettings
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import vocabulary_header

pytestmark = pytest.mark.scheduler

CONFIGURATION = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8)
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}
EVIL = """
import pathlib
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

def trace(*_):
    with (pathlib.Path(__file__).parent / "ran").open("a") as file:
        file.write(__name__)

trace()

def Function(vllm_config, role, kv_cache_config):
    trace()

class Class(OffloadingConnector):
    pass
"""
OWN = {"kv_connector": "KVLedgerConnector", "kv_connector_module_path": "kvledger.adapters.vllm"}


def named(
    name: object = "Class", module: object = "evil_connector", options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a log says of a connector."""
    extra = {"cpu_bytes_to_use": 1 << 20} if options is None else options
    return {"kv_connector": name, "kv_connector_module_path": module, "kv_connector_extra_config": extra}


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file in which a module that can be imported leaves its trace when it is."""
    folder = tmp_path / "importable"
    folder.mkdir()
    (folder / "evil_connector.py").write_text(EVIL)
    monkeypatch.syspath_prepend(str(folder))
    yield folder / "ran"
    sys.modules.pop("evil_connector", None)


@pytest.fixture
def log_of(tmp_path: Path) -> Callable[..., Path]:
    """Writes the log of a recorder around a connector, whose second hook has failed."""

    def write(kv_transfer: Mapping[str, Any], recorder: str = "KVLedgerRecorder") -> Path:
        kv_transfer = {"kv_role": "kv_both", **kv_transfer}
        started = RecordingStarted(recorder, kv_transfer, 64, 1024, 1, True, False, 4, 256, 512)
        events = [
            e.LogNote("connector started", 0),
            Recorder.noted(started, 1),
            e.RequestArrived("r1", 0, 45, 10),
            e.RequestArrived("r2", 1, 45, 11),
            e.LookupRequested("r1", 0, 45, 12),
            e.HookFailed("get_num_new_matched_tokens", "r1", "ValueError at x.py:3", 13),
        ]
        header = vocabulary_header(Core.standard().extended(Recorder()))
        return write_log(tmp_path / "log", events, CONFIGURATION, header=header)

    return write


@pytest.fixture
def test_path(tmp_path: Path) -> Path:
    """Where the test is written."""
    return tmp_path / "test_incident.py"


@pytest.mark.parametrize("options", [[], ["--all"], ["--no-run"], ["--all", "--no-run"], ["r1", "--pin"], ["--core"]])
def test_nothing_that_a_log_names_is_run_unless_the_user_says_so(
    evil: Path,
    log_of: Callable[..., Path],
    test_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    """The message says what the log wants to run, and both ways to say it; neither file is written."""
    log = log_of(named())
    assert main(["repro", str(log), *options, "-o", str(test_path)]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert (
        "the log names the connector evil_connector:Class, and kvledger does not run code only because a log names it"
        in said
    )
    assert "--connector MODULE:CLASS" in said
    assert "--run-recorded" in said
    assert not test_path.exists()
    with pytest.raises(NotRerunnable, match=r'connector="module:Class", .*run_recorded=True'):
        rerun(log)
    assert not evil.exists()


def test_what_a_log_wants_to_run_is_shown_with_its_children_and_without_what_a_terminal_obeys(
    log_of: Callable[..., Path], test_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if it is no name at all."""
    children = [named("\x1b[31mRed", "\u202eover" * 1000), named(), named(None, 3), named(["a"], None), 17]
    log = log_of(named("MultiConnector", None, {"connectors": children}))
    assert main(["repro", str(log), "-o", str(test_path)]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "\\u001b[31mRed" in said
    assert "evil_connector:Class, an unnamed connector, an unnamed connector," in said
    assert said.isascii()
    assert len(said) < 2000


def test_the_user_s_connector_is_run_in_trials_in_the_test_and_whenever_the_test_is_run(
    evil: Path, log_of: Callable[..., Path], test_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the user's options, which stand in the test; the module that the log names is never imported."""
    log = log_of(named(options={"cpu_bytes_to_use": 1 << 20, "spec_module_path": "evil_connector"}))
    extra = {"cpu_bytes_to_use": 1 << 21, "offload_prompt_only": False}
    given = ["--connector", "OffloadingConnector", "--extra-config", json.dumps(extra)]
    assert main(["repro", str(log), *given, "-o", str(test_path)]) == ExitCode.DIVERGED
    said = capsys.readouterr().err
    assert "not taken from the log, because they may be paths, addresses or code: spec_module_path" in said
    source = test_path.read_text()
    assert 'connector="OffloadingConnector",\n        extra_config={"cpu_bytes_to_use": 2097152' in source
    assert "--extra-config" in source
    recording = read_recording(test_path.with_suffix(".kvlog"))
    outcome = rerun(recording, connector="OffloadingConnector", extra_config=extra)
    (started,) = (
        event.kv_transfer
        for _, event in (
            (0, Recorder.payload_of(each)) for _, each in outcome.events if isinstance(each, e.ExtensionNoted)
        )
        if isinstance(event, RecordingStarted)
    )
    assert started["kv_connector"] == "OffloadingConnector"
    assert not evil.exists()


def test_a_log_is_replaced_next_to_its_test_and_names_no_code_either(
    evil: Path, log_of: Callable[..., Path], test_path: Path
) -> None:
    """The text of the test decides: of kvledger's own connector, of a named one, of one that the log names."""
    shutil.copy(next(log_of(named()).glob("*.kvlog")), test_path.with_suffix(".kvlog"))
    test_path.write_text(
        "from pathlib import Path\nfrom kvledger.adapters.lab.repro import rerun\n"
        'LOG = Path(__file__).with_suffix(".kvlog")\ndef test_of_own():\n    rerun(LOG)\n'
        'def test_of_named():\n    rerun(LOG, connector="OffloadingConnector")\n'
    )
    ended = [run.ended for run in run_once(test_path)]
    assert ended == [Ended.NOT_RUN, Ended.PASSED]
    assert not evil.exists()


def test_with_run_recorded_the_connector_of_the_log_is_run(
    evil: Path, log_of: Callable[..., Path], test_path: Path
) -> None:
    """In every trial and in the test, which says so itself."""
    log = log_of(named())
    assert main(["repro", str(log), "--run-recorded", "-o", str(test_path)]) == ExitCode.DIVERGED
    assert "rerun(LOG, run_recorded=True)" in test_path.read_text()
    assert evil.exists()


@pytest.mark.parametrize(
    "kv_transfer",
    [
        named("Function"),
        named("pathlib"),
        named("MultiConnector", None, {"connectors": [{**named("Function"), "kv_role": "kv_both"}]}),
    ],
    ids=["function", "module", "child"],
)
def test_what_is_no_class_of_a_connector_is_not_called(
    evil: Path, log_of: Callable[..., Path], kv_transfer: dict[str, Any]
) -> None:
    """Also with --run-recorded: vLLM itself would call whatever it finds under the name."""
    with pytest.raises(NotRerunnable, match=r"is not a class derived from vLLM's KVConn|is not a callable object"):
        rerun(log_of(kv_transfer), run_recorded=True)
    assert evil.read_text() == "evil_connector"  # imported, and not called


@pytest.mark.parametrize("way", [{"run_recorded": True}, {"connector": "KVLedgerConnector"}])
def test_neither_a_place_nor_code_is_taken_from_a_log(
    evil: Path,
    log_of: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: dict[str, Any],
) -> None:
    """Of kvledger's own connector: no log elsewhere is written or deleted, and no handler is imported."""
    monkeypatch.chdir(tmp_path)
    options = {
        "host_bytes": "64MiB",
        "chunk_size": 32,
        "log_dir": str(tmp_path / "elsewhere"),
        "max_log_bytes": 1,
        "max_log_age_hours": 1e-9,
        "handlers": ["evil_connector:trace"],
        "extensions": ["evil_connector:trace"],
        "extension_settings": {"a": {"b": 1}},
    }
    events = [e.LogNote("old", 0)]
    old = write_log(tmp_path / "elsewhere/old", events, CONFIGURATION)
    before = {path: path.read_bytes() for path in tmp_path.glob("elsewhere/**/*") if path.is_file()}
    log = log_of({**OWN, "kv_connector_extra_config": options})
    outcome = rerun(log, **way)
    assert [event.id for _, event in outcome.events].count("lookup.requested") == 1
    assert {path: path.read_bytes() for path in tmp_path.glob("elsewhere/**/*") if path.is_file()} == before
    assert old.exists()
    assert not (tmp_path / "kvledger-logs").exists()
    assert not evil.exists()
    with pytest.raises(NotRerunnable, match="handlers: 'evil_connector:trace': is not a class"):
        rerun(log, **way, handlers=["evil_connector:trace"])


@pytest.mark.parametrize(
    "given", [{"connector": "OffloadingConnector"}, {"extra_config": {"a": 1}}, {"run_recorded": True}]
)
def test_what_is_said_of_a_log_that_is_not_a_recorders_is_refused(
    run: Any, log: Path, test_path: Path, given: dict[str, Any]
) -> None:
    """It has no meaning there."""
    option = {
        "connector": "--connector=x:Y",
        "extra_config": '--extra-config={"a": 1}',
        "run_recorded": "--run-recorded",
    }
    result = run("repro", log, "chat-17", "--pin", option[next(iter(given))], "-o", test_path)
    assert result.exit_code == ExitCode.USAGE
    assert "it is a log of kvledger's own connector; leave out --connector" in result.err
    with pytest.raises(NotRerunnable, match="is of kvledger's own connector"):
        rerun(log, **given)


@pytest.mark.parametrize(
    ("kv_transfer", "recorder", "reason"),
    [
        ({}, "KVLedgerRecorder", "no connector is named"),
        (named(3), "KVLedgerRecorder", "no connector is named"),
        (named("Unheard", None), "KVLedgerRecorder", "Unheard cannot be created here: .*Unsupported connector type"),
        (named("Class", "no_such_module"), "KVLedgerRecorder", "No module named 'no_such_module'"),
        (named("Missing"), "KVLedgerRecorder", "Missing not found in evil_connector"),
        (named("\x1b", "\x1b"), "KVLedgerRecorder", r"\\u001b cannot be created here"),
        (OFFLOADING, "composed\n", r"composed\\u000a is not a recorder of this kvledger"),
        ({**named("Class"), "kv_role": ["kv_both"], "kv_connector_extra_config": 3}, "KVLedgerRecorder", "cpu_bytes"),
    ],
)
@pytest.mark.usefixtures("evil")
def test_what_cannot_be_made_is_said_in_words(
    log_of: Callable[..., Path], kv_transfer: dict[str, Any], recorder: str, reason: str
) -> None:
    """Whatever a log has in the place of a name."""
    with pytest.raises(NotRerunnable, match=reason):
        rerun(log_of(kv_transfer, recorder), run_recorded=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": NaN}', "not valid JSON"),
        ('{"a": 1e999}', "not valid JSON"),
        ("[1]", "expected a JSON object, got list"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
    ids=["not a number", "infinite", "a list", "cut", "deep"],
)
def test_options_that_are_no_json_are_refused(run: Any, log: Path, text: str, reason: str) -> None:
    """They become a literal in the test."""
    result = run("repro", log, "--extra-config", text)
    assert result.exit_code == ExitCode.USAGE
    assert reason in result.err


PLACES = [
    "/etc/passwd",
    "../x",
    ".",
    "x",
    "~",
    "file:///x",
    "redis://h:1",
    "10.0.0.1",
    "h:1",
    "os:abort",
    "os",
    "1MB/x",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([*PLACES, "sync", "64MiB"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
OPTIONS = st.dictionaries(st.sampled_from(sorted(HARMLESS_OPTIONS)) | st.text(), JSON)


@given(OPTIONS)
def test_only_numbers_and_known_words_pass(options: dict[str, Any]) -> None:
    """Under names that are known to be neither a place nor code."""
    passed = Chosen(connector="x:Y").transfer({"kv_connector_extra_config": options})["kv_connector_extra_config"]
    assert passed.items() <= options.items()
    assert passed.keys() <= HARMLESS_OPTIONS
    for value in passed.values():
        assert isinstance(value, bool | int | float | None) or value in {"sync", "64MiB"} or value.endswith(("b", "B"))


@given(OPTIONS, st.dictionaries(st.sampled_from(["kv_connector", "kv_role", "kv_ip", "engine_id"]), JSON))
def test_a_connector_s_configuration_has_no_other_keys(options: dict[str, Any], other: dict[str, Any]) -> None:
    """An address, for example."""
    recorded = {"kv_connector_extra_config": {"connectors": [{**other, "kv_connector_extra_config": options}]}, **other}
    keys = {
        "kv_connector",
        "kv_connector_module_path",
        "kv_role",
        "kv_load_failure_policy",
        "kv_connector_extra_config",
    }
    for chosen in (Chosen(connector="x:Y"), Chosen(connector="x:Y", extra_config={"path": "/mine"})):
        transfer = chosen.transfer(recorded)
        assert transfer.keys() <= keys
        assert (transfer["kv_connector"], transfer["kv_connector_module_path"]) == ("Y", "x")
        assert transfer["kv_connector_extra_config"] == chosen.extra_config
    if isinstance(other.get("kv_connector"), str) and other["kv_connector"]:
        (child,) = Chosen(run_recorded=True).transfer(recorded)["kv_connector_extra_config"]["connectors"]
        assert child.keys() <= keys
        assert child["kv_connector_extra_config"].keys() <= HARMLESS_OPTIONS


def test_every_setting_of_kvledger_s_own_is_known_to_be_harmless_or_not() -> None:
    """A new one must be looked at."""
    not_taken = {"handlers", "extensions", "extension_settings"}
    assert ConnectorSettings.model_fields.keys() - LogSettings.model_fields.keys() - not_taken <= HARMLESS_OPTIONS
    assert not HARMLESS_OPTIONS & (LogSettings.model_fields.keys() | not_taken)
