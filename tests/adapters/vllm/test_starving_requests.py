"""The example of an extension, on the real scheduler: requests starve, and the log is read with and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sim.starving import live
from starvation_guard import StarvationGuard, Starving, StarvingKept

from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

pytestmark = [pytest.mark.scheduler, pytest.mark.xdist_group("starving")]

GUARD = "starvation_guard:StarvationGuard"


class Careless(StarvationGuard):
    """Says who is starving, and keeps nothing."""

    def keeps(self, _projections: Any, _key: bytes) -> bool:
        """Nothing."""
        return False


def lived(folder: Path, extension: str) -> Path:
    """The log of the world with an extension."""
    live(folder, [extension])
    (log,) = (path for path in folder.iterdir() if path.is_dir())
    return log


@pytest.fixture(scope="module")
def starving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world's log, written with the guard."""
    return lived(tmp_path_factory.mktemp("starving"), GUARD)


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and output of a command, in one line."""
    code = main([str(argument) for argument in arguments])
    return code, " ".join(capsys.readouterr().out.split())


def judged(log: Path, *extensions: StarvationGuard) -> Audit:
    """The audit of a log, by a reader that has these extensions."""
    stored = open_log(log, Core.standard().extended(*extensions))
    audit = Audit(stored.core, stored.configuration)
    audit.run_frames(stored.trusted_frames())
    return audit


def of_starving(log: Path) -> list[e.ExtensionDecided]:
    """What the guard said."""
    return [event for _, event in open_log(log).trusted_events() if isinstance(event, e.ExtensionDecided)]


def test_requests_starve_and_the_log_is_sound(starving: Path) -> None:
    """It says who is preempted twice, chunks are evicted all the while, and no rule is broken, nor the guard's own."""
    said = [StarvationGuard.payload_of(event) for event in of_starving(starving)]
    assert said
    assert all(isinstance(each, Starving) and each.num_preemptions >= 2 for each in said)
    audit = judged(starving, StarvationGuard())
    assert audit.is_sound, (audit.violations, audit.divergences)
    assert audit.judgement().num_unjudged == 0
    evicted = [event for _, event in open_log(starving).trusted_events() if isinstance(event, e.ChunksEvicted)]
    assert sum(len(event.keys) for event in evicted) > len(said)


def test_without_its_order_of_eviction_the_rule_is_broken(tmp_path: Path) -> None:
    """The same world, where nothing is kept for those who starve."""
    log = lived(tmp_path, f"{Careless.__module__}:{Careless.__name__}")
    assert of_starving(log)
    assert judged(log, StarvationGuard()).num_violations.keys() == {StarvingKept.rule}


def test_verify_judges_it_with_the_extension(starving: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own rule, too."""
    code, verdict = told(capsys, "verify", starving, "--extensions", GUARD)
    assert code == 0, verdict
    assert "which is not installed here" not in verdict


def test_verify_says_what_a_reader_without_it_lacks(starving: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And verifies the rest: the states are the same but for what the extension alone remembers."""
    code, verdict = told(capsys, "verify", starving)
    assert code == 0, verdict
    num_said = len(of_starving(starving))
    assert f"was written with extension starvation 1 ({GUARD}), which is not installed here" in verdict
    assert f"{num_said} events of extensions were accepted; its rules {StarvingKept.rule} were not checked" in verdict
    with_it, without = judged(starving, StarvationGuard()), judged(starving)
    assert without.is_sound, (without.violations, without.divergences)
    assert without.judgement().num_unjudged > 0
    assert without.projections.snapshot().items() < with_it.projections.snapshot().items()


@pytest.mark.parametrize("options", [(), ("--extensions", GUARD)], ids=["without", "with"])
def test_its_events_and_sub_states_are_shown(
    starving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    """In `show`, `why` and every export, with and without its code."""
    request_id = of_starving(starving)[-1].request_id
    for command in ("show", "why"):
        code, shown = told(capsys, command, starving, request_id)
        assert code == 0, shown
        assert "starvation 1: starving (num_preemptions " in shown, command
    assert "preempted.starving" in told(capsys, "show", starving, request_id)[1]
    assert "sub-state preempted.starving" in told(capsys, "core", starving, *options)[1]
    for form in (["--html"], ["--perfetto"]):
        code, said = told(capsys, "export", starving, *form, "-o", tmp_path / form[0], *options)
        assert code == 0, said
        assert "starving" in (tmp_path / form[0]).read_text(), form
