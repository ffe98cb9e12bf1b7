"""A log of a few kilobytes costs a reader no memory and no endless CPU time, whatever numbers it holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import attrs
import msgspec
import pytest
from processes import finished
from stored_logs import write_log

from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle import events as e

CONFIGURATION = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8)
VERDICTS = {0, 1, 2, 3, 5}
OTHERS = {*VERDICTS, 64}
"""`repro` finds nothing that it could run again."""
MAX_MIB = 256
"""A reader of an empty log takes 40 MiB, the page another 10, and pyarrow, which `tables` imports, about 90."""
TO_PAGE = "export LOG --html -o page.html --force"
COMMANDS = (
    "verify LOG",
    "verify LOG --json",
    "show LOG",
    "show LOG r1",
    "why LOG r1",
    "stats LOG",
    "show LOG --at 1000000",
    "core LOG",
    "ls LOG",
    TO_PAGE,
    "export LOG --perfetto -o trace.json --force",
    "tables LOG -o tables --force",
    "export LOG --otlp spans.jsonl",
)
IN_SHORT = (
    "verify LOG",
    "show LOG",
    "show LOG r1",
    "why LOG r1",
    "stats LOG",
    "show LOG --at 1000000",
    TO_PAGE,
    "repro LOG -o t.py",
)
"""What folds a log, and what shows it."""
HEADER_ONLY = ("verify LOG", "stats LOG", "core LOG", "ls LOG", TO_PAGE)
CHILD = """
import contextlib, io, json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
from kvledger.adapters.tools.cli.main import main
for log, line in ((log, line) for log in sys.argv[2:] for line in json.loads(sys.argv[1])):
    out = io.TextIOWrapper(io.BytesIO(), write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main([log if word == "LOG" else word for word in line.split()])
        except SystemExit as error:
            code = error.code
    with open("/proc/self/status") as status:  # ru_maxrss begins with the peak of the process that started this one
        peak_mib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) // 1024
    text = out.buffer.getvalue().decode(errors="replace")
    print(json.dumps({"log": log, "command": line, "code": code, "mib": peak_mib, "text": text}), flush=True)
