"""Which versions of vLLM are served, which are warned of, and which are refused before anything is imported of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import finished

from kvledger.adapters.vllm import versions

pytestmark = pytest.mark.scheduler


def install(version: str, directory: Path) -> None:
    """Let the distribution `vllm` of this version stand in a directory, as pip notes it down."""
    metadata = directory / "vllm-0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Any:
    """What operators are warned of, in words."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_the_vllm_of_these_tests_is_known(make_engine: Any, warnings: Any) -> None:
    """Whichever of the known ones it is."""
    make_engine(num_blocks=8, chunk_size=16)
    assert not any("has not been tested with" in warning for warning in warnings())


@pytest.mark.parametrize("version", ["0.32.0rc1", "0.32.1", "0.33.0", "0.33.1.dev12+g0a1b2c3"])
def test_every_build_of_a_known_release_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Any, version: str
) -> None:
    """Candidates, corrections, and what was built between two releases."""
    install(version, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    versions.refuse_older()
    versions.warn_of_unknown()
    assert versions.vllm_version() == version
    assert warnings() == []


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "0.1.dev1+g0a1b2c3", "a build of ours"])
def test_an_unknown_vllm_is_warned_of_once_for_each_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Any, make_engine: Any, version: str
) -> None:
    """With its version, the known ones, and what to do; it serves all the same, on all ranks."""
    install(version, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    versions.refuse_older()
    make_engine(num_blocks=20, chunk_size=16, num_ranks=2).serve("a", range(40), 3)
    (warning,) = [warning for warning in warnings() if "has not been tested with" in warning]
    assert f"kvledger has not been tested with vLLM {version}, only with 0.32 and 0.33" in warning
    assert "install a tested version" in warning


@pytest.mark.parametrize(
    "asked",
    ["from kvledger.adapters.vllm import KVLedgerConnector", "from kvledger.adapters.recorder import KVLedgerRecorder"],
)
def test_an_older_vllm_is_refused_before_its_hooks_are_imported(tmp_path: Path, asked: str) -> None:
    """With the reason and the remedy, where vLLM would have been told of a name that it cannot import."""
    install("0.31.2", tmp_path)
    ended = finished(
        [sys.executable, "-c", asked],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert ended.returncode == 1
    refusal = ended.stderr.splitlines()[-1]
    assert "vLLM 0.31.2 is too old for kvledger, which supports 0.32 and 0.33" in refusal
    assert 'pip install "vllm>=0.32"' in refusal
