"""No message of a command shows the credentials of an address."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvledger.adapters.tools.exit_codes import ExitCode

SECRET = "hunter2"  # noqa: S105 -- made up
ADDRESSES = (
    f"nats://user:{SECRET}@host/STREAM",
    f"nats://user:p/{SECRET}@host/STREAM",
    f"nats://user:p@{SECRET}@host/STREAM",
    f"nats://user:p w {SECRET}@host/STREAM",
    f"nats://{SECRET}@host/STREAM",
    f"nats://host/STREAM?token={SECRET}",
    f"nats://host/STREAM#{SECRET}",
    f"tls://user:{SECRET}@host",
    f"NATS://user:{SECRET}@host/STREAM",
    f"http://user:{SECRET}@host/STREAM",
    f"http:/user:{SECRET}@host/STREAM",
    f"nats:user:{SECRET}@host/STREAM",
    f"user:{SECRET}@host/STREAM",
    f"user:p/{SECRET}@host/STREAM",
    f"{SECRET}@host/STREAM",
)


@pytest.mark.parametrize("command", ["verify", "show", "ship", "why", "retire", "ls"])
@pytest.mark.parametrize("address", ADDRESSES)
def test_credentials_in_the_default_log_are_not_shown(
    run: Any, monkeypatch: pytest.MonkeyPatch, address: str, command: str
) -> None:
    """Incident: errors quoted KVLEDGER_LOG, up to its first slash or with a slash missing."""
    monkeypatch.setenv("KVLEDGER_LOG", address)
    arguments = {"ship": ["--to", "nats://127.0.0.1:1"], "why": ["chat-9"], "retire": ["--max-age", "1d"]}
    result = run(command, *arguments.get(command, []))
    assert result.exit_code != 0
    assert result.err
    assert SECRET not in result.out + result.err


@pytest.mark.parametrize("address", ADDRESSES)
def test_credentials_in_an_argument_are_not_shown(run: Any, address: str) -> None:
    """As LOG, as REQUEST, and where no argument may be."""
    for words in (("verify", address), ("why", address, "chat-9"), ("why", "chat-9", address), ("core", address)):
        result = run(*words)
        assert result.exit_code != 0
        assert SECRET not in result.out + result.err
    if address.startswith(("nats://", "tls://")) and " " not in address:
        assert SECRET not in run("show", ".", "x", address).err


def test_what_is_no_address_of_logs_is_refused_with_what_is(run: Any) -> None:
    """Before, a path without its second slash was looked for."""
    result = run("verify", f"http://user:{SECRET}@host/STREAM")
    assert result.exit_code == ExitCode.REFUSED
    assert "http://host/STREAM: not an address of logs; give a path, or nats://host/STREAM[/LOG_ID]" in result.err


@pytest.mark.parametrize("address", [each for each in ADDRESSES if "://" in each])
def test_credentials_of_a_target_for_spans_are_not_shown(
    run: Any, monkeypatch: pytest.MonkeyPatch, log: Any, address: str
) -> None:
    """Whatever is wrong with it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # of the exporter's retries: nobody listens
    for target in (address, address.replace("nats:", "http:"), address.replace("nats:", "http:").replace("host", "")):
        result = run("export", log, "--otlp", target)
        assert result.exit_code != 0
        assert SECRET not in result.out + result.err


def test_the_traceback_of_a_mistake_shows_none(run: Any, log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries quote addresses in their exceptions."""
    from kvledger.adapters.tools.cli import finding

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"cannot reach nats://user:{SECRET}@host")

    monkeypatch.setattr(finding, "find_logs", fail)
    monkeypatch.setenv("KVLEDGER_TRACEBACK", "1")
    result = run("verify", log)
    assert result.exit_code == ExitCode.INTERNAL_ERROR
    assert "Traceback" in result.err
    assert "nats://host" in result.err
    assert SECRET not in result.err


def nested(**extra: Any) -> str:
    """A recorder around a connector with a password."""
    inner = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"pwd": SECRET}}
    return json.dumps({"log_dir": None, "connector": inner, **extra})


@pytest.mark.scheduler
@pytest.mark.parametrize(
    "configuration",
    [
        nested(conector={"pwd": SECRET}),
        nested(password=SECRET),
        nested(host_pass=SECRET),
        nested(pin=SECRET),
        nested(log_dir={"pwd": SECRET}),
        nested(connector={"pwd": SECRET}),
        nested(connector=[{"pwd": SECRET}]),
        nested(connector={"kv_connector": "Nobody", "kv_role": "kv_both", "pwd": SECRET}),
        json.dumps({"host_bytes": "1GiB", "password": SECRET}),
        json.dumps({"host_bytes": f"redis://u:p/{SECRET}@host"}),
        nested(connector=json.dumps({"kv_connector": "OffloadingConnector", "pwd": SECRET})),
        nested(connector=f" [{{'pwd': '{SECRET}'}}]"),
        nested(connector=SECRET),
        nested(log_dir=f"nats://user:{SECRET}@host/STREAM"),
        nested(log_dir=f"s3:/{SECRET}@bucket/logs"),
        json.dumps({"log_dir": f"https://host/logs?token={SECRET}"}),
        json.dumps({"kv_connector": "KVLedgerConnector", "kv_connector_extra_config": json.dumps({"pwd": SECRET})}),
        json.dumps({"handlers": json.dumps({"pwd": SECRET})}),
        json.dumps({"handlers": [{"pwd": SECRET}]}),
        json.dumps({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": {"pwd": SECRET}}}),
        json.dumps({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"pwd": SECRET}]}}),
        json.dumps(
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {"connectors": json.dumps([{"pwd": SECRET}])},
            }
        ),
        f"'{nested()}'",
        json.dumps([SECRET]),
        json.dumps(nested()),
        nested()[:-1],
    ],
)
def test_what_check_refuses_shows_no_password(run: Any, configuration: str) -> None:
    """Incident: an object in the wrong place, a misplaced key and an argument in quotes were printed in full."""
    for form in ((), ("--json",)):
        result = run("check", *form, configuration)
        assert result.exit_code != 0
        assert result.out + result.err
        assert SECRET not in result.out + result.err


@pytest.mark.parametrize("given", [f'{{"pwd": "{SECRET}"', f'["{SECRET}"]', f'"{SECRET}"'])
def test_extra_configuration_that_is_no_json_is_not_shown(run: Any, given: str) -> None:
    """`conformance` says only what is wrong."""
    result = run("conformance", "a:B", "--extra-config", given)
    assert result.exit_code == ExitCode.USAGE
    assert SECRET not in result.err
