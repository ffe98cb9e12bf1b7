"""`kvledger export --otlp`: spans that OpenTelemetry's own messages decode, sent to a real receiver or written."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of
from otlp_receiver import ReceivedSpan, Receiver, receiving, spans_of_lines
from stored_logs import OPENED_AT, replaced, serve_many, write_log

from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.lifecycle import events as e

REQUEST = "chat-17-b6"
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NOT_OF_SPANS = ["--perfetto", "--html"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver that takes what it is sent."""
    with receiving() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _nobody_set_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "HEADERS", "TIMEOUT", "TRACES_ENDPOINT", "TRACES_HEADERS", "COMPRESSION"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def troubled() -> Driver:
    """`a` waits for its save and recovers, a load of `b` fails, `c` takes more than it was answered."""
    driver = Driver(num_slots=32, max_deferred_lookups=4)
    keys = keys_of("a", 4)
    driver.start("a", keys, 33, (1, 2, 3))
    driver.preempt("a", 32)
    for _ in range(3):
        driver.poll("a", 0, 33)
    driver.settle_all()
    driver.lookup("a", 0, 33)
    driver.allocate("a", (4, 5, 6), 32)
    driver.step(("a", 32, 1, 33))
    driver.settle_all()
    for request_id, num_taken in (("b", 32), ("c", 33)):
        driver.arrive(request_id, 40, keys)
        driver.lookup(request_id, 0, 40)
        driver.allocate(request_id, (7, 8, 9), num_taken)
    driver.report(driver.all_of(e.LoadIssued)[-1].job_id, ok=False)
    driver.observe(e.CacheReset(driver.observed[-1].time_ns if hasattr(driver.observed[-1], "time_ns") else 99_000))
    for request_id in ("a", "b", "c"):
        driver.finish(request_id, 0, 40)
    driver.settle_all()
    driver.ledger.commit()
    return driver


@pytest.fixture
def troubled_log(troubled: Driver, tmp_path: Path) -> Path:
    """That as a log, in which `a` has a caller with a trace."""
    parent = bytes.fromhex(TRACE + CALLER)
    events = replaced(troubled.observed, e.RequestArrived, 0, trace_parent=parent)
    return write_log(tmp_path / "troubled", events, troubled.configuration)


def exported(run: Any, log: Path, *options: object) -> list[ReceivedSpan]:
    """The spans of a log, by way of a file."""
    path = log.parent / "spans.jsonl"
    result = run("export", log, "--otlp", path, "--force", *options)
    assert result.exit_code == 0, result.err
    return spans_of_lines(path.read_text())


