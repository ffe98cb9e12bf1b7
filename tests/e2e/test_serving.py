"""The server as an operator starts it: the JSON object on the command line, HTTP, metrics, SIGTERM.

The module is what `vllm serve` runs. The command itself fails in the CPU build (0.32.0), which installs under another
name than the one the command asks its version of.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
from otlp_receiver import ReceivedSpan, receiving, spans_of_lines
from processes import finished, started
from prometheus_server import Prometheus, alerts, find_prometheus, metrics_in, panel_expressions, scraping
from sim.subscriber import WHOLE_HASHES, Subscriber

from e2e.engines import Reference, read_sound_log
from e2e.feed import feed
from kvledger.adapters.lab.demo.workload import Workload, connector
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.vllm.chunk_keys import KEY_BYTES
from kvledger.lifecycle import events as e
from kvledger.storage.events import HowEnded, read_ending

pytestmark = pytest.mark.vllm

WORKLOAD = Workload(seed=1)
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
CALLER = "00f067aa0ba902b7"
TRACES = [f"{number:032x}" for number in range(1, WORKLOAD.num_requests + 1)]
LONG_PROMPTS = Workload(seed=2, num_requests=3, shortest_prompt=673, longest_prompt=673).prompts()
"""Whole blocks and a token, more of them than a small host pool has left."""
SMALL_POOL = "4MiB"
PATIENCE_S = 600.0  # for an answer; only what hangs takes as long


@attrs.frozen
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    said: Path
    figures: list[dict[str, Any]] = attrs.field(factory=list)
    """What the responses to the requests that asked said of them."""

    def get(self, path: str) -> str:
        """The body of a GET request."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as response:  # noqa: S310 -- loopback
            body: bytes = response.read()
        return body.decode()

    def complete(self, prompt: list[int], max_tokens: int, trace_id: str = "") -> list[int]:
        """Greedy output token ids of the completions endpoint. Without a tokenizer it takes and gives token ids.

        With a `trace_id` the client says that it traces, and that `CALLER` is its span; and it asks for its figures.
        """
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        if trace_id:
            fields["kv_transfer_params"] = {"kvledger_figures": True}
        body = json.dumps({**fields, "return_token_ids": True, "detokenize": False}).encode()
        request = urllib.request.Request(  # noqa: S310 -- loopback
            self.url + "/v1/completions", body, {"Content-Type": "application/json"}
        )
        if trace_id:
            request.add_header("traceparent", f"00-{trace_id}-{CALLER}-01")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:  # noqa: S310
            answer: dict[str, Any] = json.load(response)
        if trace_id:
            self.figures.append(answer["kv_transfer_params"]["kvledger"])
        return list(answer["choices"][0]["token_ids"])