"""


class Answer(NamedTuple):
    """What a command did."""

    code: int
    mib: int
    text: str


Answers = Mapping[str, Mapping[str, Answer]]
"""Log → command → what it did."""


def answers_of(logs: Mapping[str, Path], commands: Sequence[str] = COMMANDS) -> Answers:
    """Run the commands on each log, in one process whose memory and CPU time are limited."""
    folder = next(iter(logs.values())).parent
    child = finished([sys.executable, "-c", CHILD, json.dumps(commands), *logs.values()], cwd=folder)
    lines = {(line["log"], line["command"]): line for line in map(json.loads, child.stdout.splitlines())}
    answers: dict[str, dict[str, Answer]] = {}
    for name, log in logs.items():
        for command in commands:
            line = lines.get((str(log), command))
            assert line is not None, f"{name}: {command} ended with {child.returncode}: {child.stderr[-2000:]}"
            answers.setdefault(name, {})[command] = Answer(line["code"], line["mib"], line["text"])
    return answers


def assert_bounded(answers: Mapping[str, Answer]) -> None:
    """Every command ended in a stated code, and none took memory; the process does not give back what it took."""
    for command, answer in answers.items():
        assert answer.code in OTHERS, (command, answer.code, answer.text[-2000:])
        assert answer.mib < MAX_MIB, (command, answer.mib)
        assert "MemoryError" not in answer.text, command


BEGINNING: tuple[e.Event, ...] = (
    e.LogNote("connector started", 0),
    e.RequestArrived("r1", 0, 45, 10),
    e.ChunkKeysObserved("r1", 0, (b"a" * 16, b"b" * 16)),
    e.BlocksAllocated("r1", (1, 2, 3), 0, 20),
    e.StepScheduled(0, 45, ((0, 0, 45, 45),), (), (), (), 30),
)
END = e.LogNote("connector shut down", 40)
HUGE = 1 << 62
SAVE = e.SaveIssued("r1", 0, 1, 1, (0,), (1,), (1,), False, False, 5)
LOAD = e.LoadIssued("r1", 0, 1, 1, 0, 32, (0, 1), (1, 2), False, 5)
TAIL = e.TailSaveIssued("r1", 0, 1, 1, 32, 13, (0,), (3,), 5)
REPORT = e.TransferReported.by((0,), 1, 35)


changed = msgspec.structs.replace

OUT_OF_RANGE: dict[str, e.Event] = {
    "a slot that the pool does not have": changed(SAVE, slots=(2_000_000_000,)),
    "a negative slot": changed(SAVE, slots=(-2,)),
    "a slot of a load that the pool does not have": changed(LOAD, slots=(0, 8)),
    "a slot of a tail that the pool does not have": changed(TAIL, slots=(8,)),
    "a chunk": changed(SAVE, chunks=(HUGE,)),
    "a negative chunk": changed(SAVE, chunks=(-1,)),
    "a block": changed(SAVE, block_ids=(1 << 40,)),
    "tokens of a load": changed(LOAD, num_tokens=32_000_000_000),
    "the first token of a load": changed(LOAD, first_token=HUGE),
    "tokens of a tail": changed(TAIL, num_tokens=HUGE),
    "declined chunks": e.SaveDeclined("r1", 0, 1, 0, HUGE, "pool_full", 5),
    "a job": changed(SAVE, job_id=HUGE),
    "a negative ordinal": changed(SAVE, ordinal=-2),
    "an arrival that is no life": e.RequestArrived("r2", -1, 10, 31),
    "a generation": changed(SAVE, generation=HUGE),
    "a prompt": e.RequestArrived("r2", 1, HUGE, 31),
    "known tokens": e.LookupRequested("r1", 0, HUGE, 31),
    "settled tokens": e.RequestPreempted("r1", HUGE, 45, 31),
    "scheduled tokens": e.StepScheduled(1, HUGE, ((0, 45, HUGE, 45),), (), (), (), 31),
    "a settled chunk": e.StepScheduled(1, 1, (), (), (), (e.SettledTokens(0, HUGE, 45),), 31),
    "a block of a step": e.StepScheduled(1, 1, (), (), ((0, (1 << 32,)),), (), 31),
    "a step": e.StepScheduled(HUGE, 1, (), (), (), (), 31),
    "a time": e.LogNote("late", (1 << 63) - 1),
    "a negative time": e.LogNote("early", -1),
    "a duration": changed(REPORT, duration_ns=(1 << 63) - 1),
    "bytes": changed(REPORT, num_bytes=((1 << 64) - 1,)),
    "a rank": changed(REPORT, ranks_done=((1 << 64) - 1,)),
    "a digest": e.PagesDigested("r1", 0, 0, 0, False, 0, 0, (1 << 63,), (), 31),
    "a first block": e.PagesDigested("r1", 0, 0, 0, False, 0, HUGE, (1,), (), 31),
}


@pytest.fixture(scope="module")
def out_of_range(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What the commands do with each of them."""
    folder = tmp_path_factory.mktemp("logs")
    return answers_of(
        {
            name: write_log(folder / f"log{number}", (*BEGINNING, event, END), CONFIGURATION)
            for number, (name, event) in enumerate(OUT_OF_RANGE.items())
        },
        IN_SHORT,
    )


