"""The contract names what exists: rules, scenarios, places and words of vLLM."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import vllm

from kvledger.adapters.lab.conformance.obligations import OBLIGATIONS, Check, Obligation
from kvledger.adapters.lab.conformance.scenarios import SCENARIOS
from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.recorded.rules import RULES
from kvledger.lifecycle import Core
from kvledger.lifecycle.audit import RECORDED

VLLM = Path(vllm.__file__).parent
SHORT = {
    "base.py": "distributed/kv_transfer/kv_connector/v1/base.py",
    "scheduler.py": "v1/core/sched/scheduler.py",
}


def code_of(file: str) -> str:
    """A file of vLLM, by the name that the contract has for it."""
    return (VLLM / SHORT.get(file, file)).read_text()


@pytest.mark.parametrize("obligation", OBLIGATIONS.values(), ids=OBLIGATIONS)
def test_an_obligation_names_what_exists(obligation: Obligation) -> None:
    """Every rule or check, every scenario, every file and function of vLLM, every hook."""
    known = {*Core.standard().rules, *Core.standard().extended(Recorder()).rules, *Check, RECORDED}
    assert set(obligation.checks) <= known
    assert set(obligation.scenarios) <= SCENARIOS.keys()
    for place in obligation.source:
        file, _, what = place.partition(", ")
        names = {node.name for node in ast.walk(ast.parse(code_of(file))) if hasattr(node, "name")}
        assert what in {*names, "module docstring"}, place
    if obligation.hook != "every hook":
        for hook in obligation.hook.split(", "):
            assert f"def {hook}(" in code_of("base.py"), hook


@pytest.mark.parametrize("obligation", OBLIGATIONS.values(), ids=OBLIGATIONS)
def test_what_stands_in_quotation_marks_is_from_vllm(obligation: Obligation) -> None:
    """Its base class says so, in these words; capitals, line breaks and marks of code apart."""

    def plain(text: str) -> str:
        return re.sub(r"\s+", " ", text.replace("`", "")).lower()

    source = plain(code_of("base.py"))
    assert [quote for quote in re.findall('"([^"]+)"', obligation.text) if plain(quote).rstrip(".") not in source] == []


def test_every_rule_of_the_recorder_has_an_obligation() -> None:
    """And every check of the simulation, and every scenario with a name is a scenario."""
    held = {check for obligation in OBLIGATIONS.values() for check in obligation.checks}
    assert {*RULES, *Check} - held == set()