@contextmanager
def serving(
    model: Path,
    workload: Workload,
    log_dir: Path,
    *,
    traces_to: str = "",
    kv_events: object = None,
    **extra_config: Any,
) -> Iterator[Server]:
    """A server on a free port of the loopback interface, ready for requests.

    It traces where there is a receiver, and publishes KV events where `kv_events` says how.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    transfer = connector(log_dir, chunk_size=workload.chunk_size, **{"host_bytes": "64MiB", **extra_config})
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--kv-transfer-config": json.dumps(transfer),
        "--dtype": "float32",
        "--block-size": workload.block_size,
        "--num-gpu-blocks-override": workload.num_blocks,
        "--max-num-seqs": workload.max_num_seqs,
        "--max-num-batched-tokens": workload.max_num_batched_tokens,
        "--max-model-len": workload.max_model_len,
    }
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    if traces_to:
        options["--otlp-traces-endpoint"] = f"{traces_to}/v1/traces"
    if kv_events:
        options["--kv-events-config"] = json.dumps(kv_events)
    caching = "--enable-prefix-caching" if workload.enable_prefix_caching else "--no-enable-prefix-caching"
    flags = ["--skip-tokenizer-init", "--enforce-eager", caching]
    said = log_dir.with_name("server.txt")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]
    words = [*command, *(str(word) for option in options.items() for word in option)]
    paths = os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH"))))
    with (
        said.open("wb") as output,
        started(words, stdout=output, stderr=subprocess.STDOUT, env={**environment, "PYTHONPATH": paths}) as process,
    ):
        server = Server(process, f"http://127.0.0.1:{port}", said)
        _wait_until_ready(server)
        yield server


def _wait_until_ready(server: Server) -> None:
    while True:
        assert server.process.poll() is None, server.said.read_text()[-3000:]
        try:
            server.get("/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
        else:
            return


@attrs.frozen
class Scraped:
    """What a Prometheus made of it."""

    rules: dict[str, dict[str, str]]
    """Alert -> `health`, `state` and `lastError` of its evaluation."""
    panels: dict[str, list[float]]
    """Panel and query -> the value of each series."""
    names: set[str]
    """Of all metrics."""


@attrs.frozen
class Served:
    """What became of a server's life."""

    outputs: list[list[int]]
    log_path: Path
    metrics: str
    """As exposed, when the last request was released."""
    figures: list[dict[str, Any]]
    """Of each request, as its response said."""
    exit_code: int
    scraped: Scraped | None
    """None where there is no Prometheus."""
    spans: list[ReceivedSpan]
    """VLLM's own."""
    subscriber: Subscriber
    """Who was told of KV events, as many as were sent."""


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Concurrent requests over HTTP, under the eyes of a Prometheus from before the first; SIGTERM ends it."""
    directory = tmp_path_factory.mktemp("served")
    prompts, log_dir = WORKLOAD.prompts(), directory / "logs"
    prometheus_path = find_prometheus()
    with ExitStack() as stack:
        receiver = stack.enter_context(receiving())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in WHOLE_HASHES.items():
            patch.setenv(name, value)
        kv_events, subscriber = stack.enter_context(feed()), Subscriber()
        server = stack.enter_context(
            serving(
                model,
                WORKLOAD,
                log_dir,
                traces_to=receiver.url,
                kv_events=kv_events.configuration,
                host_bytes=SMALL_POOL,
            )
        )
        target = server.url.removeprefix("http://")
        watching = prometheus_path and stack.enter_context(scraping(prometheus_path, target, directory / "prometheus"))
        with ThreadPoolExecutor(len(prompts)) as clients:
            outputs = list(clients.map(server.complete, prompts, [WORKLOAD.max_tokens] * len(prompts), TRACES))
        (log_path,) = log_dir.iterdir()
        _wait_until_released(log_path, len(prompts))
        metrics = server.get("/metrics")
        scraped = _scraped(watching, len(prompts)) if watching else None
        for prompt in LONG_PROMPTS:
            server.complete(prompt, 1)
        _wait_until_released(log_path, len(prompts) + len(LONG_PROMPTS))
        server.complete(LONG_PROMPTS[0][:1], 1)  # what was held back for the log goes out with a later step
        last_block = tuple(LONG_PROMPTS[-1][-WORKLOAD.block_size - 1 : -1])
        kv_events.read(subscriber.publish, lambda: any(b.token_ids == last_block for b in subscriber.on_host.values()))
        _wait_until_released(log_path, len(prompts) + len(LONG_PROMPTS) + 1)
        server.process.send_signal(signal.SIGTERM)
        exit_code = server.process.wait()
        return Served(outputs, log_path, metrics, server.figures, exit_code, scraped, receiver.spans, subscriber)


def _scraped(prometheus: Prometheus, num_requests: int) -> Scraped:
    """Everything that docs/monitoring asks, once the end of the requests was scraped and the rules were evaluated."""
    prometheus.wait_for(f"vllm:kvledger_requests_total == {num_requests}")
    while True:
        (group,) = prometheus.get("/api/v1/rules")["groups"]
        if all(rule["health"] != "unknown" for rule in group["rules"]):
            break
        time.sleep(0.2)
    return Scraped(
        {rule["name"]: rule for rule in group["rules"]},
        {panel: prometheus.values(expression) for panel, expression in panel_expressions().items()},
        set(prometheus.get("/api/v1/label/__name__/values")),
    )


def test_a_server_recovers_preempted_requests_tells_its_figures_and_leaves_a_sound_log(
    served: Served, reference: Reference
) -> None:
    """Each is answered as without a connector; figures in /metrics; SIGTERM ends it.

    vLLM gives its engine no time to end unless --shutdown-timeout says so: it kills it. The log survives that.
    """
    prompts = WORKLOAD.prompts()
    assert served.outputs == reference(prompts, WORKLOAD.max_tokens)
    assert served.exit_code == 0
    log = read_sound_log(served.log_path, was_killed=True)
    assert log.num_requests_left == 0
    ending = read_ending(served.log_path)
    assert ending.how in {HowEnded.CUT_OFF, HowEnded.CLOSED}, "whether it is killed before is vLLM's to say"
    assert ending.missing is None
    metrics = _figures(served.metrics)
    assert metrics["vllm:kvledger_preemptions_total"] == log.figures.num_preemptions > 0
    assert metrics["vllm:kvledger_recovered_tokens_total"] == log.figures.num_tokens_recovered > 0
    assert metrics["vllm:kvledger_requests_total"] == len(prompts)
    assert metrics["vllm:kvledger_recovery_time_seconds_count"] > 0
    assert metrics["vllm:kvledger_log_last_write_timestamp_seconds"] > metrics["vllm:kvledger_requests_created"]


def test_each_response_has_the_figures_of_its_request(served: Served) -> None:
    """Together they are what /metrics says."""
    metrics = _figures(served.metrics)
    assert len(served.figures) == len(WORKLOAD.prompts())
    for figure, metric in (("num_preemptions", "preemptions"), ("num_loaded_tokens", "loaded_tokens")):
        assert sum(figures[figure] for figures in served.figures) == metrics[f"vllm:kvledger_{metric}_total"] > 0
    for figure, metric in (("num_missed_tokens", "missed_tokens"), ("num_recomputed_tokens", "recomputed_tokens")):
        told = sum(sum(figures[figure].values()) for figures in served.figures)
        assert told == metrics[f"vllm:kvledger_{metric}_total"], figure
    for figures in served.figures:
        assert figures["running_ms"] > 0
        assert (figures["preempted_ms"] > 0) == (figures["num_preemptions"] > 0)


def test_whoever_subscribes_to_kv_events_knows_what_the_host_pool_has(served: Served) -> None:
    """Over vLLM's own ZMQ publisher: the blocks that the log says, also after later prompts have pushed some out."""
    log = read_sound_log(served.log_path, was_killed=True)
    assert {block_hash[:KEY_BYTES] for block_hash in served.subscriber.on_host} == log.committed
    assert served.subscriber.num_removed > 0


