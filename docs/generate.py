"""Writes the pages of docs/ that are generated from the source, such as states, events, rules and metrics.

    python docs/generate.py            write them
    python docs/generate.py --check    write nothing; print the stale pages, and exit with 1 if there are any

The text of a page is docstrings and data of the source. This file has the introductions, the order and the layout.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import inspect
import io
import itertools
import json
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pydantic
from facts import FACTS, Why

from kvledger.adapters.figures import DURATION_BOUNDS_NS, NO_LOOKUP, NOT_LOADED, NOT_OFFERED
from kvledger.adapters.lab.conformance import obligations
from kvledger.adapters.lab.conformance.scenarios import SCENARIOS
from kvledger.adapters.recorded.rules import RULES as RECORDER_RULES
from kvledger.adapters.tools.cli.app import build_app
from kvledger.adapters.tools.cli.commands import COMMANDS
from kvledger.adapters.tools.tables.schema import COMMON, SCHEMA_VERSION, TABLES, Column
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.log_settings import LogSettings
from kvledger.adapters.vllm.metric_names import (
    BY_EXTENSION,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    INFO,
    INFO_SETTINGS,
    LABELS,
    MISSED,
    PREFIX,
    RECOMPUTED,
)
from kvledger.lifecycle import Core, LedgerConfiguration, events, ranges, rules, states, table
from kvledger.lifecycle.codec import field_names
from kvledger.lifecycle.events import MissReason
from kvledger.lifecycle.machine import mermaid_diagram
from kvledger.lifecycle.states import RequestState

DOCS = Path(__file__).resolve().parent
REPOSITORY = DOCS.parent
CORE = Core.standard()
_MAX_COLUMNS = 120
NOTICE = "<!-- Generated from {source} by `make docs`. Edit the source and run that; edits to this page are lost. -->"


def heading(title: str, source: str) -> list[str]:
    """Return the first lines of every generated page."""
    return [NOTICE.format(source=source), "", f"# {title}", ""]


def prose(text: str) -> list[str]:
    """Return the lines of paragraphs, and an empty line after them."""
    return [*inspect.cleandoc(text).splitlines(), ""]


def rows(columns: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *body]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines] + [""]


def one_line(text: str | None) -> str:
    """Return a docstring as one line."""
    return " ".join((text or "").split())


def sentence(text: str) -> str:
    """Return the text with a capital at its beginning, unless the first word is vLLM."""
    return text if text.startswith("vLLM") else text[:1].upper() + text[1:]


def attribute_docs(owner: type | types.ModuleType) -> dict[str, str]:
    """Name of an attribute → its docstring in the source. Includes attributes of base classes in the same module."""
    if isinstance(owner, type):
        inherited = (base for base in owner.__mro__[1:] if base.__module__ == owner.__module__)
        found = {name: text for base in inherited for name, text in attribute_docs_of(base).items()}
        return found | attribute_docs_of(owner)
    return attribute_docs_of(owner)


def attribute_docs_of(owner: type | types.ModuleType) -> dict[str, str]:
    """Name of an attribute → its docstring in the source. Does not include attributes of base classes."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(owner)))
    body = tree.body if isinstance(owner, types.ModuleType) else tree.body[0].body  # type: ignore[attr-defined]
    found = {}
    for statement, following in itertools.pairwise(body):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        if isinstance(target, ast.Name) and isinstance(following, ast.Expr):
            found[target.id] = one_line(ast.literal_eval(following.value))
    return found


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield (name as in a traceback, syntax tree) of every function and method, except of inner functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file. Many tables are generated from the same files."""
    return ast.parse(path.read_text())


def places(pattern: str, wanted: Callable[[ast.AST], Iterable[str]]) -> dict[str, list[str]]:
    """Name → links to the functions in which `wanted` finds the name, in all files that match `pattern`."""
    found: dict[str, dict[str, None]] = {}
    for path in sorted(REPOSITORY.glob(pattern)):
        relative = path.relative_to(REPOSITORY)
        for function, tree in functions(parsed(path)):
            for node in ast.walk(tree):
                for name in wanted(node):
                    found.setdefault(name, {})[f"[`{relative.stem}.{function}`](../{relative})"] = None
    return {name: list(links) for name, links in found.items()}


# --- states ----------------------------------------------------------------------------------------------------------


REGIONS_INTRODUCTION = """
Besides the phase, a request has one state in each of the regions below, except for `work` and `source`. These two are
the regions of a job. Of a request's states, only the phase and `blocks` decide whether an event is legal. The diagrams
show the transitions.
"""


TRANSCRIPTS_INTRODUCTION = """
A transcript shows a situation event by event: each observation, the decisions about it, the states of the requests and
the findings of the audit. A test plays each transcript, so all transcripts are up to date.
"""


def states_page() -> list[str]:
    """Return the states, diagrams, the transition table as a matrix, and the rules of the tables."""
    texts = attribute_docs(states.RequestState)
    lines = heading("States", "lifecycle/states.py and lifecycle/table.py")
    for state in RequestState:
        lines += [f"**{state.value}**: {texts[state.name]}", ""]
    lines += ["```mermaid", mermaid_diagram(CORE.regions[0], CORE.events), "```", ""]
    lines += ["## The table", "", "A cell is the next state. `·`: the state stays. Empty: the event is illegal."]
    lines += ["`request.arrived` creates a request, so it has no row.", ""]

    def cell(state: RequestState, dests: Mapping[Any, Any]) -> str:
        dest = dests.get(state)
        return "" if dest is None else "·" if dest is state else f"→ {dest.value}"

    # All variants of an event lead to the same phase.
    dests_of = {event: CORE.tables.phase.get(events.triggers_of(event)[0]) for event in CORE.tables.request_events}
    legal = [(event, dests) for event, dests in dests_of.items() if dests]
    body = [[f"`{event.id}`", *(cell(state, dests) for state in RequestState)] for event, dests in legal]
    lines += rows(["event", *(state.value for state in RequestState)], body)
    lines += ["## Other regions", "", *prose(REGIONS_INTRODUCTION)]
    about = attribute_docs(table)
    for region in (*table.REGIONS[1:], *table.JOB_REGIONS):
        lines += [f"### {region.name}", "", about[region.name.upper()], ""]
        texts = attribute_docs(region.states)
        lines += [f"- **{state.value}**: {texts[state.name]}" for state in region.states]
        lines += ["", "```mermaid", mermaid_diagram(region, CORE.events), "```", ""]
    lines += ["## Transcripts", "", *prose(TRANSCRIPTS_INTRODUCTION)]
    for path in sorted((REPOSITORY / "tests/transcripts").glob("*.txt")):
        lines += [f"- [{path.stem.replace('_', ' ')}](../tests/transcripts/{path.name})"]
    lines += ["", "## The rules of the tables", "", "```text", *inspect.getdoc(table).splitlines(), "```"]  # type: ignore[union-attr]
    return lines


# --- events ----------------------------------------------------------------------------------------------------------


def made_events(node: ast.AST) -> Iterator[str]:
    """Yield the event classes that this expression creates: `e.Name(...)`, or `e.Name if … else e.Other`."""
    if isinstance(node, ast.Call):
        made = [node.func]
    elif isinstance(node, ast.IfExp):
        made = [node.body, node.orelse]
    else:
        return
    for made_class in made:
        if isinstance(made_class, ast.Attribute) and getattr(made_class.value, "id", "") == "e":
            yield made_class.attr


RANGES_INTRODUCTION = """
Readers check these ranges when they decode a frame. If a number of a frame is outside its range, they report the frame
as damage, and use none of its events. The ranges include every number that vLLM, a worker or a faulty connector can
produce. The [rules](invariants.md) judge the numbers within the ranges.
"""

_WRITING = ("copies", "extensions")
"""Projections that create events."""


def events_page() -> list[str]:
    """Return all events, in the order of the wire codes."""
    written_by = places("lifecycle/decisions/*.py", made_events)
    others = ("handlers", "extension", "ledger", *(f"projections/{name}" for name in _WRITING))
    for pattern in (*(f"lifecycle/{place}.py" for place in others), "adapters/vllm/*.py"):
        for name, links in places(pattern, made_events).items():
            written_by.setdefault(name, []).extend(links)
    projections = CORE.new_projections(LedgerConfiguration(block_size=16, chunk_size=16, num_slots=1))
    folded_by = {name: part.folds() for name, part in projections.named().items()}
    lines = heading("Events", "lifecycle/events.py and the code that writes events")
    lines += inspect.getdoc(events).split("Rules for this file")[0].strip().splitlines()  # type: ignore[union-attr]
    lines += ["", "Fields are listed in the order in which they are [stored](log-format.md).", ""]
    for title, chosen in (("Observations", CORE.observations), ("Decisions", CORE.decisions)):
        lines += [f"## {title}", ""]
        for event in chosen:
            lines += event_section(event, written_by, folded_by)
    lines += ["## Ranges of numbers", "", *prose(RANGES_INTRODUCTION)]
    texts = attribute_docs(ranges)
    body = [
        [f"`{name}`", f"{meta.ge:,}", f"{meta.le:,}", texts[name]]
        for name, kind in vars(ranges).items()
        for meta in getattr(kind, "__metadata__", ())
    ]
    lines += rows(["type", "smallest", "largest", "meaning"], body)
    lines += ["## Why a hit ends", "", "The values of `miss_reason` in `lookup.answered`.", ""]
    reasons = attribute_docs(MissReason)
    lines += rows(["reason", "meaning"], [[f"`{each.value}`", reasons.get(each.name, "")] for each in MissReason])
    return lines


def event_section(event: type[events.Event], written_by: dict[str, list[str]], folded_by: dict[str, Any]) -> list[str]:
    """Return one event: its meaning, its fields, the code that writes it, the projections that fold it."""
    texts, types_of = attribute_docs(event), inspect.get_annotations
    annotations = {name: kind for base in reversed(event.__mro__) for name, kind in types_of(base).items()}
    lines = [f"### `{event.id}`", "", f"`{event.__name__}`, version {event.version}. {one_line(event.__doc__)}", ""]
    fields = ", ".join(f"`{name}: {annotations[name]}`" for name in field_names(event))
    lines += [f"Fields: {fields}.", "", *(f"- `{name}`: {texts[name]}" for name in field_names(event) if name in texts)]
    lines += [""] if lines[-1] else []
    folds = [f"`{name}`" for name, folds in folded_by.items() if event in folds]
    lines += [f"Written by {', '.join(written_by.get(event.__name__, ['nothing yet']))}."]
    return [*lines, f"Folded by {', '.join(folds) or 'no projection'}.", ""]


# --- configuration ---------------------------------------------------------------------------------------------------

TYPES = {
    "Literal['off', 'all'] | Annotated[float, pydantic.Field(ge=0, le=1)]": '`"off"`, `"all"`, or a number from 0 to 1',
    "pydantic.PositiveInt": "integer, at least 1",
    "pydantic.PositiveInt | None": "integer, at least 1, or null",
    "pydantic.NonNegativeInt | None": "integer, at least 0, or null",
    "pydantic.ByteSize": 'bytes: integer, or string such as `"4GiB"`',
    "pydantic.ByteSize | None": 'bytes: integer, or string such as `"4GiB"`, or null',
    "pydantic.PositiveFloat | None": "number above 0, or null",
    "pydantic.NonNegativeInt": "integer, at least 0",
    "Path | None": "path, or null",
    "Literal['BLNHC', 'BLHNC'] | None": "`BLNHC` or `BLHNC`, or null",
    "TransferMode": "`sync`, `async` or `auto`",
    "Offer": "`auto` or `always`",
    "Durability": "`os` or `disk`",
    "float": "number from 0 to 1",
    "bool": "boolean",
    "tuple[str, ...]": "list of strings",
    "dict[str, dict[str, bool | int | float | str]]": "object: name → key → value",
}
"""Annotation in the source → description. A setting with another annotation fails here."""

CONNECTOR = {
    "kv_connector": "KVLedgerConnector",
    "kv_role": "kv_both",
}


def default_of(name: str) -> object:
    """Return the default of a setting as JSON; sizes are human-readable."""
    default = ConnectorSettings.model_fields[name].default
    if isinstance(default, pydantic.ByteSize):
        return re.sub(r"\.0(?=[A-Z])", "", default.human_readable())
    return ConnectorSettings.model_validate({}).model_dump(mode="json")[name]


def configuration_page() -> list[str]:
    """Return every key of `kv_connector_extra_config`."""
    texts = attribute_docs(LogSettings) | attribute_docs(ConnectorSettings)
    annotations = inspect.get_annotations(LogSettings) | inspect.get_annotations(ConnectorSettings)
    names = list(ConnectorSettings.model_fields)
    lines = heading("Configuration", "adapters/vllm/configuration.py and log_settings.py")
    lines += ["The configuration is one JSON object, the value of vLLM's `--kv-transfer-config`. The smallest one:", ""]
    lines += ["```json", json.dumps(CONNECTOR, indent=2), "```", ""]
    lines += prose(
        """
        vLLM finds the connector through kvledger's plugin. If you set `VLLM_PLUGINS` without `kvledger`, add
        `"kv_connector_module_path": "kvledger.adapters.vllm"`. You can add this key even if vLLM finds the plugin.

        `kv_load_failure_policy` is a key of vLLM in the same JSON object. With `recompute`, vLLM computes the tokens of
        a failed load. With `fail`, vLLM's default, the request fails. [Operating](operating.md#start) describes what
        async scheduling changes.

        kvledger's own keys go into `kv_connector_extra_config`. An unknown key, a size that cannot work, or a handler
        that cannot be imported stops the start. The error has the figures and the remedy.
        """
    )
    body = [[f"`{key}`", TYPES[annotations[key]], f"`{json.dumps(default_of(key))}`", texts[key]] for key in names]
    lines += rows(["key", "type", "default", "meaning"], body)
    every = {**CONNECTOR, "kv_connector_extra_config": {name: default_of(name) for name in names}}
    lines += ["Every key with its default:", "", "```json", json.dumps(every, indent=2), "```"]
    return lines


# --- invariants ------------------------------------------------------------------------------------------------------

LIVE_ONLY = {
    "HANDLER_RAISED": "a state handler does not raise.",
    "HANDLER_CONTRACT": "a state handler makes only decisions that are legal, well typed and about its own request.",
    "VLLM_CONTRACT": "vLLM gets only answers and jobs that it can use, whatever a handler decided.",
}
"""Rule without a checker → what it demands."""


def named_rules(node: ast.AST) -> Iterator[str]:
    """Yield NAME for `Rule.NAME`."""
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Rule":
        yield node.attr


def invariants_page() -> list[str]:
    """Return the rules that are guarded while serving, those that are audited, and those that are not checked."""
    guarded_in: dict[str, list[str]] = {}
    for pattern in ("lifecycle/decisions/*.py", "lifecycle/ledger.py", "adapters/vllm/*.py"):
        for name, links in places(pattern, named_rules).items():
            guarded_in.setdefault(name, []).extend(links)
    paragraphs = {rule: inspect.getdoc(make).split("\n\n") for rule, make in CORE.rules.items()}  # type: ignore[union-attr]
    demands = {rule: one_line(first).split(": ", 1)[1] for rule, (first, *_) in paragraphs.items()} | LIVE_ONLY
    lines = heading("Invariants", "lifecycle/rules.py, lifecycle/audit/ and the code that guards the rules")
    lines += prose(
        """
        A rule has the same name in the code, in logs and in the output of `kvledger verify`.

        ## Guarded while serving

        While serving, kvledger records a breach of these rules as `invariant.violated`. One breach is recorded as
        `blocks.observed` instead: the block table computed from the log differs from the scheduler's. This event has
        the scheduler's table, with which kvledger continues. If a request cannot continue safely, kvledger quarantines
        it: the request gets no more hits and saves, and computes its tokens. No exception of kvledger reaches vLLM.
        """
    )
    body = [[f"`{rule.value}`", demands[rule.value], ", ".join(guarded_in[rule.name])] for rule in rules.Rule]
    lines += rows(["rule", "demands", "guarded in"], body)
    lines += ["## Audited", "", "`kvledger verify` checks each of these rules on every event of a stored log.", ""]
    subject = ""
    for rule, make in CORE.rules.items():
        if make.__module__ != subject:
            subject, (name, about) = make.__module__, sys.modules[make.__module__].__doc__.split(": ", 1)
            path = subject.removeprefix("kvledger.").replace(".", "/") + ".py"
            lines += [f"### {name}", "", f"{sentence(about)} [`{path}`](../{path})", ""]
        detail = re.sub(r"(?m)^\n?(Verifies|Does not verify):", r"\n**\1**:", "\n\n".join(paragraphs[rule][1:]))
        lines += [f"#### {rule}", "", sentence(demands[rule]), "", detail.lstrip("\n"), ""]
    lines += [
        "## Not checked",
        "",
        "A log does not show whether these rules hold. They may be broken even if `kvledger verify` finds nothing.",
        "",
    ]
    lines += rows(["rule", "why not"], [[f"`{rule}`", reason] for rule, reason in CORE.not_checked.items()])
    lines += prose(
        """
        ## Facts

        This table lists every field of every event, with the rules that find a log in which only this field is wrong,
        or the reason why no rule finds such a log. Rules that only use a field are not listed. In addition,
        `kvledger verify` makes every decision again.

        A field without a rule is trusted: a log in which only this field is wrong passes every rule. A listed rule does
        not find all wrong values, only those that something else in the log contradicts. Most wrong values of these
        fields pass unless something else in the log depends on them:

        - the fields with numbers of settled tokens, including those of `window.left`
        - the fields with the number of tokens that a request keeps at a rollback or at a session's next turn
        - the token counts of `request.preempted` and `request.finished`
        - the blocks that a step or an allocation gives to a request, if the request saves and loads nothing
        - chunk keys that no request looks up

        No rule finds a wrong choice of declined chunks, a wrong choice of free slots for a save, or a synchronous save
        that could be asynchronous. `kvledger verify` finds these only because it makes the decision again.
        """
    )
    facts = [[f"`{event_id}`", *fact] for event_id, fields in FACTS.items() for fact in by_reason(fields)]
    return lines + rows(["event", "fields", "verified by", "why not"], facts)


def by_reason(fields: Mapping[str, Why]) -> Iterable[list[str]]:
    """Yield one row for each set of rules and each reason, with all fields that have it."""
    for why in dict.fromkeys(fields.values()):
        names = ", ".join(f"`{name}`" for name, its in fields.items() if its == why)
        yield [names, "", why] if isinstance(why, str) else [names, ", ".join(why), ""]


# --- mutants ---------------------------------------------------------------------------------------------------------

MEASURED = REPOSITORY / "tests" / "mutants" / "measured.json"


def mutants_page() -> list[str]:
    """Return every historical bug that the tests repeat, the rule that finds it, and after how many events."""
    measured = json.loads(MEASURED.read_text())
    lines = heading("Mutants", "tests/mutants/measured.json, which `make mutants ARGS=--write` measures,")
    lines += prose(
        """
        A mutant is kvledger's connector with one known bug. vLLM's real scheduler drives most mutants, with a simulated
        worker (`adapters/lab/simulation/`). The other mutants are driven by a walk: a random sequence of events in the
        core alone. Only a walk reaches their bugs, or it reaches them sooner, because it has several ranks, next turns
        of a session, and allocations that claim less than was offered. Then the audit of `kvledger verify` reads the
        log. The bug is switched on in the audit, too, because in production one version writes and verifies a log.

        Each seed leads to one log. A *difference* is a change that the bug makes, in the log or only in the
        connector's state. A bug counts as *found* in a log if the rule in the first column was broken first,
        and the same event broke no other rule. "9 of 10" in the column *found in logs* means: in 10 logs the
        bug made a difference, and in 9 of these it was found. Each remaining log ended before any rule was
        broken, or the bug broke another rule first or with the same event. *Events* counts the events from the
        first difference to the violation, both included.

            make mutants SEEDS=100                        every mutant, on 100 seeds each
            make mutants RULE=HIT_PINNED SEED=3           one log, with marks where the bug acted and where it was found
            make mutants SEEDS=100 ARGS="--json --write"  one object per mutant, and new figures for this page
            make mutants SEEDS=10000 ARGS=--healthy       no bug: every checker must stay silent

        ## Bugs
        """
    )
    order = list(CORE.rules)
    lines += rows(
        ["rule", "bug", "incidents", "driven by", "events, median", "events, most", "found in logs", "seeds run"],
        [
            [
                f"`{entry['rule']}`",
                entry["sentence"],
                ", ".join(entry["incidents"]),
                entry["driven_by"],
                f"{entry['median_events']:g}",
                str(entry["max_events"]),
                f"{entry['num_named']} of {entry['num_touched']}",
                str(entry["num_seeds"]),
            ]
            for entry in sorted(measured["mutants"], key=lambda entry: order.index(entry["rule"]))
        ],
    )
    lines += prose(
        """
        ## Bugs of recorded connectors

        The rules for [a recorder's log](recording.md), each with the obligation that the rule tests and the public
        issues in which a connector broke the obligation. [`tests/adapters/recorder`](../tests/adapters/recorder) has
        bugs that vLLM's own connectors have, and bugs that a test adds to these connectors.
        """
    )
    lines += rows(
        ["rule", "what a connector must do", "incidents"],
        [
            [f"`{rule}`", obligation.text, ", ".join(obligation.incidents)]
            for rule in RECORDER_RULES
            for obligation in obligations.OBLIGATIONS.values()
            if rule in obligation.checks
        ],
    )
    lines += prose(
        """
        ## Without a bug

        The audit read logs of the connector without a bug. Each seed chooses faults around the connector: failing
        copies, lost, late and repeated reports, aborts, resets, full disks, restarts.
        """
    )
    figures = ("num_seeds", "num_logs", "num_events", "num_rules", "num_alarms")
    lines += rows(
        ["driven by", "seeds", "logs", "events", "rules", "false alarms"],
        [[entry["healthy"], *(f"{entry[figure]:,d}" for figure in figures)] for entry in measured["healthy"]],
    )
    return lines


# --- contract --------------------------------------------------------------------------------------------------------


CONTRACT_INTRODUCTION = """
vLLM relies on these obligations of a connector. For each obligation, this page names the rules and checks that test it.
Rules judge a log, including one from production ([recording](recording.md), [invariants](invariants.md)). Checks are
part of `kvledger conformance`, which [runs](conformance.md) a connector on vLLM's scheduler. Paths are of vLLM 0.32:
`base.py` is `distributed/kv_transfer/kv_connector/v1/base.py`, `scheduler.py` is `v1/core/sched/scheduler.py`. Text in
quotation marks is quoted from these files. Each linked public issue is about a connector that broke the obligation.

A broken obligation can be seen:
"""
ISSUES = {"vllm": "vllm-project/vllm", "LMCache": "LMCache/LMCache"}


def contract_page() -> list[str]:
    """Return the obligations, the checks and the scenarios."""
    everything = obligations.OBLIGATIONS.values()
    lines = heading("The contract of a connector", "adapters/lab/conformance/obligations.py and scenarios.py")
    lines += prose(CONTRACT_INTRODUCTION)
    seen, checks = attribute_docs(obligations.Seen), attribute_docs(obligations.Check)
    lines += [f"- **{each.value}**: {seen[each.name]}" for each in obligations.Seen]
    body = [[f"[{each.name}](#{each.name})", each.side, each.seen.value, tested_by(each)] for each in everything]
    lines += ["", *rows(["obligation", "side", "can be seen", "tested by"], body)]
    for each in everything:
        lines += obligation_section(each)
    lines += ["## Checks", "", "The simulation makes these checks, in addition to the rules for the log.", ""]
    lines += [f"- `{each.value}`: {checks[each.name]}" for each in obligations.Check]
    lines += ["", "## Scenarios", "", "Each scenario is played twice, the second time with every lookup repeated.", ""]
    return [*lines, *(f"- **{name}**: {one_line(scenario.play.__doc__)}" for name, scenario in SCENARIOS.items())]


def tested_by(obligation: obligations.Obligation) -> str:
    """Return the rules and checks of an obligation."""
    return ", ".join(f"`{check}`" for check in obligation.checks) or "nothing"


def obligation_section(obligation: obligations.Obligation) -> list[str]:
    """Return one obligation."""
    lines = [f"## {obligation.name}", "", obligation.text, ""]
    hooks = ", ".join(f"`{hook}`" for hook in obligation.hook.split(", "))
    lines += [f"- Hook: {obligation.hook if obligation.hook == 'every hook' else hooks} ({obligation.side})"]
    lines += [f"- Source: {'; '.join(obligation.source)}"]
    lines += [f"- How a breach can be seen: {obligation.seen.value}. Tested by: {tested_by(obligation)}"]
    if obligation.scenarios:
        lines += [f"- Tested only in these scenarios: {'; '.join(obligation.scenarios)}"]
    if obligation.limit:
        lines += [f"- Limit: {obligation.limit}"]
    if obligation.incidents:
        lines += [f"- Broken in {', '.join(issue(name) for name in obligation.incidents)}"]
    return [*lines, ""]


def issue(name: str) -> str:
    """Return a link to a public issue or pull request."""
    repository, _, number = name.partition("#")
    return f"[{name}](https://github.com/{ISSUES[repository]}/issues/{number})"


# --- metrics ---------------------------------------------------------------------------------------------------------


def metrics_page() -> list[str]:
    """Return every metric with its type and its meaning."""
    shortest, longest = (bound / 1e9 for bound in (DURATION_BOUNDS_NS[0], DURATION_BOUNDS_NS[-1]))
    lines = heading("Metrics", "adapters/vllm/metric_names.py")
    lines += prose(
        "vLLM's `/metrics` has these metrics, with vLLM's own labels `model_name` and `engine`. Every metric except "
        "`info` begins at 0. [Monitoring](monitoring.md) describes alerts on these metrics."
    )
    gauges = {**GAUGES, "": INFO}
    kinds = {"Counters": (COUNTERS, "_total"), "Gauges": (gauges, ""), "Histograms": (HISTOGRAMS, "")}
    for title, (metrics, suffix) in kinds.items():
        body = [[f"`{PREFIX}{name}{suffix}`", meaning] for name, meaning in metrics.values()]
        lines += [f"## {title}", "", *rows(("metric", "meaning"), body)]
    lines += [f"The histograms' buckets have upper bounds between {shortest:g} and {longest:g} s.", "", "## Labels", ""]
    missed, recomputed, extensions = (f"`{COUNTERS[name][0]}_total`" for name in (MISSED, RECOMPUTED, BY_EXTENSION))
    lines += prose(
        f"{extensions} has the additional label `{LABELS[BY_EXTENSION]}`, and one series for each "
        "[extension](extending.md#an-extension) that is loaded. "
        f"`{INFO[0]}` has the labels `version`, " + ", ".join(f"`{name}`" for name in INFO_SETTINGS) + ". A setting "
        "that is not configured has the value `auto` if its default depends on the machine or the model."
    )
    lines += prose(
        f"{missed} and {recomputed} have the additional label `{LABELS[MISSED]}`: the reason why vLLM had to "
        "compute the tokens, as far as kvledger knows it when the request is admitted. `kvledger stats` divides the "
        "reason `missing` further, into tokens that no request had computed before, and tokens that were evicted, lost "
        "to a reset, or never saved ([reasons](reasons.md))."
    )
    return lines + prose(
        "The label `reason` has a value of [`miss_reason`](events.md#why-a-hit-ends) or one of these values:\n\n"
        f"- `{NOT_OFFERED}`: the tokens were in the host pool, but kvledger did not offer them, because another "
        "request's load was in flight, or because the prefix in vLLM's own prefix cache ended within a block.\n"
        f"- `{NOT_LOADED}`: kvledger offered the tokens, but vLLM did not claim them. Recomputed tokens "
        "whose load failed have this reason too.\n"
        f"- `{NO_LOOKUP}`, only for recomputed tokens: vLLM allocated the blocks of these tokens without a lookup.\n\n"
        "While the event log cannot be written, vLLM gets no hits, and `missed_tokens_total` and "
        "`recomputed_tokens_total` do not grow. `log_waiting_events` is then above 0. If a load within a step fails, "
        "`hit_tokens_total` counts the load's tokens, and `failed_loads_total` counts the load."
    )


# --- the command -----------------------------------------------------------------------------------------------------

COMMANDS_INTRODUCTION = """
The `--help` output of each command. [The `kvledger` command](cli.md) explains the commands and shows their output.
"""


def commands_page() -> list[str]:
    """Return the help of every command, as a terminal of 80 columns shows it."""
    lines = [
        *heading("Command by command", "adapters/tools/cli/commands.py and the commands"),
        *prose(COMMANDS_INTRODUCTION),
    ]
    for name in ("", *COMMANDS):
        lines += [
            f"## `kvledger{' ' * bool(name)}{name}`",
            "",
            "```text",
            *help_of(*name.split()).splitlines(),
            "```",
            "",
        ]
    return lines


def help_of(*command: str) -> str:
    """Return what `--help` prints."""
    printed = io.StringIO()
    columns = mock.patch.dict(os.environ, COLUMNS="80")
    with columns, contextlib.redirect_stdout(printed):
        build_app().meta([*command, "--help"])
    return printed.getvalue()


TABLES_INTRODUCTION = """
[`kvledger tables`](export.md#tables) writes these tables. `Log.to_arrow` and `Log.to_pandas` return them. Columns whose
names end in `_ns` are times in nanoseconds since the log was opened, or durations in nanoseconds. Columns whose names
end in `_bytes` are numbers of bytes. Other numbers are counts, ids or positions. To join two tables, use the columns
`start` and `ordinal`.
"""


def tables_page() -> list[str]:
    """Return every table with its columns."""
    lines = [*heading("Tables", "adapters/tools/tables/schema.py"), *prose(TABLES_INTRODUCTION)]
    lines += ["## In every table", "", *column_rows(COMMON)]
    for each in TABLES.values():
        lines += [f"## `{each.name}`", "", each.meaning, "", *column_rows(each.columns)]
    lines += [f"The metadata of a Parquet file has the table's name and the version of this schema ({SCHEMA_VERSION})."]
    return lines


def decisions_page() -> list[str]:
    """Return the titles of all decisions, with links."""
    lines = [
        *heading("Decisions", "the titles of docs/decisions/"),
        "Why things are as they are, in the order of time:",
        "",
    ]
    for path in sorted(DOCS.glob("decisions/*.md")):
        number, _, title = path.read_text().partition("\n")[0].removeprefix("# ").partition(". ")
        lines.append(f"- {number}: [{title}](decisions/{path.name})")
    return lines


def column_rows(columns: Iterable[Column]) -> list[str]:
    """Return a Markdown table of columns."""
    body = [[f"`{column.name}`", f"`{column.type}`", column.meaning] for column in columns]
    return rows(["column", "type", "meaning"], body)


PAGES: dict[str, Callable[[], list[str]]] = {
    "states.md": states_page,
    "events.md": events_page,
    "configuration.md": configuration_page,
    "invariants.md": invariants_page,
    "mutants.md": mutants_page,
    "contract.md": contract_page,
    "commands.md": commands_page,
    "metrics.md": metrics_page,
    "tables.md": tables_page,
    "decisions.md": decisions_page,
}


def _within_columns(lines: Iterable[str]) -> Iterator[str]:
    """Wrap prose and lists at 120 columns; tables, headings, comments and code stay as they are."""
    is_code = False
    for line in "\n".join(lines).split("\n"):
        is_code ^= line.startswith("```")
        if is_code or len(line) <= _MAX_COLUMNS or line.startswith(("|", "#", "<!--", "    ")):
            yield line.rstrip()
        else:
            indent = " " * (len(line) - len(line.lstrip("- ")))
            yield from textwrap.wrap(
                line, _MAX_COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or check them; return 1 if a checked page is stale."""
    parser = argparse.ArgumentParser(description="Writes the generated pages of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; print the stale pages")
    arguments = parser.parse_args(argv)
    stale = []
    for name, page in PAGES.items():
        path = DOCS / name
        text = "\n".join(_within_columns(page())).rstrip() + "\n"
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not arguments.check:
                path.write_text(text)
    for name in stale:
        print(f"docs/{name}: {'stale; run `make docs`' if arguments.check else 'written'}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
