"""The commands read a recorder's log as they read kvledger's own, and say what only another connector knows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sim.connectors import NamedConnector
from sim.recorded import CORE, events_of
from trace_importer import read_trace

from kvledger.adapters.lab.simulation.hashed_model import block_bytes
from kvledger.adapters.recorded.rules import LEFT_OUT
from kvledger.lifecycle import Core
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.codec import vocabulary_header

pytestmark = pytest.mark.scheduler

WITNESS = NamedConnector(name="Witness", module="sim.witness")
Said = Callable[..., tuple[int, str]]
Record = Callable[..., tuple[Any, Any]]


@pytest.fixture
def log(record: Callable[..., tuple[Any, Any]], tmp_path: Path) -> Path:
    """Three requests in a pool that holds two, recorded around OffloadingConnector, in files."""
    engine, _ = record(log_dir=str(tmp_path / "logs"), num_blocks=12, max_model_len=160)
    for request_id, first in (("a", 0), ("b", 500), ("c", 900)):
        engine.add(request_id, range(first, first + 64), 40)
    engine.run()
    engine.shutdown()
    (directory,) = (path for path in (tmp_path / "logs").iterdir() if "-worker-" not in path.name)
    return directory


def test_verify_finds_it_sound_and_lists_what_is_left_out(log: Path, said: Said) -> None:
    """Each rule with its reason."""
    exit_code, out = said("verify", log, "--json")
    assert exit_code == 0
    records = [json.loads(line) for line in out.splitlines()]
    reasons = {record["rule"]: record["reason"] for record in records if record["type"] == "not_checked"}
    assert {rule: why for rule, why in LEFT_OUT.items() if why}.items() <= reasons.items()


def test_show_tells_what_the_connector_answered_and_copied(log: Path, said: Said) -> None:
    """In the life of a request, beside what became of it."""
    exit_code, out = said("show", log, "b")
    assert exit_code == 0
    for words in ("the recorded connector offers 0 tokens", "gives its workers a copy: save", "→ preempted"):
        assert words in out
    assert "lookup_returned" not in out  # which the decision tells


def test_show_counts_equal_answers_of_a_request_that_waits(log: Path, said: Said) -> None:
    """Each question and its answer are two events, and one thing that happened."""
    _, out = said("show", log, "b", "--json")
    lookups = [group for group in map(json.loads, out.splitlines()) if group.get("what") == "lookup"]
    assert all(before["text"].partition(" —")[0] != after["text"] for before, after in pairwise(lookups))
    assert any(group["num_moments"] > 2 for group in lookups)


def test_what_would_be_kvledgers_own_copies_is_neither_shown_nor_on_the_page(
    log: Path, said: Said, tmp_path: Path
) -> None:
    """What the connector saved, and how many bytes, is not in the log; a zero would say that it was nothing."""
    _, out = said("show", log)
    assert "recording OffloadingConnector" in out
    assert "\nloaded " in out
    assert "saved" not in out
    page = tmp_path / "page.html"
    said("export", log, "--html", "-o", page)
    text = page.read_text()
    assert "recording OffloadingConnector" in text
    for own in ("left the cache", "0 chunks", "chunk 16 tokens", "host slots", "tail save"):
        assert own not in text


def test_why_says_what_was_not_offered_and_that_more_is_not_known(log: Path, said: Said) -> None:
    """The tokens add up, as for kvledger itself."""
    exit_code, out = said("why", log, "a")
    assert exit_code == 0
    assert "tokens 0–62: no request had computed them before" in out
    assert "64 left to compute" in out


def test_why_names_what_was_saved_where_the_connector_offers_less(record: Record, tmp_path: Path, said: Said) -> None:
    """A host memory of six blocks loses what a preempted request had saved; the answer alone does not show that."""
    options = {"num_blocks": 12, "max_model_len": 160, "host_bytes": 6 * block_bytes(16)}
    engine, recording = record(log_dir=str(tmp_path), **options)
    for request_id, first in (("a", 0), ("b", 500), ("c", 900)):
        engine.add(request_id, range(first, first + 64), 40)
    engine.run()
    engine.shutdown()
    _, out = said("why", recording.log.log.directory, "b", "--json")
    causes = [cause for cause in map(json.loads, out.splitlines()) if cause["type"] == "cause"]
    answers = [cause for cause in causes if cause["what"] == "lookup" and "offers 0 tokens" in cause["text"]]
    _, text = said("why", recording.log.log.directory, "b")
    assert "offered to the request itself at event" in text
    assert "but not this time; the log does not contain the connector's evictions" in text
    assert len(answers) > 1  # the first one had nothing to remember
    assert "load 1 has arrived" in text


def test_stats_counts_calls_answers_and_copies(log: Path, said: Said) -> None:
    """Time in each hook of the connector, and what it gave its workers, each as often as it is in the log."""
    _, out = said("stats", log, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    figures = {each["what"]: each["amount"] for each in records if each["type"] == "figure"}
    calls = {each["of"]: each["count"] for each in records if each["type"] == "percentiles"}
    events = {each["event"]: each["num_events"] for each in records if each["type"] == "events"}
    num_lookups = events["lookup.requested"]
    assert calls["recorder/get_num_new_matched_tokens_ns"] == num_lookups
    assert figures["answers with tokens"] + figures["answers without tokens"] == num_lookups
    assert calls["recorder/update_state_after_alloc_ns"] == events["blocks.allocated"]
    assert calls["recorder/build_connector_meta_ns"] == events["step.scheduled"]
    assert calls["load_time_ns"] == 0  # which nobody has measured
    assert figures["copies to load"] == events["load.issued"]
    assert figures["blocks to save"] >= figures["copies to save"] > 0
    _, text = said("stats", log)
    assert f"copies to save: {figures['copies to save']}" in text
    assert "recorder/build_connector_meta " in text
    assert "not saved" not in text  # which only the connector knows


def test_calls_are_slices_of_a_track_and_lines_of_the_page(log: Path, said: Said, tmp_path: Path) -> None:
    """As many of each hook as `stats` counts, one behind the other, as long as the log says."""
    _, out = said("stats", log, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    counts = {each["of"]: each["count"] for each in records if each["type"] == "percentiles"}
    said("export", log, "--perfetto", "-o", tmp_path / "trace.json")
    calls = [found for found in read_trace(tmp_path / "trace.json").slices if found.category == "call"]
    assert {found.track for found in calls} == {"calls, recorder"}
    counted = Counter(f"recorder/{found.name}_ns" for found in calls)
    assert counted == {name: count for name, count in counts.items() if name.startswith("recorder/")}
    longest = max(each["max"] for each in records if each.get("of") == "recorder/build_connector_meta_ns")
    took = [found.end_ns - found.begin_ns for found in calls if found.name == "build_connector_meta" and found.end_ns]
    assert max(took) == longest
    said("export", log, "--html", "-o", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    num_steps = counted["recorder/build_connector_meta_ns"]
    assert f'recorder: build_connector_meta</td><td class="number">{num_steps}</td>' in text


def test_calls_of_another_request_are_left_out(log: Path, said: Said, tmp_path: Path) -> None:
    """Those of no request stay, as steps do."""
    said("export", log, "--perfetto", "--request", "a", "-o", tmp_path / "trace.json")
    calls = [found for found in read_trace(tmp_path / "trace.json").slices if found.category == "call"]
    assert {found.args.get("request_id") for found in calls} == {"a", None}


def test_moments_of_an_export_are_in_words(log: Path, tmp_path: Path, said: Said) -> None:
    """A call that a decision describes as well is left out."""
    said("export", log, "--perfetto", "-o", tmp_path / "trace.json")
    texts = {str(found.args.get("text", "")) for found in read_trace(tmp_path / "trace.json").instants}
    assert not {text for text in texts if text.startswith(("extension.", "recorder 1: returned"))}
    assert any("gives its workers a copy: save" in text for text in texts)


@pytest.mark.parametrize("command", [["stats"], ["show", "--at", "20"]])
def test_other_commands_read_it(log: Path, said: Said, command: list[str]) -> None:
    """Without a remark about an extension that is not there."""
    exit_code, out = said(command[0], log, *command[1:])
    assert exit_code == 0
    assert "not loaded" not in out


def test_a_reader_without_the_recorders_code_verifies_the_rest(record: Callable[..., tuple[Any, Any]]) -> None:
    """It leaves out the same rules, says of the recorder's own that their code is not here, and judges no decision."""
    engine, recording = record(NamedConnector(name="Witness", module="sim.witness"))
    engine.add("a", range(20), 3)
    engine.run()
    core = Core.standard().reading(vocabulary_header(CORE))
    assert [extension.name for extension in core.absent] == ["recorder"]
    assert not LEFT_OUT.keys() & core.rules.keys()
    assert all(core.not_checked[rule] for rule in LEFT_OUT)
    audit = Audit(core, recording.log.configuration)
    audit.run(events_of(recording))
    assert audit.is_sound, (audit.violations, audit.divergences)
    assert audit.judgement().num_unjudged > 0
