"""A production trace is read line by line and served by vLLM's real scheduler; every token of it is accounted for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from benchmarks import run
from benchmarks.figures import CannotMeasure
from benchmarks.served import NOBODY
from benchmarks.trace_replay import Served, Sizes, TraceRequest, read_trace, serve

ROW = {"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 3]}
SMALL = Sizes(num_at_a_time=2, device_blocks=300, host_pages=2000)
"""Two documents at a time fit on the device, all ten in the host pool."""


def a_trace(folder: Path, *rows: Mapping[str, object] | str) -> Path:
    """A file with these lines."""
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def document(number: int, num_own_tokens: int) -> TraceRequest:
    """Begins with the same 512 tokens as all others; the next 1,024 are its document, the rest is its own."""
    hash_ids = [0, 100 + 2 * number, 101 + 2 * number, 1000 + number]
    return TraceRequest(0, 3 * 512 + num_own_tokens, 3, hash_ids)


@pytest.fixture(scope="module")
def requests() -> list[TraceRequest]:
    """Ten documents, asked about twice: when the second questions come, the device has forgotten most of the first."""
    return [document(number, 100 + turn) for turn in range(2) for number in range(10)]


@pytest.fixture(scope="module")
def served(requests: Sequence[TraceRequest]) -> dict[str, Served]:
    """What serving them took with each connector."""
    return serve(requests, SMALL)


pytestmark = pytest.mark.xdist_group("trace")


@pytest.mark.scheduler
def test_every_prompt_token_is_computed_hit_or_loaded(
    requests: Sequence[TraceRequest], served: Mapping[str, Served]
) -> None:
    """Without preemptions each of them comes once, from one of the three."""
    num_tokens = sum(request.input_length for request in requests)
    for name, each in served.items():
        assert each.num_preemptions == 0, name
        assert each.num_computed_tokens + each.num_hit_tokens + each.num_loaded_tokens == num_tokens, name
        assert each.num_requests == len(requests), name


@pytest.mark.scheduler
def test_what_the_device_forgot_is_loaded_and_not_computed(served: Mapping[str, Served]) -> None:
    """Every connector loads the documents from the host pool; without one they are computed again."""
    none = served[NOBODY]
    assert none.num_loaded_tokens == 0
    for name, each in served.items():
        if name != NOBODY:
            assert each.num_loaded_tokens >= 8 * 1024, name
            assert each.num_computed_tokens < none.num_computed_tokens, name


@pytest.mark.scheduler
def test_times_and_logs_are_of_the_connectors_that_have_them(served: Mapping[str, Served]) -> None:
    """Steps take time with everybody, hooks where there is a connector; kvledger alone writes a log."""
    for name, each in served.items():
        assert each.cpu_s > each.step_ms / 1000 > 0, name
        assert (each.hook_ms > 0) == (name != NOBODY), name
        assert (each.log_bytes > 0) == name.startswith("KVLedger"), name


@pytest.mark.scheduler
def test_a_request_that_the_device_cannot_hold_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    """The others are served, and stderr says how many were not."""
    too_long = TraceRequest(0, 512 * 10, 1, list(range(10)))
    served = serve([document(0, 1), too_long], Sizes(num_at_a_time=2, device_blocks=320, host_pages=400))
    assert {each.num_requests for each in served.values()} == {1}
    assert "1 of 2 requests do not fit on the device: skipped" in capsys.readouterr().err


def test_tokens_follow_from_the_hash_ids_and_the_rest_is_the_requests_own() -> None:
    """Equal ids are equal tokens, up to the last whole 512."""
    request = TraceRequest(0, 1100, 4, [1, 2, 3])
    first, second = request.prompt_token_ids(0), request.prompt_token_ids(1)
    assert len(first) == len(second) == 1100
    assert first[:1024] == second[:1024]
    assert not set(first[1024:]) & set(second)


def test_only_the_first_requests_are_read(tmp_path: Path) -> None:
    """What comes after them may be anything."""
    assert len(read_trace(a_trace(tmp_path, ROW, ROW, "garbage"), 2)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("garbage", "JSON is malformed"),
        ("", "Input data was truncated"),
        ({**ROW, "output_length": "4"}, "Expected `int`, got `str` - at `$.output_length`"),
        ({**ROW, "input_length": 0, "hash_ids": []}, "Expected `int` >= 1 - at `$.input_length`"),
        ({**ROW, "hash_ids": [1, 2]}, "`hash_ids` has 2 entries, 1100 tokens need 3"),
        ({name: value for name, value in ROW.items() if name != "hash_ids"}, "missing required field `hash_ids`"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_the_reason_and_the_remedy(
    tmp_path: Path, line: Mapping[str, object] | str, reason: str
) -> None:
    """The first two lines are fine."""
    path = a_trace(tmp_path, ROW, ROW, line)
    with pytest.raises(CannotMeasure) as refused:
        read_trace(path, 100)
    text = str(refused.value)
    assert text.startswith(f"{path}, line 3: ")
    assert reason in text
    assert "correct or delete the line" in text


@pytest.mark.parametrize("lines", [None, ()])
def test_a_trace_that_is_missing_or_empty_is_refused(tmp_path: Path, lines: Sequence[str] | None) -> None:
    """The error names the file."""
    path = tmp_path / "missing.jsonl" if lines is None else a_trace(tmp_path, *lines)
    with pytest.raises(CannotMeasure, match=path.name):
        read_trace(path, 100)


def test_without_a_trace_the_command_says_how_to_name_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1: nothing was measured."""
    monkeypatch.setattr("sys.argv", ["run.py", "trace"])
    assert run.main() == 1
    assert "make bench TRACE=FILE" in capsys.readouterr().err