def named(spans: Sequence[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    """Those of a name."""
    return [span for span in spans if span.name == f"kvledger.{name}"]


def check_tree(spans: Sequence[ReceivedSpan]) -> None:
    """Ids are unique; nothing ends before it begins; a child lies within its parent and in its trace."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        assert span.start_ns <= span.end_ns
        assert all(span.start_ns <= time_ns <= span.end_ns for _, time_ns, _ in span.events)
        parent = by_id.get(span.parent_id)
        if parent is None:
            assert span.name in {"kvledger.request", "kvledger.log"}
            continue
        assert parent.name in {"kvledger.request", "kvledger.log"}
        assert span.trace_id == parent.trace_id
        assert parent.start_ns <= span.start_ns
        assert span.end_ns <= parent.end_ns


def test_a_request_is_a_span_with_its_phases_and_copies_below_it(run: Any, story: Driver, tmp_path: Path) -> None:
    """In the order of its life, at the time of day."""
    log = write_log(tmp_path / "log", story.observed, story.configuration)
    spans = exported(run, log)
    check_tree(spans)
    first, second = sorted(named(spans, "request"), key=lambda span: span.start_ns)
    assert (first.of_ours("request_id"), first.of_ours("outcome")) == (REQUEST, "FINISHED_STOPPED")
    assert first.start_ns == OPENED_AT + story.observed[0].time_ns  # type: ignore[attr-defined]
    below = sorted((span for span in spans if span.parent_id == first.span_id), key=lambda span: span.start_ns)
    phases = [span for span in below if span.of_ours("left_by")]
    assert [span.name.removeprefix("kvledger.") for span in phases] == [
        "new",
        "running",
        "preempted",
        "recovering",
        "running",
        "finished",
    ]
    assert [span.end_ns for span in phases[:-1]] == [span.start_ns for span in phases[1:]]
    assert [span.name for span in below if span.of_ours("job_id")] == [
        "kvledger.save",
        "kvledger.save",
        "kvledger.load",
    ]
    assert not any(span.is_error for span in spans)
    assert second.of_ours("is_open") is True
    assert first.of_ours("is_open") is None
    assert {span.trace_id for span in below} == {first.trace_id} != {second.trace_id}


def test_a_traced_request_is_a_child_of_its_callers_span(run: Any, troubled_log: Path) -> None:
    """As vLLM's own span is; requests without a caller have traces of their own."""
    spans = exported(run, troubled_log)
    check_tree(spans)
    a, b, c = sorted(named(spans, "request"), key=lambda span: span.start_ns)
    assert (a.trace_id, a.parent_id) == (TRACE, CALLER)
    assert (b.parent_id, c.parent_id) == ("", "")
    assert len({a.trace_id, b.trace_id, c.trace_id}) == 3


def test_a_wait_for_a_save_is_one_span_however_often_it_was_asked(run: Any, troubled_log: Path) -> None:
    """From the first deferral to the answer."""
    (wait,) = named(exported(run, troubled_log), "wait_for_save")
    assert (wait.of_ours("request_id"), wait.of_ours("num_deferrals"), wait.of_ours("generation")) == ("a", 3, 1)
    assert wait.end_ns > wait.start_ns


def test_failed_loads_and_quarantined_requests_are_errors(run: Any, troubled_log: Path) -> None:
    """And nothing else is: a request whose load failed computes, and is answered."""
    spans = exported(run, troubled_log)
    failed, quarantined = sorted((span for span in spans if span.is_error), key=lambda span: span.name)
    assert (failed.name, failed.of_ours("outcome"), failed.attributes["error.type"]) == (
        "kvledger.load",
        "failed",
        "failed",
    )
    assert failed.of_ours("request_id") == "b"
    assert (quarantined.name, quarantined.of_ours("request_id")) == ("kvledger.request", "c")
    assert quarantined.attributes["error.type"] == "ALLOC_MATCHES_LOOKUP"
    happened = {name: attributes for name, _, attributes in quarantined.events}
    assert happened["invariant.violated"]["kvledger.rule"] == "ALLOC_MATCHES_LOOKUP"
    assert "request.quarantined" in happened


def test_what_happens_to_all_is_in_a_span_of_the_log(run: Any, troubled_log: Path) -> None:
    """A reset, missing events, whatever has no request."""
    (log,) = named(exported(run, troubled_log), "log")
    assert "cache.reset" in [name for name, *_ in log.events]
    assert log.start_ns == OPENED_AT


@pytest.mark.parametrize("seed", [12, 33])
def test_spans_add_up_to_what_stats_says(run: Any, worlds: dict[int, Path], seed: int) -> None:
    """Of worlds on vLLM's real scheduler: requests, tokens, bytes and reasons; and the spans nest."""
    result = run("stats", worlds[seed], "--json")
    all_logs = result.objects("statistics")[-1]
    figures: Any = all_logs["figures"]
    total: Any = result.objects("total")[-1]
    out = worlds[seed].with_suffix(".jsonl")
    assert run("export", worlds[seed], "--otlp", out, "--force").exit_code == 0
    spans = spans_of_lines(out.read_text())
    check_tree(spans)
    requests, loads = named(spans, "request"), named(spans, "load")
    sums: Counter[str] = Counter()
    for request in requests:
        sums.update({name: value for name, value in request.attributes.items() if type(value) is int})
    assert len(requests) == figures["num_requests"] > 0
    for name in ("preemptions", "tokens_loaded", "tokens_recovered", "tokens_retained", "tokens_recomputed"):
        assert sums[f"kvledger.num_{name}"] == figures[f"num_{name}"], name
    assert figures["num_preemptions"] > 0
    assert sum(load.of_ours("outcome") == "failed" for load in loads) == figures["num_loads_failed"]
    for what in ("missed", "recomputed"):
        said = {name.rpartition(".")[2]: count for name, count in sums.items() if name.startswith(f"kvledger.{what}.")}
        assert said == total[what]


def test_a_second_export_gives_the_same_ids(run: Any, story: Driver, tmp_path: Path) -> None:
    """Also of a log that grew meanwhile, or of a part of it: what was sent before is not sent as something else."""
    whole = write_log(tmp_path / "log", story.observed, story.configuration)
    first = exported(run, whole)
    assert exported(run, whole) == first
    known = {span.span_id: (span.name, span.start_ns, span.trace_id) for span in first}
    for part in (("--until", 40), ("--since", 40), ("--request", "chat-9")):
        spans = exported(run, whole, *part)
        assert len(spans) > 1
        assert {span.span_id: (span.name, span.start_ns, span.trace_id) for span in spans}.items() <= known.items()


def test_an_endpoint_gets_what_a_file_gets(run: Any, log: Path, receiver: Receiver) -> None:
    """The path of the specification is added to a URL that lacks it."""
    for url in (receiver.url, receiver.url + "/", receiver.url + "/v1/traces"):
        receiver.spans.clear()
        result = run("export", log, "--otlp", url)
        assert result.exit_code == 0, result.err
        assert receiver.spans == exported(run, log)
        assert f"{receiver.url}/v1/traces" in result.err
    assert {path for path, _ in receiver.requests} == {"/v1/traces"}
    assert run("export", log, "--otlp", receiver.url + "/tempo").exit_code == 0
    assert receiver.requests[-1][0] == "/tempo/v1/traces"


def test_many_spans_go_in_many_requests(run: Any, tmp_path: Path, receiver: Receiver) -> None:
    """No request grows with the log."""
    driver = serve_many(300)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    assert run("export", log, "--otlp", receiver.url).exit_code == 0
    assert len(receiver.requests) == -(-len(receiver.spans) // 512) > 2
    check_tree(receiver.spans)


def test_the_environment_says_headers_compression_and_whose_spans_they_are(
    run: Any, log: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for every program with OpenTelemetry's SDK."""
    assert run("export", log, "--otlp", receiver.url).exit_code == 0
    assert receiver.spans[0].resource["service.name"] == "kvledger"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    assert run("export", log, "--otlp", receiver.url).exit_code == 0
    _, headers = receiver.requests[-1]
    assert (headers["authorization"], headers["content-encoding"]) == ("Bearer secret", "gzip")
    resource = receiver.spans[-1].resource
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("chat", "staging")
    assert resource["service.version"] == "0.1.0"
    assert resource["service.instance.id"] == resource["kvledger.log.id"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK gives up instead of trying again."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.7")


@pytest.mark.usefixtures("impatient")
def test_nobody_at_the_endpoint_is_a_reason_to_try_again(run: Any, log: Path) -> None:
    """The endpoint, what was wrong, and what to do; a password in the URL is not repeated."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    result = run("export", log, "--otlp", f"http://me:secret@127.0.0.1:{port}")
    assert result.exit_code == ExitCode.TRY_AGAIN
    assert f"http://127.0.0.1:{port}/v1/traces cannot be reached" in result.err
    assert "Connection refused" in result.err
    assert "4318" in result.err
    assert "secret" not in result.err
    assert result.err.count("\n") == 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("status", "exit_code", "remedy"),
    [
        (401, ExitCode.REFUSED, "OTEL_EXPORTER_OTLP_HEADERS"),
        (404, ExitCode.REFUSED, "receiver for OTLP over HTTP"),
        (301, ExitCode.REFUSED, "receiver for OTLP over HTTP"),
        (503, ExitCode.TRY_AGAIN, "; repeat the command: it sends the same spans"),
        (500, ExitCode.TRY_AGAIN, "; repeat the command: it sends the same spans"),
    ],
)
def test_an_endpoint_that_does_not_take_them_is_named(
    run: Any, log: Path, receiver: Receiver, status: int, exit_code: ExitCode, remedy: str
) -> None:
    """With its answer, in one line."""
    receiver.answers += [status] * 5
    result = run("export", log, "--otlp", receiver.url)
    assert result.exit_code == exit_code, result.err
    assert f"{receiver.url}/v1/traces answered {status}" in result.err
    assert remedy in result.err
    assert result.err.count("\n") == 1
    assert receiver.spans == []


def test_a_file_holds_a_request_a_line(run: Any, log: Path, tmp_path: Path) -> None:
    """As the collector's file exporter writes them: ids in hexadecimal, kinds as numbers; `-` is stdout."""
    path = tmp_path / "spans.jsonl"
    result = run("export", log, "--otlp", path, "--json")
    (written,) = result.objects("export")
    assert written == {
        "type": "export",
        "target": str(path),
        "num_spans": len(spans_of_lines(path.read_text())),
        "num_logs": 1,
    }
    assert run("export", log, "--otlp", "-").out == path.read_text()
    (span, *_) = json.loads(path.read_text().splitlines()[0])["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert span["kind"] == 1
    assert span["startTimeUnixNano"].isdecimal()
    assert run("export", log, "--otlp", path).exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("localhost:4318", "http://localhost:4318"),
        ("collector.example:4318/v1/traces", "http://collector.example:4318/v1/traces"),
        ("grpc://localhost:4317", "http://host:4318"),
        ("http://", "http://host:4318"),
        ("http://host:port", "http://host:4318"),
        ("/no/such/folder/spans.jsonl", "a folder that can be written"),
    ],
)
def test_a_target_that_cannot_be_meant_is_refused(run: Any, log: Path, target: str, remedy: str) -> None:
    """Before the log is read."""
    result = run("export", log, "--otlp", target)
    assert result.exit_code == ExitCode.USAGE
    assert target in result.err
    assert remedy in result.err


def test_a_log_that_does_not_know_when_it_was_opened_is_refused(run: Any, story: Driver, tmp_path: Path) -> None:
    """Spans in 1970 would help nobody."""
    log = write_log(tmp_path / "log", story.observed, story.configuration, header={"opened_at_unix_ns": None})
    result = run("export", log, "--otlp", "-")
    assert result.exit_code == ExitCode.USAGE
    assert str(log) in result.err
    assert "its header has no opening time" in result.err


def test_where_it_goes_is_said_once(run: Any, log: Path) -> None:
    """`-o` is for the other formats."""
    assert "--otlp x.jsonl" in run("export", log, "--otlp", "-", "-o", "x.jsonl").err


@pytest.mark.parametrize(("request_id", "of_client"), [("chat-17-0a1b2c3d", "chat-17"), ("chat-17", "chat-17")])
def test_a_request_has_the_id_that_its_client_knows(run: Any, tmp_path: Path, request_id: str, of_client: str) -> None:
    """Without what vLLM appends to it, which no client is told."""
    driver = Driver()
    driver.start(request_id, keys_of("a", 2), 20, (1, 2))
    driver.ledger.commit()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    (request,) = named(exported(run, log), "request")
    assert request.attributes["gen_ai.request.id"] == of_client
    assert request.of_ours("request_id") == request_id
