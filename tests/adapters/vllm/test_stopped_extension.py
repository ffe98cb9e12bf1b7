"""An extension that raises, on the real scheduler: everybody is served as without it, and the log says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sim.starving import live
from starvation_guard import StarvationGuard, Starving, StarvingKept, StarvingRequests, Watching

from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle import Core, Extension, ProjectionSpec, RequestState, StateHandler, Turn
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

pytestmark = pytest.mark.scheduler


class Fragile(Watching):
    """Cannot count to three."""

    state = RequestState.RUNNING

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """Once too often."""
        super().request_preempted(turn, event)
        _ = ("never", "once", "twice")[turn.record.num_preemptions]


class FragileHandler(StarvationGuard):
    """Of one state."""

    handlers = (Fragile,)


class Requests(StarvingRequests):
    """Cannot take up the end of one that never starved."""

    def _ended(self, event: e.RequestEvent, sequence: int) -> None:
        if isinstance(event, e.RequestFinished) and event.request_id not in self.state.starving.values():
            raise KeyError(event.request_id)
        super()._ended(event, sequence)


class FragileProjection(StarvationGuard):
    """Cannot fold what most requests do."""

    projections = (ProjectionSpec("starving", lambda _its: Requests()),)


class FragileOrder(StarvationGuard):
    """Cannot say what it keeps."""

    def keeps(self, projections: Any, key: bytes) -> bool:
        """As soon as it is to keep something."""
        if super().keeps(projections, key):
            raise OSError(key)
        return False


class Talks(StateHandler):
    """Has a word to say about each answer to a lookup."""

    state = RequestState.PREEMPTED

    def lookup_requested(self, turn: Turn, _event: e.LookupRequested) -> None:
        """Behind the answer."""
        turn.decide(Talkative.decided(turn, Starving(turn.record.num_preemptions)))


class Talkative(Extension):
    """Decides where vLLM waits for an answer."""

    name = "talkative"
    events = {"said": Starving}  # noqa: RUF012 -- as its parent's
    handlers = (Talks,)


def lived(folder: Path, *extensions: type[Extension]) -> tuple[Path, Any]:
    """The log of the world with these extensions, and what its engine was."""
    engine = live(folder, [f"{extension.__module__}:{extension.__name__}" for extension in extensions])
    (log,) = (path for path in folder.iterdir() if path.is_dir())
    return log, engine


def events_of(log: Path) -> list[tuple[int, e.Event]]:
    """All of a log."""
    return list(open_log(log).trusted_events())


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and output of a command, in one line."""
    code = main([str(argument) for argument in arguments])
    return code, " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("extension", "where"),
    [
        (FragileHandler, "Fragile.request_preempted"),
        (FragileProjection, "projection starving"),
        (FragileOrder, "keeps"),
    ],
)
def test_an_extension_that_raises_is_stopped_and_everybody_is_served(
    extension: type[Extension],
    where: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All outputs are right, no request pays, one line tells people, and each command says it."""
    log, engine = lived(tmp_path / "logs", extension)
    assert caplog.text.count("an extension raised an exception and is off") == 1
    assert {len(output) for output in engine.outputs.values()} == {110}
    found = events_of(log)
    ((number, stopped),) = ((at, event) for at, event in found if isinstance(event, e.ExtensionStopped))
    assert (stopped.extension, stopped.where) == ("starvation", where)
    assert not [event for _, event in found if isinstance(event, e.RequestQuarantined | e.InvariantViolated)]
    assert any(isinstance(event, e.LoadCompleted) for at, event in found if at > number), "nobody recovers any more"
    for reader in (extension(), StarvationGuard()):
        if reader.handlers != extension.handlers:
            continue  # it decides otherwise
        stored = open_log(log, Core.standard().extended(reader))
        audit = Audit(stored.core, stored.configuration)
        audit.run_frames(stored.trusted_frames())
        assert audit.is_sound, (audit.violations, audit.divergences)
        assert audit.judgement().not_judged == {StarvingKept.rule: f"its extension was stopped at event {number}"}
    alive = next(event for at, event in found if at > number and isinstance(event, e.LookupAnswered)).request_id
    for command in (["show", log, alive], ["why", log, alive]):
        code, said = told(capsys, *command)
        assert code == 0, said
        assert f"extension starvation 1 is STOPPED from here on: {where} raised" in said, command
    assert f"not installed here, stopped at event {number}" in told(capsys, "core", log)[1]
    code, said = told(capsys, "verify", log)
    assert code == 6
    assert "but an extension was stopped; not checked: rules of extension starvation" in said
    assert f"extension starvation 1 was stopped at event {number}, because {where} raised {stopped.error}." in said
    assert "and its rule STARVING_KEPT was not checked" in said
    assert "stopped" in told(capsys, "stats", log)[1]
    page = tmp_path / "page.html"
    assert told(capsys, "export", log, "--html", "-o", page)[0] == 0
    assert "because" in page.read_text()
    assert "but an extension was stopped" in page.read_text()


def test_a_stopped_extension_is_named_whatever_else_is_said_of_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its code and without, by one process and by several, in JSON, beside a sound log, and of a part of it."""
    log, _ = lived(tmp_path / "logs", FragileHandler)
    plain, _ = lived(tmp_path / "plain")
    guard = ("--extensions", f"{FragileHandler.__module__}:{FragileHandler.__name__}")
    monkeypatch.setattr("kvledger.adapters.tools.cli.verify.MIN_BYTES", 1)
    for options in ((), guard, ("--jobs", "2"), ("--lenient",)):
        capsys.readouterr()
        assert main(["verify", str(log), "--json", *options]) == 6, options
        objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        (verdict,) = [each for each in objects if each["type"] == "verdict"]
        (stopped,) = verdict["stopped_extensions"]
        assert stopped["extension"] == "starvation"
        assert stopped["where"] == "Fragile.request_preempted"
        assert stopped["error"].startswith("IndexError in ")
        assert stopped["rules"] == ["STARVING_KEPT"]
        assert sum("was stopped at event" in remark for remark in verdict["remarks"]) == 1
        assert "STARVING_KEPT" not in verdict["rules"]
        assert verdict["verdict"] == "extension_stopped"
    together = tmp_path / "both"
    together.mkdir()
    for each in (log, plain):
        shutil.copytree(each, together / each.name)
    assert told(capsys, "verify", together)[0] == 6
    at = int(stopped["sequence"])
    assert main(["verify", str(log), "--until", str(at - 1)]) == 0, "it was not stopped yet"
    assert main(["verify", str(log), "--since", str(at + 1)]) == 6


def test_what_an_extension_decides_behind_an_answer_does_not_cost_the_answer(tmp_path: Path) -> None:
    """The scheduler is told what the log says that it was told, so preempted requests recover."""
    log, _ = lived(tmp_path / "logs", Talkative)
    found = [event for _, event in events_of(log)]
    assert any(isinstance(event, e.ExtensionDecided) for event in found)
    plain, _ = lived(tmp_path / "plain")
    num_loads = [sum(isinstance(event, e.LoadCompleted) for _, event in events_of(each)) for each in (log, plain)]
    assert num_loads[0] == num_loads[1] > 0