def test_a_request_stands_beside_vllm_s_own_span_in_its_callers_trace(served: Served, tmp_path: Path) -> None:
    """The two have the same parent, and kvledger's phases and copies are below its own."""
    path = tmp_path / "spans.jsonl"
    assert main(["export", str(served.log_path), "--otlp", str(path)]) == 0
    ours = spans_of_lines(path.read_text())
    for trace_id in TRACES:
        (theirs,) = (span for span in served.spans if span.trace_id == trace_id and span.name == "llm_request")
        (request,) = (span for span in ours if span.trace_id == trace_id and span.name == "kvledger.request")
        assert request.parent_id == theirs.parent_id == CALLER
        # Not which began first: vLLM reads the time of day, a log counts from when it was opened.
        assert request.start_ns < request.end_ns
        assert request.attributes["gen_ai.request.id"] == theirs.attributes["gen_ai.request.id"]
        assert request.of_ours("num_prompt_tokens") == theirs.attributes["gen_ai.usage.prompt_tokens"]
        below = {span.name for span in ours if span.parent_id == request.span_id}
        assert below >= {"kvledger.new", "kvledger.running", "kvledger.save"}
    assert {span.name for span in ours} >= {"kvledger.preempted", "kvledger.recovering", "kvledger.load"}


def test_a_real_prometheus_understands_every_rule_and_fills_every_panel(served: Served, prometheus_path: str) -> None:
    """No rule fails to be evaluated and none fires in health; each panel has series, of extensions alone none."""
    assert prometheus_path
    scraped = served.scraped
    assert scraped is not None
    assert {name: rule.get("lastError", "") for name, rule in scraped.rules.items()} == dict.fromkeys(alerts(), "")
    firing = {name for name, rule in scraped.rules.items() if rule["state"] != "inactive"}
    assert firing <= {"KVLedgerRecoveriesSlow"}, (
        "which a machine that is busy with other things is told, and rightly so"
    )
    without_series = {panel for panel, values in scraped.panels.items() if not values}
    assert without_series == {"Events of extensions / A"}
    recovered = scraped.panels["What became of preempted tokens / A"]
    assert sum(recovered) > 0, "what happened while it watched is seen, from the first increase on"
    used = set().union(*(metrics_in(rule["expr"]) for rule in alerts().values()))
    used |= set().union(*map(metrics_in, panel_expressions().values()))
    assert used - scraped.names == {"vllm:kvledger_extension_events_total"}


