"""`kvledger repro`: what it writes, and what it says where there is nothing to write."""

from __future__ import annotations

import importlib
import logging
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from lifecycle_driver import Driver, keys_of
from stored_logs import replaced, write_log

from kvledger.adapters.lab.repro import command, read_recording, rerun_core
from kvledger.adapters.lab.repro.chosen import Chosen
from kvledger.adapters.lab.repro.outcome import Trouble
from kvledger.adapters.lab.repro.run_once import Ended, run_once
from kvledger.adapters.lab.repro.write import Description, test_source
from kvledger.lifecycle import events as e

BROKEN = "ALLOC_MATCHES_LOOKUP"


@pytest.fixture
def broken_log(story: Driver, tmp_path: Path) -> Path:
    """After its preemption the request took up more than it was answered, and the connector did not notice."""
    events = replaced(story.observed, e.BlocksAllocated, 1, num_external_tokens=80)
    return write_log(tmp_path / "broken", events, story.configuration)


@pytest.fixture
def test_path(tmp_path: Path) -> Path:
    """Where the test is written."""
    return tmp_path / "test_incident.py"


@pytest.fixture
def repro(run: Any, test_path: Path) -> Callable[..., Any]:
    """`kvledger repro ... --core -o test_incident.py`."""
    return lambda *arguments: run("repro", *arguments, "--core", "-o", test_path)


def only_test(path: Path) -> Callable[[], None]:
    """The test function of a written file."""
    (test,) = [value for name, value in runpy.run_path(str(path)).items() if name.startswith("test_")]
    return test  # type: ignore[no-any-return]


def test_a_broken_rule_becomes_a_test_that_breaks_it(repro: Any, broken_log: Path, test_path: Path) -> None:
    """What vLLM took up is part of the recording, so the rule stays broken; the message names rule, hook and event."""
    assert repro(broken_log, "chat-17").exit_code == 0
    with pytest.raises(AssertionError, match=rf"{BROKEN} was broken for chat-17-b6 in update_state_after_alloc"):
        only_test(test_path)()


def test_the_test_is_short_and_its_docstring_says_what_went_wrong(
    repro: Any, broken_log: Path, test_path: Path
) -> None:
    """Rule, event, request, detail, versions and the command."""
    repro(broken_log, "chat-17")
    docstring = " ".join(runpy.run_path(str(test_path))["__doc__"].split())
    assert f"broke {BROKEN} for chat-17-b6 at event" in docstring
    assert "80 external tokens were claimed, but 64 had been offered" in docstring
    assert "kvledger 0.1.0 with vLLM 0.32.0" in docstring
    assert f"kvledger repro {broken_log} chat-17 -o {test_path} --core" in docstring
    code = test_path.read_text().rpartition('"""\n\nfrom __future__')[2]
    assert len(code.splitlines()) <= 15


def test_the_log_next_to_it_is_one_for_every_command(run: Any, repro: Any, broken_log: Path, test_path: Path) -> None:
    """It ends with the incident, names the request, and `verify` finds the same rule broken and nothing else."""
    repro(broken_log, "chat-17")
    log = test_path.with_suffix(".kvlog")
    observations = read_recording(log).observations
    assert isinstance(observations[-1][1], e.BlocksAllocated)
    verified = run("verify", log, "--json").objects("verdict")
    assert [found["verdict"] for found in verified] == ["rule_broken"]
    shown = run("show", log)
    assert "chat-17-b6" in shown.out
    assert "chat-9" not in shown.out
    assert run("why", log, "chat-17").exit_code == 0


def test_chunk_keys_of_the_log_are_in_neither_file(repro: Any, broken_log: Path, test_path: Path) -> None:
    """They are numbered: equal numbers for equal keys is all that matters."""
    repro(broken_log, "chat-17", "--all")
    recording = read_recording(test_path.with_suffix(".kvlog"))
    (first, *_) = [event.keys for _, event in recording.observations if isinstance(event, e.ChunkKeysObserved)]
    assert [int.from_bytes(key, "big") for key in first] == [1, 2, 3, 4, 5]
    content = test_path.read_bytes() + test_path.with_suffix(".kvlog").read_bytes()
    assert not any(key in content or key.hex().encode() in content for key in keys_of("a", 8))


