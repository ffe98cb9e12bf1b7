"""An install without extras is enough for the core, stored logs and the command; the rest names its extra."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import finished

from kvledger.adapters.tools.cli.commands import COMMANDS as KVLEDGER_COMMANDS
from kvledger.storage.extras import CONNECTOR, EXTRAS

pytestmark = pytest.mark.xdist_group("light")

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALL_CONNECTOR = (
    f"{', '.join(CONNECTOR)}, not installed here: pip install 'kvledger[connector]', into the "
    "environment that vLLM runs in; kvledger's extras do not install vLLM"
)
INSTALL_NATS = "needs nats, not installed here: pip install 'kvledger[nats]'"
INSTALL_TORCH = "needs numpy, torch, not installed here: pip install 'kvledger[connector]'"

SOUND, RULE_BROKEN, DIVERGED, REFUSED = 0, 1, 3, 77

COMMANDS = """
import sys
from kvledger.adapters.tools.cli.main import main

log = sys.argv[1]
handlers = ["--handlers", "save_when_preempted:SaveWhenPreempted"]
for command in (
    ["ls", log], ["completion", "bash"],
    ["verify", log], ["verify", log, *handlers], ["show", log], ["show", log, "cmpl-bench"], ["why", log, "cmpl-bench"],
    ["core"], ["core", log], ["stats", log], ["top", log],
    ["show", log, "--at", "20"],
    ["export", log, "--html", "-o", "page.html"], ["export", log, "--perfetto", "-o", "trace.json"],
    ["retire", log, "--max-bytes", "2GiB", "--dry-run"],
    ["repro", log, "--core", "-o", "test_incident.py"],
):
    exit_code = main(command)
    print("ended", exit_code, *command, file=sys.stderr)
print("loaded", *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""
"""Every command that reads a log, in one process."""

DRIVE_CONNECTOR = """
from kvledger.adapters.lab.repro import rerun

rerun(None)
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run it with the examples' handlers at hand."""
    return finished(command, cwd=cwd, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "docs/examples")})


def kvledger_of(python: Path) -> Path:
    """The command next to an interpreter."""
    return python.with_name("kvledger")


def test_the_command_verifies_a_log(light_python: Path, example_log: Path, tmp_path: Path) -> None:
    """An engineer's machine needs no torch for that."""
    ended = run(kvledger_of(light_python), "verify", example_log, cwd=tmp_path)
    assert ended.returncode == RULE_BROKEN, ended.stdout + ended.stderr
    assert "verdict     rule broken" in ended.stdout


