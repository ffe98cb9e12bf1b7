"""Figures get from a run into docs/benchmarks.md by a command; what people wrote around them stays."""

from __future__ import annotations

import importlib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from benchmarks import page, run
from benchmarks.figures import Figure, Spread, compared
from benchmarks.results import Result, store

PAGE = """# Benchmarks

Before.

<!-- figures: speed; plot: schedule() -->
old figures
<!-- end of figures -->

After.
"""


def a_result(case: str, *, ours: list[float]) -> Result:
    """Two contenders over three rounds."""
    figures = compared("schedule()", "µs", {"none": [100.0, 110.0, 90.0], "ours": ours}, anchor="none")
    return Result(
        case, (*figures, Figure("log", "ours", 5.0, "B")), "make bench", "2026-01-01", "abc", "2 cores", minutes=0.1
    )


@pytest.fixture
def benchmarks_page(tmp_path: Path) -> Path:
    """A page with one block, and results stored for it."""
    store(tmp_path / "results" / "speed.json", a_result("calm", ours=[105.0, 121.0, 90.0]))
    path = tmp_path / "benchmarks.md"
    path.write_text(PAGE)
    return path


def test_a_contender_stands_beside_its_anchor_round_by_round() -> None:
    """A ratio is taken within each round; the figure has their median and what lies around it."""
    none, ours = compared("x", "µs", {"none": [100.0, 200.0, 400.0], "ours": [110.0, 200.0, 360.0]}, anchor="none")
    assert (none.ratio, ours.ratio) == (None, Spread(0.9, 1.0, 1.1))


def test_the_block_gets_the_figures_and_the_prose_stays(benchmarks_page: Path) -> None:
    """Only what stands between the two comments is written."""
    assert page.write(benchmarks_page, benchmarks_page.parent / "results", {"speed"}) == ["speed"]
    text = benchmarks_page.read_text()
    assert text.startswith("# Benchmarks\n\nBefore.\n\n<!-- figures: speed; plot: schedule() -->\n")
    assert text.endswith("\n<!-- end of figures -->\n\nAfter.\n")
    assert "old figures" not in text
    assert "| calm | none | 100 µs |  |\n| calm | ours | 1.05× (1.00–1.10) | 5 B |" in text
    assert "`make bench`, 2026-01-01, commit abc, 2 cores" in text


def test_writing_again_changes_nothing(benchmarks_page: Path) -> None:
    """The same results make the same page."""
    results = benchmarks_page.parent / "results"
    page.write(benchmarks_page, results, {"speed"})
    first = benchmarks_page.read_text()
    page.write(benchmarks_page, results, {"speed"})
    assert benchmarks_page.read_text() == first


def test_a_block_without_results_stays(benchmarks_page: Path) -> None:
    """What was not measured keeps its last figures."""
    assert page.write(benchmarks_page, benchmarks_page.parent / "elsewhere", {"speed"}) == []
    assert benchmarks_page.read_text() == PAGE


def test_a_block_that_was_not_asked_for_stays(benchmarks_page: Path) -> None:
    """So figures of a busy hour need not get in with others."""
    assert page.write(benchmarks_page, benchmarks_page.parent / "results", {"memory"}) == []
    assert benchmarks_page.read_text() == PAGE


def test_a_case_that_ran_again_takes_the_place_of_its_last_run(benchmarks_page: Path) -> None:
    """A case has one result, and others keep theirs."""
    results = benchmarks_page.parent / "results"
    store(results / "speed.json", a_result("busy", ours=[200.0, 200.0, 200.0]))
    store(results / "speed.json", a_result("calm", ours=[300.0, 330.0, 270.0]))
    page.write(benchmarks_page, results, {"speed"})
    text = benchmarks_page.read_text()
    assert text.count("| calm |") == text.count("| busy |") == 2
    assert "| calm | none | 100 µs |  |\n| calm | ours | 3.00× |" in text


@pytest.mark.parametrize("module", run.BENCHMARKS.values())
def test_every_benchmark_has_cases_in_both_forms(module: str) -> None:
    """It is imported with all that it needs; what is expensive begins when a case is measured."""
    cases = importlib.import_module(f"benchmarks.{module}").cases
    assert cases(full=False).keys()
    assert cases(full=True).keys()


def test_a_plot_has_a_bar_for_each_ratio(benchmarks_page: Path) -> None:
    """The anchor has none: it is the line at 1."""
    page.write(benchmarks_page, benchmarks_page.parent / "results", {"speed"})
    plot = benchmarks_page.parent / "benchmarks" / "speed-schedule.svg"
    assert f"](benchmarks/{plot.name})" in benchmarks_page.read_text()
    root = ET.fromstring(plot.read_text())  # noqa: S314 -- our own
    assert len(root.findall("{*}rect")) == 1
    assert "ours" in {text.text for text in root.findall("{*}text")}
