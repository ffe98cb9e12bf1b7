"""`kvledger export --perfetto`: what Perfetto would show of a log, read as its importer reads."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from stored_logs import tell_story, write_log
from trace_importer import NotImportable, Trace, read_trace

from kvledger.adapters.figures import Figures, Totals
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.sources import find_logs
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections import Projections

REQUEST = "chat-17-b6"


def export(run: Any, log: Path, path: Path, *options: object) -> Trace:
    """Write a trace and import it."""
    result = run("export", log, "--perfetto", "-o", path, *options)
    assert result.exit_code == 0, result.err
    return read_trace(path)


def test_a_request_is_a_track_with_its_states_one_after_the_other(run: Any, log: Path, tmp_path: Path) -> None:
    """States, generations, tokens and causes, without a hole between them."""
    trace = export(run, log, tmp_path / "t.json")
    states = [found for found in trace.slices if (found.process, found.track) == ("requests", REQUEST)]
    assert [found.name for found in states] == ["new", "running", "preempted", "recovering", "running", "finished"]
    for before, after in itertools.pairwise(states):
        assert before.end_ns == after.begin_ns
        assert before.args["left_by"] == after.args["cause"]
    assert [found.args["generation"] for found in states] == [0, 0, 1, 1, 1, 1]
    preempted = states[2]
    assert (preempted.args["cause"], preempted.args["num_tokens"]) == ("request.preempted", 64)
    assert states[1].args["num_computed_tokens_at_end"] == 64
    (other,) = [found for found in trace.slices if found.track == "chat-9"]
    assert "open" in other.args


def test_copies_are_slices_of_their_own_with_bytes_blocks_and_ranks(run: Any, log: Path, tmp_path: Path) -> None:
    """From the decision to the settlement, under the direction's name."""
    copies = export(run, log, tmp_path / "t.json").copies
    assert [copy.name for copy in copies] == ["save", "save", "load"]
    load = copies[-1]
    assert (load.args["block_ids"], load.args["num_tokens"]) == ("7–10", 64)
    assert (load.args["outcome"], load.args["num_bytes"], load.args["ranks_done"]) == ("completed", 100, "0")
    assert load.end_ns is not None
    assert load.end_ns > load.begin_ns


def test_an_arrow_leads_from_the_preemption_over_the_load_to_running(run: Any, log: Path, tmp_path: Path) -> None:
    """The way back of a request is seen at a glance."""
    (flow,) = export(run, log, tmp_path / "t.json").flows
    assert [found.name for found in flow.slices] == ["preempted", "load", "running"]
    assert flow.is_ended


def test_a_part_shows_what_is_open_at_its_beginning_and_cuts_at_its_end(run: Any, log: Path, tmp_path: Path) -> None:
    """--since and --until limit what is shown, not what is known."""
    trace = export(run, log, tmp_path / "t.json", "--since", 35, "--until", 41)
    assert [found.name for found in trace.slices if found.category == "state"] == ["preempted"]
    (preempted,) = trace.of_state("preempted")
    assert preempted.args["num_tokens"] == 64
    assert "open" in preempted.args
    assert trace.other_data["logs"][0]["first_event"] == 35


def test_one_request_is_shown_with_the_engine_around_it(run: Any, log: Path, tmp_path: Path) -> None:
    """--request leaves out the others' tracks and copies."""
    trace = export(run, log, tmp_path / "t.json", "--request", "chat-9")
    assert {found.track for found in trace.slices} == {"chat-9", "steps"}
    assert not trace.copies


def test_a_file_named_gz_is_compressed(run: Any, log: Path, tmp_path: Path) -> None:
    """And holds the same; the same log gives the same bytes."""
    plain, packed, again = tmp_path / "t.json", tmp_path / "t.json.gz", tmp_path / "again.json.gz"
    assert len(export(run, log, plain).slices) == len(export(run, log, packed).slices)
    export(run, log, again)
    assert packed.stat().st_size < plain.stat().st_size / 2
    assert packed.read_bytes() == again.read_bytes()


def test_any_request_id_is_only_a_name(run: Any, tmp_path: Path) -> None:
    """Quotes, brackets and control characters in an id neither end the file nor move a track."""
    ugly = '"},{"ph":"X\\\x00\x7f\u2028</script>]'
    story = tell_story(ugly)
    trace = export(run, write_log(tmp_path / "log", story.observed, story.configuration), tmp_path / "t.json")
    assert len([found for found in trace.slices if found.track == ugly]) == 6