@pytest.mark.parametrize("environment", ["light", "whole"])
def test_no_command_that_reads_logs_loads_what_an_extra_brings(
    environment: str, light_python: Path, example_log: Path, tmp_path: Path
) -> None:
    """They work where nothing of it is installed, and load nothing of it where all of it is; `tables` is an extra."""
    python = light_python if environment == "light" else Path(sys.executable)
    ended = run(python, "-c", COMMANDS, example_log, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    codes = re.findall(r"^ended (\d+) (\w+)", ended.stderr, re.MULTILINE)
    assert {name for _, name in codes} == KVLEDGER_COMMANDS.keys() - {"ship", "conformance", "check", "tables"}
    assert {int(code) for code, _ in codes} <= {SOUND, RULE_BROKEN, DIVERGED}, ended.stderr
    (loaded,) = re.findall(r"^loaded (.*)$", ended.stderr, re.MULTILINE)
    assert not set(loaded.split()) & {module.partition(".")[0] for module in EXTRAS}


def test_the_core_and_stored_logs_are_imported(light_python: Path, tmp_path: Path) -> None:
    """An embedder of the core needs no engine."""
    modules = ("lifecycle.audit", "storage.events", "adapters.lab.repro", "adapters.tools.export")
    code = f"import {', '.join(f'kvledger.{module}' for module in modules)}"
    ended = run(light_python, "-c", code, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", ["embed.py", "sglang_retraction.py"])
def test_the_core_is_embedded_without_an_engine(name: str, light_python: Path, tmp_path: Path) -> None:
    """The page's example prints what the page shows; its log is one for `kvledger`, and no rule is broken in it."""
    example = REPOSITORY / "docs/examples" / name
    ended = run(light_python, example, tmp_path / "log", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout in (REPOSITORY / "docs/embedding.md").read_text()
    judged = run(kvledger_of(light_python), "verify", tmp_path / "log", cwd=tmp_path)
    assert judged.returncode == SOUND, judged.stdout + judged.stderr


def test_the_first_example_is_short() -> None:
    """Under fifty lines to a first useful program."""
    assert len((REPOSITORY / "docs/examples/embed.py").read_text().splitlines()) < 50


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import kvledger.adapters.vllm", f"kvledger.adapters.vllm needs {INSTALL_CONNECTOR}"),
        ("import kvledger.adapters.vllm.metrics", f"kvledger.adapters.vllm needs {INSTALL_CONNECTOR}"),
        ("import kvledger.storage.kv", f"kvledger.storage.kv {INSTALL_TORCH}"),
        ("import kvledger.storage.events.nats", f"kvledger.storage.events.nats {INSTALL_NATS}"),
        (DRIVE_CONNECTOR, f"driving the real connector needs {INSTALL_CONNECTOR}"),
    ],
)
def test_what_lacks_an_extra_says_which(light_python: Path, tmp_path: Path, code: str, message: str) -> None:
    """The error's last line is the remedy, wherever it is raised from."""
    ended = run(light_python, "-c", code, cwd=tmp_path)
    assert ended.returncode != 0
    assert ended.stderr.splitlines()[-1] == f"ModuleNotFoundError: {message}"


@pytest.mark.parametrize(
    "arguments",
    [("verify", "nats://host/STREAM"), ("ship", ".", "--to", "nats://host"), ("ship", "--list", "nats://host")],
)
def test_a_stream_names_the_extra_for_streams(light_python: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Before any server is asked."""
    ended = run(kvledger_of(light_python), *arguments, cwd=tmp_path)
    assert ended.returncode == REFUSED
    assert ended.stderr == f"kvledger: kvledger.storage.events.nats {INSTALL_NATS}\n"


def test_conformance_names_the_extra(light_python: Path, tmp_path: Path) -> None:
    """Before the connector is looked for."""
    ended = run(kvledger_of(light_python), "conformance", "no.such:Connector", cwd=tmp_path)
    assert ended.returncode == REFUSED
    assert ended.stderr == f"kvledger: kvledger conformance needs {INSTALL_CONNECTOR}\n"


def test_check_names_the_extra(light_python: Path, tmp_path: Path) -> None:
    """Before it looks at anything but whether it is JSON."""
    ended = run(kvledger_of(light_python), "check", '{"chunksize": 32}', cwd=tmp_path)
    assert ended.returncode == REFUSED
    assert ended.stderr == f"kvledger: kvledger check needs {INSTALL_CONNECTOR}\n"


def test_spans_name_the_extra(light_python: Path, example_log: Path, tmp_path: Path) -> None:
    """Before the log is read."""
    ended = run(kvledger_of(light_python), "export", example_log, "--otlp", "spans.jsonl", cwd=tmp_path)
    assert ended.returncode == REFUSED
    modules = "opentelemetry.sdk, opentelemetry.exporter.otlp.proto.http"
    remedy = "pip install 'kvledger[otlp]'"
    assert ended.stderr == f"kvledger: kvledger export --otlp needs {modules}, not installed here: {remedy}\n"


def test_tables_name_the_extra(light_python: Path, example_log: Path, tmp_path: Path) -> None:
    """Before the log is read. A program gets the same message."""
    remedy = "not installed here: pip install 'kvledger[lake]'"
    ended = run(kvledger_of(light_python), "tables", example_log, "-o", "tables", cwd=tmp_path)
    assert ended.returncode == REFUSED
    assert ended.stderr == f"kvledger: kvledger tables needs pyarrow, {remedy}\n"
    assert not list(tmp_path.iterdir())
    code = "import kvledger, sys; kvledger.open_log(sys.argv[1]).to_arrow('requests')"
    ended = run(light_python, "-c", code, example_log, cwd=tmp_path)
    assert ended.stderr.splitlines()[-1] == f"ModuleNotFoundError: Log.to_arrow needs pyarrow, {remedy}"


def test_handlers_that_need_the_connector_say_so(light_python: Path, example_log: Path, tmp_path: Path) -> None:
    """A handler is any module's."""
    (tmp_path / "borrowed.py").write_text("from kvledger.adapters.vllm import KVLedgerConnector as Handler\n")
    code = "import sys; from kvledger.adapters.tools.cli.main import main; sys.exit(main())"
    ended = run(light_python, "-c", code, "verify", example_log, "--handlers", "borrowed:Handler", cwd=tmp_path)
    assert ended.returncode not in (0, RULE_BROKEN)
    assert f"kvledger.adapters.vllm needs {INSTALL_CONNECTOR}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_demo_names_the_extra(light_python: Path, tmp_path: Path) -> None:
    """Before it starts an engine."""
    ended = run(light_python, "-m", "kvledger.adapters.lab.demo", cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.replace("\n", " ").strip() == f"demo failed: the demo needs {INSTALL_CONNECTOR}"
    assert not list(tmp_path.iterdir())


def test_every_extra_brings_what_it_is_named_for() -> None:
    """Names of modules here, names of distributions in pyproject.toml: installing the extra must end the message."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = {
        extra: {canonicalize_name(Requirement(text).name) for text in texts}
        for extra, texts in project["optional-dependencies"].items()
    }
    assert extras.keys() == set(EXTRAS.values())
    distributions = packages_distributions()
    for module, extra in EXTRAS.items():
        brought = {canonicalize_name(name) for name in distributions[module.partition(".")[0]]} & extras[extra]
        # vLLM is there already; nkeys is an extra of nats-py itself.
        assert bool(brought) == (module not in {"vllm", "nkeys"}), module
