"""A real Prometheus for tests, and what docs/monitoring asks of it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import yaml
from processes import started

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
_PATIENCE_S = 600.0  # for an answer; only what hangs takes as long
_VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$model_name": ".*", "$engine": ".*", "$instance": ".*"}
"""What Grafana puts in their places."""


def find_prometheus() -> str | None:
    """Where it is; None where it, or promtool, is missing."""
    return shutil.which("prometheus") if shutil.which("promtool") else None


def alerts() -> dict[str, dict[str, Any]]:
    """The rules by name."""
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def dashboard() -> dict[str, Any]:
    """As Grafana reads it."""
    read: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return read


def compose() -> dict[str, Any]:
    """As Docker reads it."""
    read: dict[str, Any] = yaml.safe_load((MONITORING / "compose.yml").read_text())
    return read


def panel_expressions() -> dict[str, str]:
    """Panel and query -> what it asks, as Grafana would send it."""
    expressions = {}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for variable, value in _VARIABLES.items():
                expression = expression.replace(variable, value)
            expressions[f"{panel['title']} / {target['refId']}"] = expression
    return expressions


def metrics_in(expression: str) -> set[str]:
    """The names of metrics in it, kvledger's and vLLM's own."""
    return set(re.findall(r"vllm:\w+", expression))


@attrs.frozen
class Prometheus:
    """A running one."""

    process: subprocess.Popen[bytes]
    url: str
    said: Path

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer.

        Raises:
            AssertionError: an error, in Prometheus's words.
        """
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        try:
            with urllib.request.urlopen(self.url + path + query, timeout=_PATIENCE_S) as response:  # noqa: S310 -- loopback
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """Of each series that the expression has now."""
        return [float(sample["value"][1]) for sample in self.get("/api/v1/query", query=expression)["result"]]

    def wait_for(self, expression: str) -> None:
        """Return when the expression has a series; what never comes hangs, and pytest's limit ends it."""
        while not self.values(expression):
            assert self.process.poll() is None, self.said.read_text()[-3000:]
            time.sleep(0.2)


@contextmanager
def scraping(prometheus_path: str, target: str, directory: Path) -> Iterator[Prometheus]:
    """A Prometheus with docs/monitoring's configuration that scrapes `target` every second, and has done so."""
    configuration = yaml.safe_load(compose()["configs"]["prometheus"]["content"])
    configuration["global"] = dict.fromkeys(configuration["global"], "1s")
    configuration["rule_files"] = [str(MONITORING / name) for name in configuration["rule_files"]]
    (job,) = configuration["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    directory.mkdir()
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    options: Mapping[str, object] = {
        "config.file": directory / "prometheus.yml",
        "storage.tsdb.path": directory / "data",
        "web.listen-address": address,
    }
    said = directory / "said.txt"
    command = [prometheus_path, *(f"--{name}={value}" for name, value in options.items())]
    with said.open("wb") as output, started(command, stdout=output, stderr=subprocess.STDOUT) as process:
        prometheus = Prometheus(process, f"http://{address}", said)
        while True:
            assert process.poll() is None, said.read_text()[-3000:]
            try:
                prometheus.wait_for("up == 1")
            except (urllib.error.URLError, ConnectionError, AssertionError):  # it does not listen, or is not ready yet
                time.sleep(0.2)
            else:
                break
        yield prometheus
