"""Logs that are changed at random: every command ends as it says, in the memory and the time that the size allows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from log_fuzz.fuzz import Fuzz
from log_fuzz.run import fuzz
from log_fuzz.seeds import told

pytestmark = pytest.mark.xdist_group("log_fuzz")

NUM_CASES, NUM_SHORT = 2400, 30


@pytest.fixture
def _no_default_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reader's own settings."""
    monkeypatch.delenv("KVLEDGER_LOG", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_no_default_log")
def test_some_changed_logs_end_in_stated_exit_codes(tmp_path: Path) -> None:
    """The same ones each time; `make test-long` draws others."""
    runner = Fuzz(told(), tmp_path)
    failures = [str(failure) for number in range(NUM_SHORT) for failure in runner.run(runner.case(7, number))]
    assert not failures, "\n".join(failures)


# It waits for each command at most as long as `guarded.py` says; all of them together take long on a busy machine.
@pytest.mark.timeout(4 * 3600)
@pytest.mark.long
@pytest.mark.usefixtures("_no_default_log")
def test_changed_logs_end_in_stated_exit_codes() -> None:
    """Logs of simulated engines and recorders as well."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}: repeat it with `make fuzz SEED={seed}`")
    failures = fuzz(seed, range(NUM_CASES), with_engines=True)
    assert not failures, "\n".join(map(str, failures))