@pytest.mark.xdist_group("numbers_out_of_range")
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_number_outside_its_range_is_damage_and_every_command_says_so(name: str, out_of_range: Answers) -> None:
    """Security review: a slot number of 30,000,000 cost 1.2 GiB, and counts of 2**62 hung `verify` and others."""
    answers = out_of_range[name]
    assert_bounded(answers)
    verdict = answers["verify LOG"]
    assert verdict.code == 2, verdict.text
    assert "undecodable" in verdict.text
    assert "sound" not in verdict.text
    for command in ("show LOG", "show LOG r1", "show LOG --at 1000000", "why LOG r1", "stats LOG"):
        assert "undecodable" in answers[command].text, command
    assert "undecodable" in answers[TO_PAGE].text


WITHIN_RANGE: dict[str, tuple[e.Event, ...]] = {
    "a save of a chunk without a key": (changed(SAVE, chunks=(2**31 - 1,)), REPORT, e.SaveCompleted("r1", 0, 1, 1, 7)),
    "declined chunks without keys": (e.SaveDeclined("r1", 0, 0, 0, 2**31 - 1, "pool_full", 5),),
    "a load without keys": (changed(LOAD, num_tokens=2**31 - 1), REPORT, e.LoadCompleted("r1", 0, 1, 1, 7)),
    "a load from before the first token": (changed(LOAD, first_token=-(2**31) + 1), REPORT),
    "a tail without slots": (
        e.RequestPreempted("r1", 40, 45, 31),
        changed(TAIL, num_tokens=2**31 - 1),
        REPORT,
        e.SaveCompleted("r1", 0, 1, 1, 8),
        e.LookupRequested("r1", 0, 2**31 - 1, 60),
        e.BlocksAllocated("r1", (1, 2, 3), 0, 70),
    ),
    "more tokens than keys": (
        e.RequestPreempted("r1", 2**31 - 1, 2**31 - 1, 31),
        e.LookupRequested("r1", 0, 2**31 - 1, 60),
        e.LookupAnswered("r1", 0, 1, 0, 2**31 - 1, 0, 0, False, "missing", 7),
        e.BlocksAllocated("r1", (1, 2, 3), 0, 70),
        e.StepScheduled(1, 2**31 - 1, ((0, 0, 2**31 - 1, 2**31 - 1),), (), (), (e.SettledTokens(0, 0, 2**31 - 1),), 80),
        e.RequestFinished("r1", "FINISHED_STOPPED", 2**31 - 1, 2**31 - 1, 90),
    ),
    "more tokens than blocks after a failed load": (
        e.LoadErrorsObserved((1, -(2**63)), 31),
        e.StepScheduled(1, 2**31 - 1, ((0, 2**31 - 1, 2**31 - 1, 2**31 - 1),), (), (), (), 80),
        e.StepScheduled(2, 1, ((0, -(2**31) + 1, 1, 45),), (), (), (), 90),
    ),
    "tokens retained through a reset": (
        changed(SAVE, generation=0),
        changed(REPORT, time_ns=31),
        e.SaveCompleted("r1", 0, 0, 1, 7),
        e.PrefixCacheReset(32),
        e.RequestPreempted("r1", 40, 45, 33),
        e.LookupRequested("r1", 2**31 - 1, 2**31 - 1, 60),
        e.LookupAnswered("r1", 0, 1, 0, 2**31 - 1, 2**62, 2**62, False, "complete", 11),
        e.BlocksAllocated("r1", (1, 2, 3), 2**31 - 1, 70),
        e.StepScheduled(1, 1, ((0, 2**31 - 2, 1, 2**31 - 1),), (), (), (), 80),
    ),
    "an answer of any number": (
        e.RequestPreempted("r1", 40, 45, 31),
        e.LookupRequested("r1", 0, 45, 60),
        e.LookupAnswered("r1", 0, 1, 0, 45, 2**63 - 1, 2**63 - 1, True, "recorded", 7),
        e.BlocksAllocated("r1", (1, 2, 3), 2**31 - 1, 70),
    ),
    "sums beyond 64 bits": tuple(
        event
        for number in range(8)
        for event in (
            changed(SAVE, job_id=number + 1, generation=0, slots=(number,)),
            changed(REPORT, job_ids=(number + 1,), duration_ns=2**62, num_bytes=(2**62,)),
        )
    ),
    "times at both ends": (
        e.RequestPreempted("r1", 40, 45, 2**62),
        e.LookupRequested("r1", 0, 45, 0),
        e.BlocksAllocated("r1", (1, 2, 3), 0, 1),
        e.StepScheduled(1, 45, ((0, 0, 45, 45),), (), (), (), 2**62),
        e.RequestFinished("r1", "FINISHED_STOPPED", 45, 45, 2**62),
    ),
    "ranks that the engine does not have": (
        changed(SAVE, generation=0, is_async=True),
        changed(REPORT, ranks_done=(-(2**63), 2**63 - 1), ranks_failed=(2**40, -5)),
    ),
}


