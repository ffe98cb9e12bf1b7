"""Writes the pages of docs/ that are made from the source: states, events, configuration, commands, rules, metrics.

    python docs/generate.py            write them
    python docs/generate.py --check    write nothing; exit code 1, and the names, where a page is not what it would be

Nothing is said here that the source says: the text of a page is docstrings and data. Here stand order and form.
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
NOTICE = "<!-- Generated from {source} by `make docs`. Change the source and run that; changes made here are lost. -->"


def heading(title: str, source: str) -> list[str]:
    """The first lines of every generated page."""
    return [NOTICE.format(source=source), "", f"# {title}", ""]


def prose(text: str) -> list[str]:
    """Paragraphs, and the empty line behind them."""
    return [*inspect.cleandoc(text).splitlines(), ""]


def rows(columns: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *body]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines] + [""]


def one_line(text: str | None) -> str:
    """A docstring as running text."""
    return " ".join((text or "").split())


def attribute_docs(owner: type | types.ModuleType) -> dict[str, str]:
    """Name -> the string that stands under an assignment, as `ast` reads it from the source; inherited ones too."""
    if isinstance(owner, type):
        inherited = (base for base in owner.__mro__[1:] if base.__module__ == owner.__module__)
        found = {name: text for base in inherited for name, text in attribute_docs_of(base).items()}
        return found | attribute_docs_of(owner)
    return attribute_docs_of(owner)


def attribute_docs_of(owner: type | types.ModuleType) -> dict[str, str]:
    """As `attribute_docs`, without what is inherited."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(owner)))
    body = tree.body if isinstance(owner, types.ModuleType) else tree.body[0].body  # type: ignore[attr-defined]
    found = {}
    for statement, following in itertools.pairwise(body):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        if isinstance(target, ast.Name) and isinstance(following, ast.Expr):
            found[target.id] = one_line(ast.literal_eval(following.value))
    return found


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every function and method, named as in a traceback; inner functions belong to the one around them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The source of a file. Many tables are made from the same files."""
    return ast.parse(path.read_text())


def places(pattern: str, wanted: Callable[[ast.AST], Iterable[str]]) -> dict[str, list[str]]:
    """Name -> where in the source `wanted` finds it, as links to the files that match `pattern`."""
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
A request is in one state of each of these regions as well, a job in one of `work` and one of `source`. Only the phase
and `blocks` refuse an event; the diagrams show what moves.
"""


TRANSCRIPTS_INTRODUCTION = """
What happens, event by event: what was observed, what was decided upon it, how the requests stood, what the audit
found. Each is played by a test, so they say what is.
"""


def states_page() -> list[str]:
    """States, diagram, the table as a matrix, its rules."""
    said = attribute_docs(states.RequestState)
    lines = heading("States", "lifecycle/states.py and lifecycle/table.py")
    for state in RequestState:
        lines += [f"**{state.value}**: {said[state.name]}", ""]
    lines += ["```mermaid", mermaid_diagram(CORE.regions[0], CORE.events), "```", ""]
    lines += ["## The table", "", "Where each event leads from each state: `·` the state stays, empty: illegal there."]
    lines += ["`request.arrived` makes a request, and is therefore in no row.", ""]

    def cell(state: RequestState, dests: Mapping[Any, Any]) -> str:
        dest = dests.get(state)
        return "" if dest is None else "·" if dest is state else f"→ {dest.value}"

    # All variants of an event lead to the same phase.
    dests_of = {event: CORE.tables.phase.get(events.triggers_of(event)[0]) for event in CORE.tables.request_events}
    legal = [(event, dests) for event, dests in dests_of.items() if dests]
    body = [[f"`{event.id}`", *(cell(state, dests) for state in RequestState)] for event, dests in legal]
    lines += rows(["event", *(state.value for state in RequestState)], body)
    lines += ["## Next to the phase", "", *prose(REGIONS_INTRODUCTION)]
    about = attribute_docs(table)
    for region in (*table.REGIONS[1:], *table.JOB_REGIONS):
        lines += [f"### {region.name}", "", about[region.name.upper()], ""]
        said = attribute_docs(region.states)
        lines += [f"- **{state.value}**: {said[state.name]}" for state in region.states]
        lines += ["", "```mermaid", mermaid_diagram(region, CORE.events), "```", ""]
    lines += ["## Transcripts", "", *prose(TRANSCRIPTS_INTRODUCTION)]
    for path in sorted((REPOSITORY / "tests/transcripts").glob("*.txt")):
        lines += [f"- [{path.stem.replace('_', ' ')}](../tests/transcripts/{path.name})"]
    lines += ["", "## The rules of the tables", "", "```text", *inspect.getdoc(table).splitlines(), "```"]  # type: ignore[union-attr]
    return lines


