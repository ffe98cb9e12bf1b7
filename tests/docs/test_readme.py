"""What a newcomer copies from the README works: the JSON object, the handler, the incident."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.adapters import vllm_plugin
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

LoadScript = Callable[[str], types.ModuleType]


def fenced(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def readme(documents: dict[str, str]) -> str:
    """The README's text."""
    return documents["README.md"]


def accepted(transfer: dict[str, Any]) -> ConnectorSettings:
    """Check an object for `--kv-transfer-config` as vLLM and the connector do."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert set(transfer) <= {field.name for field in dataclasses.fields(KVTransferConfig)}
    configuration = KVTransferConfig(**transfer)
    vllm_plugin.register()
    assert KVConnectorFactory.get_connector_class(configuration).__name__ == configuration.kv_connector
    assert configuration.kv_load_failure_policy == "fail", "the only policy that is right with async scheduling"
    return ConnectorSettings.from_extra_config(configuration.kv_connector_extra_config)


def test_the_json_object_of_the_readme_is_accepted(readme: str) -> None:
    """Copied from between the quotes of the command line."""
    (command,) = [block for block in fenced(readme, "bash") if "--kv-transfer-config" in block]
    settings = accepted(json.loads(command.split("'")[1]))
    assert settings.host_bytes == 16 * 1024**3
    assert settings.log_dir == Path("/var/log/kvledger")


def test_the_json_objects_of_the_quickstart_are_accepted(documents: dict[str, str]) -> None:
    """The first has the defaults, the second a pool for the demo's model."""
    blocks = [block for block in fenced(documents["docs/quickstart.md"], "bash") if "--kv-transfer-config" in block]
    first, second = (accepted(json.loads(block.split("'")[1])) for block in blocks)
    assert first == ConnectorSettings.from_extra_config({})
    assert second == ConnectorSettings.from_extra_config({"host_bytes": "2MiB"})


def test_the_json_objects_of_the_configuration_page_are_the_defaults(documents: dict[str, str]) -> None:
    """The least one and the one with every key mean the same."""
    least, every = (json.loads(block) for block in fenced(documents["docs/configuration.md"], "json"))
    assert accepted(least) == accepted(every) == ConnectorSettings.from_extra_config({})
    assert set(every["kv_connector_extra_config"]) == set(ConnectorSettings.model_fields)


def test_the_handler_of_the_documents_is_the_one_in_the_examples(documents: dict[str, str], repository: Path) -> None:
    """README, docs/extending.md and the file: word for word, but for the file's own docstring."""
    source = (repository / "docs/examples/save_when_preempted.py").read_text()
    code = source.partition('"""\n\n')[2]
    assert ast.parse(code).body
    for name in ("README.md", "docs/extending.md"):
        assert code in fenced(documents[name], "python"), name


@pytest.fixture
def own_core(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Core:
    """The core as the configuration of the README makes them."""
    monkeypatch.syspath_prepend(repository / "docs/examples")
    return ConnectorSettings.from_extra_config({"handlers": ["save_when_preempted:SaveWhenPreempted"]}).core()


def decoding_until_preempted(core: Core) -> Driver:
    """A request with two chunks of prompt decodes a third one, is preempted, and loads all three."""
    driver = Driver(chunk_size=16, block_size=16, core=core)
    keys = keys_of("a", 3)
    driver.start("a", keys[:2], 32, (1, 2, 3))
    driver.step(("a", 32, 1, 33), settled=[("a", 0, 32)])
    driver.settle_all()
    for _ in range(15):
        driver.step()
    driver.keys("a", 2, keys[2:])
    driver.step(settled=[("a", 2, 48)], extended=[("a", (4,))])
    driver.settle_all()
    driver.preempt("a", 48)
    driver.settle_all()
    driver.lookup("a", 0, 50)
    driver.allocate("a", (5, 6, 7, 8), 48)
    driver.step(("a", 48, 2, 50))
    driver.settle_all()
    driver.finish("a", 50, 51)
    driver.ledger.commit()
    return driver


def test_the_handler_of_the_documents_does_what_it_says(own_core: Core) -> None:
    """Nothing is saved while the request decodes; when it is preempted, all of it is; and it recovers as well."""
    built_in = decoding_until_preempted(Core.standard()).all_of(e.SaveIssued)
    assert [(save.chunks, save.before_forward) for save in built_in] == [((0, 1), False), ((2,), False)]
    driver = decoding_until_preempted(own_core)
    (save,) = driver.all_of(e.SaveIssued)
    assert (save.chunks, save.before_forward) == ((0, 1, 2), True)
    (load,) = driver.all_of(e.LoadIssued)
    assert load.num_tokens == 48


def test_a_log_of_own_core_is_audited_with_them(own_core: Core) -> None:
    """As docs/extending.md shows: sound with its own handlers; the built-in ones decide otherwise and break no rule."""
    driver = decoding_until_preempted(own_core)
    audit = Audit(own_core, driver.configuration)
    audit.run(driver.sink.events())
    assert audit.is_sound, (audit.violations, audit.divergences)
    audit = Audit(Core.standard(), driver.configuration)
    audit.run(driver.sink.events())
    assert audit.divergences
    assert not audit.violations