def test_a_count_costs_what_the_log_names_and_not_what_it_says(tmp_path: Path) -> None:
    """Numbers within their ranges may be far more than the keys, blocks and slots that the log names."""
    configuration = attrs.evolve(CONFIGURATION, awaits_shared_loads=True)
    logs = {
        name: write_log(tmp_path / f"log{number}", (*BEGINNING, *events, END), configuration)
        for number, (name, events) in enumerate(WITHIN_RANGE.items())
    }
    for answers in answers_of(logs).values():
        assert_bounded(answers)


CONFIGURATIONS: dict[str, LedgerConfiguration] = {
    "as many slots as there may be": attrs.evolve(CONFIGURATION, num_slots=2**32),
    "as many ranks as there may be": attrs.evolve(CONFIGURATION, num_ranks=4096),
    "long chunks of short blocks": LedgerConfiguration(block_size=1, chunk_size=2**24, num_slots=2**32),
    "short chunks in long blocks": LedgerConfiguration(block_size=2**24, chunk_size=1, num_slots=2**32),
    "windows": LedgerConfiguration(block_size=16, chunk_size=16, num_slots=2**32, windows=(0, 2**31 - 1)),
    "a window of one token": LedgerConfiguration(block_size=16, chunk_size=16, num_slots=2**32, windows=(0, 1)),
    "windows in long chunks": LedgerConfiguration(block_size=1, chunk_size=2**24, num_slots=2**32, windows=(0, 1)),
    "windows in long blocks": LedgerConfiguration(block_size=2**24, chunk_size=1, num_slots=2**32, windows=(0, 1)),
    "many groups": LedgerConfiguration(block_size=16, chunk_size=16, num_slots=2**32, windows=(0,) * 256),
}


@pytest.mark.parametrize("many", [1, pytest.param(2, marks=pytest.mark.long), 2**31 - 1], ids=str)
def test_no_reader_makes_anything_for_each_slot_rank_group_or_chunk_of_a_configuration(
    many: int, tmp_path: Path
) -> None:
    """A header names sizes; what a log costs follows from its events."""
    logs = {
        name: write_log(tmp_path / f"log{number}", story_of(many, configuration.num_slots - 1), configuration)
        for number, (name, configuration) in enumerate(CONFIGURATIONS.items())
    }
    for answers in answers_of(logs).values():
        assert_bounded(answers)


