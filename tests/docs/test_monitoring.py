"""docs/monitoring without a server: what promtool says, and that rules, dashboard and page speak of the same things.

That they speak of what a server exposes, `tests/e2e/test_serving.py` asks a real Prometheus.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from processes import finished
from prometheus_server import MONITORING, alerts, compose, dashboard, metrics_in, panel_expressions
from vllm.v1.metrics import loggers

from kvledger.adapters.vllm.metric_names import COUNTERS, GAUGES, HISTOGRAMS, PREFIX

SERIES = {f"{PREFIX}{name}_total" for name, _ in COUNTERS.values()} | {f"{PREFIX}{name}" for name, _ in GAUGES.values()}
SERIES |= {f"{PREFIX}{name}_{part}" for name, _ in HISTOGRAMS.values() for part in ("bucket", "count", "sum")}


def test_the_alerts_do_over_time_what_they_promise(prometheus_path: str) -> None:
    """Promtool reads the rules and plays their stories: health, an idle engine, a full disk, a first failure."""
    assert prometheus_path
    for check in (["check", "rules", MONITORING / "alerts.yml"], ["test", "rules", MONITORING / "alerts_test.yml"]):
        told = finished(["promtool", *check])
        assert told.returncode == 0, told.stdout + told.stderr


def test_the_configuration_of_prometheus_is_one(prometheus_path: str, tmp_path: Path) -> None:
    """As the compose file writes it."""
    assert prometheus_path
    content = compose()["configs"]["prometheus"]["content"].replace("${VLLM_TARGET:-localhost:8000}", "localhost:8000")
    (tmp_path / "alerts.yml").write_bytes((MONITORING / "alerts.yml").read_bytes())
    (tmp_path / "prometheus.yml").write_text(content)
    told = finished(["promtool", "check", "config", tmp_path / "prometheus.yml"])
    assert told.returncode == 0, told.stdout + told.stderr


def test_every_alert_names_a_section_that_says_what_to_do(documents: dict[str, str]) -> None:
    """And that section names the alert; no alert is named that is not there."""
    sections = dict(
        re.findall(r"^### (.+?)\n(.+?)(?=^#|\Z)", documents["docs/monitoring.md"], re.MULTILINE | re.DOTALL)
    )
    by_anchor = {re.sub(r"[^a-z ]", "", title.lower()).replace(" ", "-"): text for title, text in sections.items()}
    for name, rule in alerts().items():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "monitoring.md"
        assert f"`{name}`" in by_anchor[anchor], name
    named = re.findall(r"`(KVLedger[A-Za-z]+)`", documents["docs/monitoring.md"])
    assert sorted(named) == sorted(alerts())


def test_rules_and_panels_ask_for_metrics_that_there_are() -> None:
    """By name; and every metric is shown, or alerted on, somewhere."""
    expressions = [*(rule["expr"] for rule in alerts().values()), *panel_expressions().values()]
    used = set().union(*map(metrics_in, expressions))
    own = {name for name in used if not name.startswith(PREFIX)}
    assert used - own <= SERIES
    source = Path(loggers.__file__).read_text()
    for name in own:
        assert f'"{re.sub("_(total|bucket)$", "", name)}"' in source, name
    shown = {name for name in SERIES if not name.endswith(("_count", "_sum"))}
    assert shown - used == {f"{PREFIX}loaded_tokens_total"}, "which what was recovered is a part of"


def test_the_dashboard_is_what_grafana_imports() -> None:
    """Unique ids, one data source for all to choose, every variable defined, no two panels in one place."""
    read = dashboard()
    assert {"uid", "title", "schemaVersion", "time", "templating", "annotations", "panels"} <= set(read)
    assert "id" not in read, "a database's number; Grafana gives it"
    panels = read["panels"]
    assert [count for count in Counter(panel["id"] for panel in panels).values() if count > 1] == []
    places = Counter(
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )
    assert max(places.values()) == 1
    assert max(x for x, _ in places) < 24
    variables = {variable["name"]: variable["type"] for variable in read["templating"]["list"]}
    assert variables.pop("datasource") == "datasource"
    assert set(variables.values()) == {"query"}
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            asked = set(re.findall(r"\$(?!__)(\w+)", target["expr"]))
            assert asked == set(variables), panel["title"]


def test_the_compose_file_mounts_what_there_is() -> None:
    """Every configuration is declared, used, and its file lies next to it."""
    read = compose()
    mounted = [mount["source"] for service in read["services"].values() for mount in service.get("configs", ())]
    assert sorted(mounted) == sorted(read["configs"])
    for configuration in read["configs"].values():
        assert "content" in configuration or (MONITORING / configuration["file"]).is_file()