# --- events ----------------------------------------------------------------------------------------------------------


def made_events(node: ast.AST) -> Iterator[str]:
    """Names of event classes that this expression makes: `e.Name(...)`, or `e.Name if … else e.Other`."""
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
Readers check these ranges when they decode a frame. They report a frame with a number outside its range as damage, and
none of its events is used. The ranges hold everything that vLLM, a worker or a wrong connector can say: a number that
is only wrong is left to the [rules](invariants.md).
"""

_WRITING = ("copies", "extensions")
"""Projections that make events."""


def events_page() -> list[str]:
    """The vocabulary, in the order of the wire codes."""
    written_by = places("lifecycle/decisions/*.py", made_events)
    others = ("handlers", "extension", "ledger", *(f"projections/{name}" for name in _WRITING))
    for pattern in (*(f"lifecycle/{place}.py" for place in others), "adapters/vllm/*.py"):
        for name, links in places(pattern, made_events).items():
            written_by.setdefault(name, []).extend(links)
    projections = CORE.new_projections(LedgerConfiguration(block_size=16, chunk_size=16, num_slots=1))
    folded_by = {name: part.folds() for name, part in projections.named().items()}
    lines = heading("Events", "lifecycle/events.py and the code that writes events")
    lines += inspect.getdoc(events).split("Rules for this file")[0].strip().splitlines()  # type: ignore[union-attr]
    lines += ["", "Fields stand in the order in which they are stored; [the log's format](log-format.md) says how.", ""]
    for title, chosen in (("Observations", CORE.observations), ("Decisions", CORE.decisions)):
        lines += [f"## {title}", ""]
        for event in chosen:
            lines += event_section(event, written_by, folded_by)
    lines += ["## Ranges of numbers", "", *prose(RANGES_INTRODUCTION)]
    said = attribute_docs(ranges)
    body = [
        [f"`{name}`", f"{meta.ge:,}", f"{meta.le:,}", said[name]]
        for name, kind in vars(ranges).items()
        for meta in getattr(kind, "__metadata__", ())
    ]
    lines += rows(["type", "least", "largest", "meaning"], body)
    lines += ["## Why a hit ends", "", "`miss_reason` of `lookup.answered`.", ""]
    reasons = attribute_docs(MissReason)
    lines += rows(["reason", "meaning"], [[f"`{each.value}`", reasons.get(each.name, "")] for each in MissReason])
    return lines


def event_section(event: type[events.Event], written_by: dict[str, list[str]], folded_by: dict[str, Any]) -> list[str]:
    """One event: what it says, its fields, who writes it, who folds it."""
    said, types_of = attribute_docs(event), inspect.get_annotations
    annotations = {name: kind for base in reversed(event.__mro__) for name, kind in types_of(base).items()}
    lines = [f"### `{event.id}`", "", f"`{event.__name__}`, version {event.version}. {one_line(event.__doc__)}", ""]
    fields = ", ".join(f"`{name}: {annotations[name]}`" for name in field_names(event))
    lines += [f"Fields: {fields}.", "", *(f"- `{name}`: {said[name]}" for name in field_names(event) if name in said)]
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
"""Annotation in the source -> words. A new kind of setting fails here until it has some."""

CONNECTOR = {
    "kv_connector": "KVLedgerConnector",
    "kv_role": "kv_both",
}


def default_of(name: str) -> object:
    """The default as JSON has it; sizes as people write them."""
    default = ConnectorSettings.model_fields[name].default
    if isinstance(default, pydantic.ByteSize):
        return re.sub(r"\.0(?=[A-Z])", "", default.human_readable())
    return ConnectorSettings.model_validate({}).model_dump(mode="json")[name]


def configuration_page() -> list[str]:
    """Every key of `kv_connector_extra_config`."""
    said = attribute_docs(LogSettings) | attribute_docs(ConnectorSettings)
    annotations = inspect.get_annotations(LogSettings) | inspect.get_annotations(ConnectorSettings)
    names = list(ConnectorSettings.model_fields)
    lines = heading("Configuration", "adapters/vllm/configuration.py and log_settings.py")
    lines += ["All of it is one JSON object, the value of `--kv-transfer-config`. The least that works:", ""]
    lines += ["```json", json.dumps(CONNECTOR, indent=2), "```", ""]
    lines += prose(
        """
        vLLM knows the name from kvledger's plugin, which it loads unless `VLLM_PLUGINS` leaves `kvledger` out. Then add
        `"kv_connector_module_path": "kvledger.adapters.vllm"`, which may stand there in any case.

        `kv_load_failure_policy` is vLLM's own key beside these. With `recompute`, a load that fails costs its request
        time; with vLLM's default `fail` it costs the request its life. [Operating](operating.md#start) says what async
        scheduling has to do with it.

        Keys of kvledger stand under `kv_connector_extra_config`. An unknown key, a size that cannot work and a handler
        that cannot be imported are refused before an engine starts, with the figures and the remedy.
        """
    )
    body = [[f"`{key}`", TYPES[annotations[key]], f"`{json.dumps(default_of(key))}`", said[key]] for key in names]
    lines += rows(["key", "type", "default", "meaning"], body)
    every = {**CONNECTOR, "kv_connector_extra_config": {name: default_of(name) for name in names}}
    lines += ["Every key with its default:", "", "```json", json.dumps(every, indent=2), "```"]
    return lines


# --- invariants ------------------------------------------------------------------------------------------------------

LIVE_ONLY = {
    "HANDLER_RAISED": "a state handler does not raise.",
    "HANDLER_CONTRACT": "a state handler decides what it may decide: about its own request, well typed, legal.",
    "VLLM_CONTRACT": "what leaves towards vLLM is what vLLM can take, whatever was decided.",
}
"""What the rules demand that no checker states."""


def named_rules(node: ast.AST) -> Iterator[str]:
    """`Rule.NAME`."""
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Rule":
        yield node.attr


def invariants_page() -> list[str]:
    """Rules that are guarded live, rules that are audited, rules that are not checked."""
    guarded_in: dict[str, list[str]] = {}
    for pattern in ("lifecycle/decisions/*.py", "lifecycle/ledger.py", "adapters/vllm/*.py"):
        for name, links in places(pattern, named_rules).items():
            guarded_in.setdefault(name, []).extend(links)
    paragraphs = {rule: inspect.getdoc(make).split("\n\n") for rule, make in CORE.rules.items()}  # type: ignore[union-attr]
    demands = {rule: one_line(first).split(": ", 1)[1] for rule, (first, *_) in paragraphs.items()} | LIVE_ONLY
    lines = heading("Invariants", "lifecycle/rules.py, lifecycle/audit/ and the code that guards the rules")
    lines += prose(
        """
        A rule has one name everywhere: in code, in logs, in what `kvledger verify` prints.

        ## Guarded while it serves

        A breach is recorded as `invariant.violated` (a differing block table as `blocks.observed`, with the scheduler's
        own). Where the connector cannot go on safely for a request, that request is quarantined: it gets nothing from
        the cache, saves nothing, and recomputes. Nothing is raised into vLLM.
        """
    )
    body = [[f"`{rule.value}`", demands[rule.value], ", ".join(guarded_in[rule.name])] for rule in rules.Rule]
    lines += rows(["rule", "demands", "guarded in"], body)
    lines += ["## Audited", "", "Held by `kvledger verify` against every event of a stored log, one checker each.", ""]
    subject = ""
    for rule, make in CORE.rules.items():
        if make.__module__ != subject:
            subject, (name, about) = make.__module__, sys.modules[make.__module__].__doc__.split(": ", 1)
            path = subject.removeprefix("kvledger.").replace(".", "/") + ".py"
            lines += [f"### {name}", "", f"{about.capitalize()} [`{path}`](../{path})", ""]
        detail = re.sub(r"(?m)^\n?(Verifies|Does not verify):", r"\n**\1**:", "\n\n".join(paragraphs[rule][1:]))
        lines += [f"#### {rule}", "", demands[rule][0].upper() + demands[rule][1:], "", detail, ""]
    lines += [
        "## Not checked",
        "",
        "What a log of today cannot decide. Silence about these is no sign of soundness.",
        "",
    ]
    lines += rows(["rule", "why not"], [[f"`{rule}`", reason] for rule, reason in CORE.not_checked.items()])
    lines += prose(
        """
        ## Facts

        Each field of each event, and the rules that name logs in which that field alone is another, or why none does.
        A rule that merely relies on a fact does not stand here. What a decision says is, besides, decided again.

        Where no rule stands, the value is trusted: a log in which it alone is another passes every rule. Where a rule
        stands it names the wrong values that something contradicts, not all. Of these most pass unless something hangs
        on them: how many tokens are settled, rolled back to, left by a window or kept for a next turn; the counts of
        `request.preempted` and `request.finished`; the blocks that a step appends, or an allocation gives, to a request
        that saves and loads nothing; and keys that nobody looks up. Which chunks are declined, which of the free slots
        a save takes, and that a save is not asynchronous where it could be, only deciding again contradicts.
        """
    )
    facts = [[f"`{event_id}`", *fact] for event_id, fields in FACTS.items() for fact in by_reason(fields)]
    return lines + rows(["event", "fields", "verified by", "or why not"], facts)


def by_reason(fields: Mapping[str, Why]) -> Iterable[list[str]]:
    """Fields that are verified by the same rules, or are not for the same reason, in one row."""
    for why in dict.fromkeys(fields.values()):
        names = ", ".join(f"`{name}`" for name, its in fields.items() if its == why)
        yield [names, "", why] if isinstance(why, str) else [names, ", ".join(why), ""]


# --- mutants ---------------------------------------------------------------------------------------------------------

MEASURED = REPOSITORY / "tests" / "mutants" / "measured.json"


def mutants_page() -> list[str]:
    """Every historical mistake that is made again in the tests, which rule names it, and how soon."""
    measured = json.loads(MEASURED.read_text())
    lines = heading("Incidents as tests", "tests/mutants/measured.json, which `make mutants ARGS=--write` measures,")
    lines += prose(
        """
        A mutant is the connector with one mistake that a KV connector has made, made again. It is driven by vLLM's real
        scheduler with a simulated worker (`adapters/lab/simulation/`), or by a random walk of the pure core where that
        reaches the mistake sooner or alone: several ranks, a session's next turns, allocations that take up less than
        was answered. The log that it leaves is read by the audit of `kvledger verify` with the mistake still switched
        on: in production one version writes and verifies.

        The rule in the first column is named at the first event that breaks any rule, and no other rule speaks of that
        event. *Events* are counted from the first moment at which the mistake made a difference, in what was written or
        only in what the connector believed, to the violation, both included. *Named* is how many of the seeds in which
        it made a difference were named; in the others no rule was broken before the log ended.

            make mutants SEEDS=100                        every mutant, on 100 seeds each
            make mutants RULE=HIT_PINNED SEED=3           one log, marked where it was touched and where it was named
            make mutants SEEDS=100 ARGS="--json --write"  one object a mutant, and the figures of this page again
            make mutants SEEDS=10000 ARGS=--healthy       no mistake: every checker must be silent

        ## Mistakes
        """
    )
    order = list(CORE.rules)
    lines += rows(
        ["rule", "mistake", "incidents", "driven by", "events, median", "most", "named", "seeds"],
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
        ## Mistakes of recorded connectors

        The rules by which [a recorder's log](recording.md) is judged, each with what a connector gets wrong and the
        incidents. [`tests/adapters/recorder`](../tests/adapters/recorder) has the mistakes: put into vLLM's own
        connectors, or theirs already.
        """
    )
    lines += rows(
        ["rule", "what a connector must keep to", "incidents"],
        [
            [f"`{rule}`", obligation.text, ", ".join(obligation.incidents)]
            for rule in RECORDER_RULES
            for obligation in obligations.OBLIGATIONS.values()
            if rule in obligation.checks
        ],
    )
    lines += prose(
        """
        ## No mistake

        Seeds of the connector as it is, with whatever faults they switch on: failing copies, lost, late and doubled
        reports, aborts, resets, full disks, restarts.
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
What vLLM relies on, obligation by obligation, with the rule or check that holds a connector against it. Rules judge a
log, also one of production ([recording](recording.md), [invariants](invariants.md)); checks belong to
`kvledger conformance`, which [plays](conformance.md) a connector on vLLM's scheduler. Paths are of vLLM 0.32:
`base.py` is `distributed/kv_transfer/kv_connector/v1/base.py`, `scheduler.py` is `v1/core/sched/scheduler.py`; what
stands in quotation marks is said there. The issues are public ones in which the obligation was broken.
"""
ISSUES = {"vllm": "vllm-project/vllm", "LMCache": "LMCache/LMCache"}


def contract_page() -> list[str]:
    """The obligations, the checks, the scenarios."""
    everything = obligations.OBLIGATIONS.values()
    lines = heading("The contract of a connector", "adapters/lab/conformance/obligations.py and scenarios.py")
    lines += prose(CONTRACT_INTRODUCTION)
    seen, checks = attribute_docs(obligations.Seen), attribute_docs(obligations.Check)
    lines += [f"- **{each.value}**: {seen[each.name]}" for each in obligations.Seen]
    body = [[f"[{each.name}](#{each.name})", each.side, each.seen.value, held_by(each)] for each in everything]
    lines += ["", *rows(["obligation", "side", "can be seen", "held by"], body)]
    for each in everything:
        lines += obligation_section(each)
    lines += ["## Checks", "", "What the simulation checks beyond the rules of its log.", ""]
    lines += [f"- `{each.value}`: {checks[each.name]}" for each in obligations.Check]
    lines += ["", "## Scenarios", "", "Each is played twice, the second time with each lookup asked twice.", ""]
    return [*lines, *(f"- **{name}**: {one_line(scenario.play.__doc__)}" for name, scenario in SCENARIOS.items())]


def held_by(obligation: obligations.Obligation) -> str:
    """Its rules and checks."""
    return ", ".join(f"`{check}`" for check in obligation.checks) or "nothing"


def obligation_section(obligation: obligations.Obligation) -> list[str]:
    """One obligation."""
    lines = [f"## {obligation.name}", "", obligation.text, ""]
    hooks = ", ".join(f"`{hook}`" for hook in obligation.hook.split(", "))
    lines += [f"- Hook: {obligation.hook if obligation.hook == 'every hook' else hooks} ({obligation.side})"]
    lines += [f"- Source: {'; '.join(obligation.source)}"]
    lines += [f"- Can be seen {obligation.seen.value}; held by {held_by(obligation)}"]
    if obligation.scenarios:
        lines += [f"- Judged in: {'; '.join(obligation.scenarios)}"]
    if obligation.limit:
        lines += [f"- Not seen: {obligation.limit}"]
    if obligation.incidents:
        lines += [f"- Broken in {', '.join(issue(name) for name in obligation.incidents)}"]
    return [*lines, ""]


def issue(name: str) -> str:
    """A public issue or change, linked."""
    repository, _, number = name.partition("#")
    return f"[{name}](https://github.com/{ISSUES[repository]}/issues/{number})"


# --- metrics ---------------------------------------------------------------------------------------------------------


def metrics_page() -> list[str]:
    """Every metric with its type and its meaning."""
    shortest, longest = (bound / 1e9 for bound in (DURATION_BOUNDS_NS[0], DURATION_BOUNDS_NS[-1]))
    lines = heading("Metrics", "adapters/vllm/metric_names.py")
    lines += prose(
        "vLLM's `/metrics` shows them with vLLM's own labels, `model_name` and `engine`, from the start and at 0. "
        "[Monitoring](monitoring.md) says which to alert on."
    )
    gauges = {**GAUGES, "": INFO}
    kinds = {"Counters": (COUNTERS, "_total"), "Gauges": (gauges, ""), "Histograms": (HISTOGRAMS, "")}
    for title, (metrics, suffix) in kinds.items():
        body = [[f"`{PREFIX}{name}{suffix}`", meaning] for name, meaning in metrics.values()]
        lines += [f"## {title}", "", *rows(("metric", "meaning"), body)]
    lines += [f"Their buckets end at {shortest:g} to {longest:g} s.", "", "## Labels", ""]
    missed, recomputed, extensions = (f"`{COUNTERS[name][0]}_total`" for name in (MISSED, RECOMPUTED, BY_EXTENSION))
    lines += prose(
        f"{extensions} has one more label, `{LABELS[BY_EXTENSION]}`, and a series for each "
        "[extension](extending.md#an-extension) that is loaded. "
        f"`{INFO[0]}` has the labels `version`, " + ", ".join(f"`{name}`" for name in INFO_SETTINGS) + "; the value "
        "of a setting is `auto` where its default depends on the machine or the model."
    )
    lines += prose(
        f"{missed} and {recomputed} have one more label, `{LABELS[MISSED]}`: why the connector's answer left the "
        "tokens to compute. It is known the moment a request is admitted. `kvledger stats` divides it further: "
        "of `missing`, it tells tokens that nobody had computed before from tokens that were evicted, "
        "lost to a reset, or never saved ([reasons](reasons.md))."
    )
    return lines + prose(
        f"The value is a [`miss_reason`](events.md#why-a-hit-ends); `{NOT_OFFERED}`: the tokens were in the pool, but "
        "another load was under way, or vLLM's own prefix ended within a block; "
        f"`{NOT_LOADED}`: they were offered, but not claimed by vLLM, or, of recomputed tokens, their load failed; "
        f"or, of recomputed tokens alone, `{NO_LOOKUP}`: their blocks were allocated without a lookup. "
        "Where the log cannot be written, vLLM gets no answers, and these requests are in neither metric; see "
        "`log_waiting_events`. A load that fails within a step stays a hit; `failed_loads` counts it."
    )


# --- writing ---------------------------------------------------------------------------------------------------------


# --- the command -----------------------------------------------------------------------------------------------------

COMMANDS_INTRODUCTION = """
What `--help` prints. [The `kvledger` command](cli.md) says what is behind it, and what it looks like.
"""


def commands_page() -> list[str]:
    """The help of every command, as a terminal of 80 columns shows it."""
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
    """What `--help` prints."""
    printed = io.StringIO()
    columns = mock.patch.dict(os.environ, COLUMNS="80")
    with columns, contextlib.redirect_stdout(printed):
        build_app().meta([*command, "--help"])
    return printed.getvalue()


TABLES_INTRODUCTION = """
The columns of what [`kvledger tables`](export.md#tables) writes and of what `Log.to_arrow` and `Log.to_pandas` return.
Times that end in `_ns` are nanoseconds since the log was opened; durations are nanoseconds, too. Columns that end in
`_bytes` are bytes. Other numbers are counts or ids. Join tables on (`start`, `ordinal`).
"""


def tables_page() -> list[str]:
    """Every table with its columns."""
    lines = [*heading("Tables", "adapters/tools/tables/schema.py"), *prose(TABLES_INTRODUCTION)]
    lines += ["## In every table", "", *column_rows(COMMON)]
    for each in TABLES.values():
        lines += [f"## `{each.name}`", "", each.meaning, "", *column_rows(each.columns)]
    lines += [f"Parquet files name their table and the version of this schema ({SCHEMA_VERSION}) in their metadata."]
    return lines


def column_rows(columns: Iterable[Column]) -> list[str]:
    """A Markdown table of columns."""
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
}


def _within_columns(lines: Iterable[str]) -> Iterator[str]:
    """Prose and lists within 120 columns; tables, headings, comments and code as they are."""
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
    """Write the pages, or check them; the exit code is 1 where a checked page is stale."""
    parser = argparse.ArgumentParser(description="Writes the generated pages of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing, name the pages that are stale")
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