def story_of(many: int, last_slot: int) -> Sequence[e.Event]:
    """A save, a load, a preemption with a tail and a way back, with such numbers of tokens and chunks."""
    return (
        *BEGINNING,
        changed(SAVE, generation=0, chunks=(0, 1, many), slots=(5, last_slot // 2, last_slot)),
        REPORT,
        e.SaveCompleted("r1", 0, 0, 1, 7),
        changed(LOAD, generation=0, job_id=2, num_tokens=many, slots=(5, last_slot)),
        changed(REPORT, job_ids=(2,)),
        e.StepScheduled(1, 1, ((0, 45, 1, 46),), (), ((0, (4, 5)),), (e.SettledTokens(0, 0, many),), 40),
        e.RequestPreempted("r1", many, many, 50),
        changed(TAIL, job_id=3, first_token=0, num_tokens=many),
        changed(REPORT, job_ids=(3,), time_ns=55),
        e.SaveCompleted("r1", 0, 1, 3, 14),
        e.LookupRequested("r1", 0, many, 60),
        e.LookupAnswered("r1", 0, 1, 0, many, many, many, False, "complete", 16),
        e.BlocksAllocated("r1", (1, 2, 3, 4, 5), many, 70),
        e.RequestFinished("r1", "FINISHED_STOPPED", many, many, 90),
        END,
    )


REFUSED: Sequence[tuple[str, object]] = (
    *((field, HUGE) for field in ("block_size", "chunk_size", "num_slots", "num_ranks", "save_interval_tokens")),
    *((field, -1) for field in ("block_size", "chunk_size", "num_slots", "num_ranks", "max_silent_ms")),
    *((field, (1 << 64) - 1) for field in ("block_size", "num_slots", "num_ranks")),
    ("windows", (0, HUGE)),
    ("windows", (0, -1)),
    ("windows", (0,) * 257),
    ("windows", (0, -(1 << 63))),
    ("max_failed_loads", 1 << 63),
)


def test_a_configuration_outside_its_ranges_is_damage_that_names_the_field(tmp_path: Path) -> None:
    """Security review: 2**62 ranks, slots or tokens of a window in a header cost all memory."""
    logs = {
        f"{field} {number}": write_log(
            tmp_path / f"log{number}",
            (*BEGINNING, END),
            CONFIGURATION,
            header={"configuration": {**attrs.asdict(CONFIGURATION), field: value}},
        )
        for number, (field, value) in enumerate(REFUSED)
    }
    for name, answers in answers_of(logs, HEADER_ONLY).items():
        assert_bounded(answers)
        verdict = answers["verify LOG"]
        assert verdict.code == 2
        assert name.split()[0].removeprefix("num_") in verdict.text
        assert len(verdict.text) < 2000


def test_a_number_of_the_header_outside_its_range_is_damage_that_names_it(tmp_path: Path) -> None:
    """The page's axis and dates would have to show it."""
    fields, values = ("opened_at_unix_ns", "process_id", "worker_rank"), (-1, 1 << 63, (1 << 64) - 1)
    logs = {
        f"{field} {number}": write_log(
            tmp_path / f"{field}{number}", (*BEGINNING, END), CONFIGURATION, header={field: value}
        )
        for field in fields
        for number, value in enumerate(values)
    }
    for name, answers in answers_of(logs, HEADER_ONLY).items():
        assert_bounded(answers)
        assert answers["verify LOG"].code == 2
        assert name.split()[0] in answers["verify LOG"].text


def test_a_test_is_not_written_of_more_tokens_than_can_be_made(tmp_path: Path) -> None:
    """`repro` makes each token of a request, so the number that a log says is limited."""
    log = write_log(tmp_path / "log", (*BEGINNING, *WITHIN_RANGE["more tokens than keys"], END), CONFIGURATION)
    answers = answers_of({"log": log}, ("repro LOG -o test_incident.py",))["log"]
    assert_bounded(answers)
    (answer,) = answers.values()
    assert answer.code == 64
    assert "have more than 8,388,608 tokens by event" in answer.text


def test_many_events_about_one_large_number_cost_no_more_than_their_bytes(tmp_path: Path) -> None:
    """Each alone is harmless; in a row they must not add up."""
    many: Sequence[e.Event] = [
        changed(SAVE, job_id=number, generation=0, chunks=(2**31 - number,), slots=(2**32 - 2 * number,))
        for number in range(1, 200)
    ]
    configuration = attrs.evolve(CONFIGURATION, num_slots=2**32)
    log = write_log(tmp_path / "log", (*BEGINNING, *many, END), configuration)
    assert_bounded(answers_of({"many": log})["many"])