def test_nothing_is_replaced_without_a_word(run: Any, repro: Any, broken_log: Path, test_path: Path) -> None:
    """Neither of the two files; with --force both are."""
    log = test_path.with_suffix(".kvlog")
    log.write_text("mine")
    refused = repro(broken_log)
    assert refused.exit_code == 64
    assert f"{log} exists already" in refused.err
    assert not test_path.exists()
    assert repro(broken_log, "--force").exit_code == 0
    assert read_recording(log).observations
    assert "is not a Python file" in run("repro", broken_log, "-o", log).err


def test_a_folder_that_is_not_there_is_reported_before_any_work(
    run: Any, broken_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: minutes of reductions, and then "No such file or directory"."""
    monkeypatch.delattr(command, "_made")
    path = tmp_path / "missing" / "test_incident.py"
    result = run("repro", broken_log, "-o", path)
    assert result.exit_code == 64
    assert f"{path}: No such file or directory; name a file in a folder that can be written" in result.err
    assert not path.parent.exists()


def test_messages_of_vllm_are_off_while_reductions_run(
    repro: Any, broken_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rerun would repeat them."""
    reduce, disabled = command.reduce, []

    def reduce_watched(*arguments: Any, **options: Any) -> Any:
        disabled.append(logging.root.manager.disable)
        return reduce(*arguments, **options)

    monkeypatch.setattr(command, "reduce", reduce_watched)
    assert repro(broken_log).exit_code == 0
    assert disabled == [logging.CRITICAL]
    assert logging.root.manager.disable == logging.NOTSET


def test_without_a_request_the_first_incident_of_the_log_is_taken(
    repro: Any, broken_log: Path, test_path: Path
) -> None:
    """On call one knows the log, not always the request."""
    assert repro(broken_log).exit_code == 0
    assert BROKEN in test_path.read_text()


def test_the_answers_of_a_request_can_be_pinned(repro: Any, log: Path, test_path: Path) -> None:
    """Nothing went wrong, and the test passes; from a smaller pool it fails and says which lookup."""
    assert repro(log, "chat-17", "--pin").exit_code == 0
    only_test(test_path)()
    recording = read_recording(test_path.with_suffix(".kvlog"))
    stricter = attrs.evolve(recording, configuration=attrs.evolve(recording.configuration, num_slots=1))
    assert "chat-17-b6 gets 16 tokens in the lookup of event" in rerun_core(stricter).other_answers[0]


HANDLERS = """
from typing import ClassVar

from cached_answer import CachedAnswer

_hits = {}


class OfInstance(CachedAnswer):
    pass


class OfClass(CachedAnswer):
    hits: ClassVar = {}

    def __init__(self):
        self._hits = self.hits


class OfModule(CachedAnswer):
    def __init__(self):
        self._hits = _hits
"""
"""Handlers with a bug that needs a memory, which each of them keeps elsewhere."""


@pytest.fixture
def cached_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of the example of LMCache#2158; handlers with the same bug can be imported."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "docs/examples"))
    folder = tmp_path / "handlers"
    folder.mkdir()
    (folder / "with_memory.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "with_memory", raising=False)
    log: Path = importlib.import_module("cached_answer").write_log(tmp_path / "log")
    return log


@pytest.mark.parametrize("handler", ["OfInstance", "OfClass", "OfModule"])
def test_a_bug_that_needs_a_memory_comes_back_in_a_test_of_its_own(
    repro: Any, cached_answer: Path, test_path: Path, handler: str
) -> None:
    """LMCache#2158: all trials shared one handler, so the written test passed with the bug on, and nobody looked."""
    result = repro(cached_answer, "--handlers", f"with_memory:{handler}")
    assert "run once and fails, as it should" in result.err
    assert result.exit_code == 0
    (run,) = run_once(test_path)
    assert run.ended is Ended.FAILED
    assert "LOOKUP_PURE was broken" in run.text
    assert "the bug is fixed" not in test_path.read_text()


def test_nothing_around_a_log_is_imported(
    run: Any, cached_answer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: the folder of the test came first on the import path of the process that ran it once.

    Whoever unpacked logs of a stranger and called `kvledger repro` there ran what lay next to them: a module with the
    name of a known one, or one that an installed package seemed to name as an extension.
    """
    folder = tmp_path / "unpacked"
    folder.mkdir()
    monkeypatch.chdir(folder)
    trace = f"from pathlib import Path\nPath({str(tmp_path)!r}, 'ran').touch()\n"
    monkeypatch.setattr(sys, "path", [*sys.path, "hook"])  # as an editable installation has it
    (folder / "hook").mkdir()
    for name in ("sitecustomize", "runpy", "attrs", "conftest", "planted", "hook/sitecustomize"):
        (folder / f"{name}.py").write_text(trace)
    entry_points = folder / "planted-1.dist-info"
    entry_points.mkdir()
    (entry_points / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (entry_points / "entry_points.txt").write_text("[kvledger.extensions]\na = planted:Planted\n")
    result = run("repro", cached_answer, "--core", "--handlers", "with_memory:OfInstance", "-o", folder / "test_x.py")
    assert "run once and fails, as it should" in result.err
    assert not (tmp_path / "ran").exists()


def test_a_test_that_passes_is_reported_as_one(repro: Any, cached_answer: Path, test_path: Path) -> None:
    """Without the handler that has the bug; the exit code says so, too, and the files are there."""
    result = repro(cached_answer)
    assert result.exit_code == 3
    assert "run once and passes, so it does not show the incident: the engine had other state handlers" in result.err
    assert "--handlers" in result.err
    assert run_once(test_path)[0].ended is Ended.PASSED
    (found,) = repro(cached_answer, "--force", "--json").objects("repro")
    assert (found["recurs"], [run["ended"] for run in found["runs"]]) == (False, ["passed"])


def test_a_test_that_cannot_be_run_is_reported_as_one(
    repro: Any, cached_answer: Path, test_path: Path, tmp_path: Path
) -> None:
    """What it imports is not there for another process."""
    once = tmp_path / "once"
    (tmp_path / "handlers/only_once.py").write_text(
        f"from pathlib import Path\nfrom cached_answer import CachedAnswer\nPath({str(once)!r}).mkdir()\n"
    )
    result = repro(cached_answer, "--handlers", "only_once:CachedAnswer")
    assert result.exit_code == 7
    assert "the test could not be run here: " in result.err
    assert "File exists" in result.err
    assert test_path.exists()


def test_whoever_runs_the_test_elsewhere_need_not_run_it_here(repro: Any, broken_log: Path, test_path: Path) -> None:
    """And is told so."""
    result = repro(broken_log, "--no-run")
    assert result.exit_code == 0
    assert "the test was not run" in result.err
    (found,) = repro(broken_log, "--no-run", "--force", "--json").objects("repro")
    assert found["runs"] == []
    assert test_path.exists()


def test_a_pinned_answer_that_is_another_one_here_is_reported(
    run: Any, story: Driver, test_path: Path, tmp_path: Path
) -> None:
    """The log was written by code that answers otherwise."""
    events = replaced(story.observed, e.LookupAnswered, 0, num_external_tokens=8)
    log = write_log(tmp_path / "other", events, story.configuration)
    result = run("repro", log, "chat-17", "--pin", "--core", "-o", test_path)
    assert result.exit_code == 3
    assert "fails here, although it should pass: AssertionError" in result.err


def test_where_nothing_went_wrong_pinning_is_offered(repro: Any, log: Path, test_path: Path) -> None:
    """No file is written, which a script sees by the exit code."""
    result = repro(log, "chat-17")
    assert (result.exit_code, test_path.exists()) == (64, False)
    assert "no rule was broken and no hook failed for chat-17-b6" in result.err
    assert "--pin" in result.err


def test_others_with_whom_something_went_wrong_are_named(repro: Any, broken_log: Path) -> None:
    """The incident may be another request's."""
    result = repro(broken_log, "chat-9")
    assert result.exit_code == 64
    assert "something failed for chat-17-b6" in result.err


def test_what_cannot_be_meant_is_refused(repro: Any, log: Path) -> None:
    """As by every command; and whose answers?"""
    assert "no request has 'nobody' in its id" in repro(log, "nobody").err
    assert "--pin needs a REQUEST" in repro(log, "--pin").err
    assert repro(log, "--pin").exit_code == 64


def test_a_call_of_which_nothing_was_recorded_cannot_be_made_again(repro: Any, story: Driver, tmp_path: Path) -> None:
    """The log has the hook's name and the error, which is quoted."""
    failed = e.HookFailed("on_new_request", "odd", "KeyError in f, g.py:1", 1)
    log = write_log(tmp_path / "failed", [*story.observed, failed], story.configuration)
    result = repro(log)
    assert result.exit_code == 64
    assert "hook on_new_request raised: KeyError in f, g.py:1" in result.err
    assert "before kvledger recorded the call" in result.err


def test_a_log_that_begins_late_is_refused(repro: Any, story: Driver, tmp_path: Path) -> None:
    """Without what came before, nothing can be run again."""
    directory = write_log(tmp_path / "log", story.observed, story.configuration, segment_bytes=1 << 10)
    late = sorted(directory.glob("*.kvlog"))[1]
    result = repro(late, "chat-17")
    assert result.exit_code == 5
    assert "begins with event" in result.err


def test_damage_behind_the_incident_does_not_matter(repro: Any, broken_log: Path, test_path: Path) -> None:
    """The last frame is torn: that is reported, and the test is written."""
    (segment,) = broken_log.glob("*.kvlog")
    segment.write_bytes(segment.read_bytes()[:-3])
    result = repro(broken_log, "chat-17")
    assert result.exit_code == 0
    assert "torn_tail" in result.err
    assert BROKEN in test_path.read_text()


def test_nothing_behind_a_gap_is_looked_at(repro: Any, broken_log: Path) -> None:
    """What the state was there is not known."""
    (segment,) = broken_log.glob("*.kvlog")
    content = bytearray(segment.read_bytes())
    content[-600] ^= 0xFF  # well behind the header
    segment.write_bytes(content)
    result = repro(broken_log, "chat-17")
    assert result.exit_code == 64
    assert "can be run again" in result.err


def test_a_log_that_is_damaged_next_to_its_test_is_refused(repro: Any, broken_log: Path, test_path: Path) -> None:
    """A test that passes because half of its log is gone would be worse than none."""
    repro(broken_log, "chat-17")
    log = test_path.with_suffix(".kvlog")
    log.write_bytes(log.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"is damaged: .* write it again"):
        only_test(test_path)()


def test_one_can_end_earlier(repro: Any, broken_log: Path) -> None:
    """Before the incident there is none."""
    result = repro(broken_log, "chat-17", "--until", "20")
    assert result.exit_code == 64
    assert "no rule was broken" in result.err


def test_programs_get_an_object(repro: Any, broken_log: Path, test_path: Path) -> None:
    """The paths and the facts in one line of JSON."""
    (found,) = repro(broken_log, "chat-17", "--json").objects("repro")
    assert (found["test"], found["log"]) == (str(test_path), str(test_path.with_suffix(".kvlog")))
    assert found["incident"]["rule"] == BROKEN
    assert found["recurs"] is True
    assert [run["ended"] for run in found["runs"]] == ["failed"]


def source(detail: str = "it broke", *, excused: tuple[str, ...] = (), handlers: tuple[str, ...] = ()) -> str:
    """A test of an incident."""
    incident = Trouble("LAST_TOKEN", 19, "r", detail)
    about = Description(
        incident, "r", excused, "", Chosen(), True, handlers, "kvledger 0.1.0", "kvledger repro LOG", ()
    )
    return test_source(about).decode()


@pytest.mark.parametrize(
    "detail", ['says "no"', '"""', "back\\slash", "ends with \\", 'ends with "', "line\nbreak", "x" * 300, "ünïcode"]
)
def test_whatever_an_incident_says_can_be_in_the_test(detail: str, test_path: Path) -> None:
    """The file stays a Python file that says it."""
    test_path.write_text(source(detail))
    docstring = runpy.run_path(str(test_path))["__doc__"]
    assert detail.rsplit(maxsplit=1)[-1][:40].replace('"""', "'''") in docstring


def test_only_the_incidents_rule_is_asked_for() -> None:
    """And no hook may fail but where one failed then; with the handlers that the engine had."""
    call = 'rerun_core(LOG, handlers=("m:C",)).trouble("LAST_TOKEN", besides={"HOOK_FAILED"})'
    assert call in source(excused=("HOOK_FAILED",), handlers=("m:C",))