def test_missing_events_are_shown_where_they_are_missing(run: Any, story: Driver, tmp_path: Path) -> None:
    """A trace of a damaged log says so, in the trace and on stderr."""
    directory = write_log(tmp_path / "log", story.observed, story.configuration)
    (segment,) = directory.glob("*.kvlog")
    data = bytearray(segment.read_bytes())
    data[len(data) * 9 // 10] ^= 0xFF
    segment.write_bytes(data)
    result = run("export", directory, "--perfetto", "-o", tmp_path / "t.json")
    assert result.exit_code == 0
    assert "corrupt_frame" in result.err
    trace = read_trace(tmp_path / "t.json")
    (lost,) = [found for found in trace.instants if found.name == "events.lost"]
    assert (lost.track, lost.category) == ("trouble", "trouble")
    assert trace.other_data["logs"][0]["num_damaged_places"] == 1


def test_logs_of_several_engines_stand_beside_each_other_in_time(run: Any, story: Driver, tmp_path: Path) -> None:
    """An engine that was started a second later begins a second later in the trace."""
    write_log(tmp_path / "logs" / "first", story.observed, story.configuration)
    late = {"opened_at_unix_ns": 1_750_000_001_000_000_000}
    write_log(tmp_path / "logs" / "second", story.observed, story.configuration, header=late)
    trace = export(run, tmp_path / "logs", tmp_path / "t.json")
    first, second = (
        min(found.begin_ns for found in trace.slices if found.process == f"requests {name}")
        for name in ("first", "second")
    )
    assert second - first == 1_000_000_000


@pytest.mark.scheduler
def test_worlds_become_traces_that_agree_with_their_logs(run: Any, worlds: dict[int, Path], tmp_path: Path) -> None:
    """Slices, copies, evictions and the last counts are those of the fold, whatever goes wrong in the world."""
    met: Counter[str] = Counter()
    for seed, directory in worlds.items():
        for number, path in enumerate(find_logs(directory)):
            print(f"seed {seed}, log {number}")
            trace = export(run, path, tmp_path / f"{seed}-{number}.json")
            stored, projections, issued = open_log(path), None, 0
            projections = Core.standard().new_projections(stored.configuration)
            totals = Totals(projections)
            for sequence, event in stored.events():
                projections.fold(event, sequence)
                issued += isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued)
            _compare(trace, projections, totals.figures)
            assert len(trace.copies) == issued
            figures = totals.figures
            met += Counter(preempted=figures.num_preemptions, evicted=figures.num_chunks_evicted)
            met += Counter(violated=figures.num_violations, loaded=figures.num_tokens_loaded, arrows=len(trace.flows))
    assert min(met[what] for what in ("preempted", "evicted", "violated", "loaded", "arrows")) > 0


@pytest.mark.scheduler
def test_any_part_of_a_world_is_a_whole_trace(run: Any, worlds: dict[int, Path], tmp_path: Path) -> None:
    """Whatever is open at its beginning and its end; it has the steps of that part, no more and no fewer."""
    seed = random.randrange(2**32)
    print(f"parts drawn with seed {seed}")
    rng = random.Random(seed)
    for directory in worlds.values():
        path = find_logs(directory)[0]
        events = list(open_log(path).events())
        for _ in range(3):
            first, last = sorted(rng.sample([sequence for sequence, _ in events], 2))
            trace = export(run, path, tmp_path / "t.json", "--force", "--since", first, "--until", last)
            steps = [at for at, event in events if isinstance(event, e.StepScheduled) and first <= at <= last]
            assert len([found for found in trace.slices if found.name == "step"]) == len(steps), (path, first, last)


def _compare(trace: Trace, projections: Projections, figures: Figures) -> None:
    assert len(trace.of_state("preempted")) == len(trace.flows) == figures.num_preemptions
    evicted = [found for found in trace.instants if found.name == "chunks.evicted"]
    assert sum(found.args["num_chunks"] for found in evicted) == figures.num_chunks_evicted
    done = [copy for copy in trace.copies if copy.args["outcome"] == "completed"]
    assert sum(c.args["num_tokens"] for c in done if c.name == "load") == figures.num_tokens_loaded
    broken = [found for found in trace.instants if found.track == "trouble" and "rule" in found.args]
    assert len(broken) == figures.num_violations
    slots = projections.slots
    assert trace.last_value("host slots free") == slots.num_free
    assert trace.last_value("chunks cached") == len(projections.pool)
    in_flight = trace.last_value("jobs in flight loads") + trace.last_value("jobs in flight saves")
    assert in_flight == len(projections.jobs)
    held = {block for record in projections.tracker for block in record.block_ids or ()}
    assert trace.last_value("blocks held by requests") == len(held)
    in_state = Counter(record.state.value for record in projections.tracker)
    for state in ("new", "chunked_prefill", "running", "preempted", "recovering", "finished"):
        assert trace.last_value(f"requests {state}") == in_state[state]


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ('{"ph":"B","cat":"c","name":"a","pid":1,"tid":2,"ts":1.000}', "never end"),
        ('{"ph":"E","cat":"c","name":"a","pid":1,"tid":2,"ts":1.000}', "without a beginning"),
        ('{"ph":"C","cat":"c","name":"a","pid":1,"tid":2,"ts":1.000,"args":{"b":"1"}}', "no number"),
        ('{"ph":"i","s":"t","cat":"c","name":"a","pid":1,"tid":3,"ts":1.000}', "without a name"),
        (
            (
                '{"ph":"i","s":"t","cat":"c","name":"a","pid":1,"tid":2,"ts":2.000},'
                '{"ph":"i","s":"t","cat":"c","name":"a","pid":1,"tid":2,"ts":1.000}'
            ),
            "backwards",
        ),
        (
            (
                '{"ph":"b","cat":"c","name":"a","pid":1,"tid":2,"ts":1.000,"id2":{"local":"0x1"},"bind_id":"0x1",'
                '"flow_in":true}'
            ),
            "from nowhere",
        ),
    ],
)
def test_the_importer_of_these_tests_refuses_what_perfetto_would_mend(
    tmp_path: Path, events: str, complaint: str
) -> None:
    """A check that lets everything pass would prove nothing."""
    names = '{"ph":"M","name":"process_name","pid":1,"args":{"name":"p"}},'
    names += '{"ph":"M","name":"thread_name","pid":1,"tid":2,"args":{"name":"t"}},'
    path = tmp_path / "t.json"
    path.write_text(f'{{"displayTimeUnit":"ms","traceEvents":[{names}{events}],"otherData":{{}}}}')
    with pytest.raises(NotImportable, match=complaint):
        read_trace(path)