def test_promtool_finds_nothing_to_mend_but_vllm_s_own_colon(served: Served, prometheus_path: str) -> None:
    """Units, `_total`, HELP: of the connector's own metrics."""
    assert prometheus_path
    ours = [line for line in served.metrics.splitlines(keepends=True) if "vllm:kvledger_" in line]
    told = subprocess.run(
        ["promtool", "check", "metrics"], input="".join(ours), capture_output=True, text=True, check=False
    )
    assert {line.partition(" ")[2] for line in told.stderr.splitlines()} == {"metric names should not contain ':'"}


INCIDENT = Workload(
    seed=2, num_requests=20, shortest_prompt=150, num_blocks=40, max_num_seqs=20, enable_prefix_caching=True
)
"""Few blocks for twenty requests, and prefix caching, so that vLLM finds some of what a preempted one computed."""
CACHED_ANSWER = "cached_answer:CachedAnswer"


@pytest.mark.long
def test_the_incident_of_the_readme_costs_no_engine_its_life(
    model: Path,
    reference: Reference,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LMCache#2158 made again in a handler: everybody is answered rightly, `verify` names it, `repro` repeats it.

    Without the check of what leaves towards vLLM its scheduler asserts, and the engine is dead.
    """
    prompts = INCIDENT.prompts()
    expected = reference(prompts, INCIDENT.max_tokens)
    log_dir = tmp_path / "logs"
    with serving(model, INCIDENT, log_dir, handlers=[CACHED_ANSWER]) as server:
        with ThreadPoolExecutor(len(prompts)) as clients:
            outputs = list(clients.map(server.complete, prompts, [INCIDENT.max_tokens] * len(prompts)))
        assert outputs == expected
        server.get("/health")
        (log_path,) = log_dir.iterdir()
        _wait_until_released(log_path, len(prompts))
        assert server.process.poll() is None
    events = [event for _, event in open_log(log_path).events()]
    assert any(isinstance(event, e.RequestPreempted) for event in events)
    withheld = [event for event in events if isinstance(event, e.DecisionWithheld)]
    assert withheld
    assert main(["verify", str(log_path)]) == 1
    assert "LOOKUP_PURE at event" in capsys.readouterr().out
    monkeypatch.syspath_prepend(str(EXAMPLES))
    request_id = withheld[0].request_id
    test = tmp_path / "test_incident.py"
    assert main(["repro", str(log_path), request_id, "--handlers", CACHED_ANSWER, "-o", str(test)]) == 0
    run = finished([sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", test])
    assert run.returncode == 1, run.stdout
    assert re.search("FAILED .*::test_lookup_pure_holds", run.stdout), run.stdout


def _wait_until_released(log_path: Path, num_requests: int) -> None:
    """The last request's end is logged in the step after its answer; the log can be read while it is written."""
    while sum(isinstance(event, e.RequestReleased) for _, event in open_log(log_path).events()) < num_requests:
        time.sleep(0.1)


def _figures(metrics: str) -> dict[str, float]:
    """Metric name -> the sum of its series, of the connector's metrics."""
    sums: dict[str, float] = defaultdict(float)
    for line in metrics.splitlines():
        if line.startswith("vllm:kvledger_"):
            sums[line.partition("{")[0]] += float(line.rpartition(" ")[2])
    return sums
