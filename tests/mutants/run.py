"""`make mutants`: switch every historical mistake on, let the audit read the logs, and say how soon it is named."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvledger.lifecycle import Core

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import attrs
from rich.console import Console
from rich.progress import Progress

import mutants.catalogue  # noqa: F401 -- declares them
from mutants import healthy
from mutants.detection import Detection, Figures, detect, figures_of, judge, play
from mutants.mutant import MUTANTS, Mutant


def transcript(chosen: Sequence[Mutant], seed: int) -> bool:
    """Print the log of one seed around its first violation; returns whether the right rule was named."""
    is_named = True
    for mutant in chosen:
        story, touch = play(mutant, seed)
        detection = judge(mutant, story, touch, seed)
        print(f"{mutant.name}: {mutant.sentence} ({', '.join(mutant.incidents)}); expected: {mutant.rule}")
        for sequence, event in story.events:
            mark = "*" if sequence == detection.touched else "!" if sequence == detection.found else " "
            print(f"{mark}{sequence:6d} {event}")
        print(f"touched at {detection.touched}, found at {detection.found}: {sorted(detection.first_rules)}")
        print(f"{detection.detail}; in all: {detection.rules}; ended by: {detection.ended_by or 'the end'}")
        is_named &= detection.is_named(mutant.rule)
    return is_named


MEASURED = Path(__file__).parent / "measured.json"
"""What docs/mutants.md is made from."""


def hunt(chosen: Sequence[Mutant], seeds: range, console: Console, *, as_json: bool, writes: bool) -> bool:
    """Play all seeds of all mutants; returns whether each was named, and never by another rule first."""
    is_well = True
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("mutants", total=len(chosen) * len(seeds))
        for mutant in chosen:
            progress.update(task, description=mutant.name)
            detections = []
            for seed in seeds:
                detections.append(detect(mutant, seed))
                progress.advance(task)
            figures = figures_of(mutant, detections)
            is_well &= figures.num_named > 0 and not figures.num_misnamed
            measured = as_object(mutant, figures)
            if writes:
                _write(measured)
            if as_json:
                print(json.dumps(measured), flush=True)
            else:
                _tell(console, mutant, figures, detections)
    return is_well


def stay_silent(kind: str, seeds: range, console: Console, *, writes: bool) -> bool:
    """Play healthy seeds; returns whether nobody raised an alarm."""
    num_logs = num_events = num_alarms = 0
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"healthy {kind}", total=len(seeds))
        for health in healthy.alarms(kind, seeds):
            num_logs, num_events = num_logs + health.num_logs, num_events + health.num_events
            if health.alarm:
                num_alarms += 1
                console.print(f"seed {health.seed}: {health.alarm}", style="red")
            progress.update(task, advance=1, description=f"healthy {kind}, {num_alarms} alarms")
    rules = f"{len(Core.standard().rules)} rules, {num_events:,d} events in {num_logs:,d} logs"
    console.print(f"{len(seeds):,d} healthy {kind} from seed {seeds.start} on: {rules}, {num_alarms} alarms")
    if writes:
        figures = {"num_seeds": len(seeds), "num_logs": num_logs, "num_events": num_events, "num_alarms": num_alarms}
        _write({"healthy": kind, "first_seed": seeds.start, "num_rules": len(Core.standard().rules), **figures})
    return not num_alarms


def _write(measured: dict[str, object]) -> None:
    """Put one measurement in the place of the former one, in the order of the catalogue."""
    found = json.loads(MEASURED.read_text()) if MEASURED.exists() else {"healthy": [], "mutants": []}
    kind, order = ("healthy", list(healthy.KINDS)) if "healthy" in measured else ("mutant", list(MUTANTS))
    of_kind = "healthy" if kind == "healthy" else "mutants"
    entries = {entry[kind]: entry for entry in found[of_kind]} | {measured[kind]: measured}
    found[of_kind] = [entries[name] for name in order if name in entries]
    MEASURED.write_text(json.dumps(found, indent=1) + "\n")


def as_object(mutant: Mutant, figures: Figures) -> dict[str, object]:
    """One mutant as an object of `--json`."""
    return {
        "rule": mutant.rule,
        "mutant": mutant.name,
        "sentence": mutant.sentence,
        "incidents": list(mutant.incidents),
        "driven_by": mutant.scene.title,
        **attrs.asdict(figures),
    }


def _tell(console: Console, mutant: Mutant, figures: Figures, detections: Sequence[Detection]) -> None:
    median = "" if figures.median_events is None else f", after {figures.median_events:g} events"
    console.print(
        f"{mutant.rule:22s} {mutant.name}: named in {figures.num_named} of {figures.num_touched} touched seeds "
        f"of {figures.num_seeds}{median} (at most {figures.max_events}); later also {figures.also or 'nobody'}"
    )
    for detection in detections:
        if detection.is_misnamed(mutant):
            console.print(
                f"  seed {detection.seed}: {sorted(detection.first_rules)} at {detection.found}: {detection.detail}",
                style="red",
            )
    missed = [d for d in detections if d.touched is not None and d.found is None]
    if missed:
        crashes = [why for d in missed if (why := d.ended_by or d.unfoldable)]
        console.print(f"  missed: seeds {[d.seed for d in missed][:10]}; ended by {crashes[:2]}", style="yellow")


def main() -> int:
    """Exit code 0 where every mutant was named and by its rule first, 1 where one was not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds of each mutant")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this seed alone, with the transcript of its log")
    parser.add_argument("--rule", action="append", help="only mutants of this rule; may be given again")
    parser.add_argument("--mutant", action="append", help="only this mutant; may be given again")
    parser.add_argument("--healthy", action="store_true", help="no mistake: every checker must be silent")
    kinds = ", ".join(healthy.KINDS)
    parser.add_argument("--kind", default="walks", choices=healthy.KINDS, help=f"with --healthy: {kinds}")
    parser.add_argument("--json", action="store_true", help="one object a mutant, one a line")
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {MEASURED.name}, for the documents")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # mistakes make the connector speak, and rightly so
    chosen = [
        mutant
        for mutant in MUTANTS.values()
        if (not arguments.rule or mutant.rule in arguments.rule)
        and (not arguments.mutant or mutant.name in arguments.mutant)
    ]
    if not chosen:
        parser.error("no such mutant; there are " + ", ".join(f"{m.name} ({m.rule})" for m in MUTANTS.values()))
    if arguments.seed is not None:
        return 0 if transcript(chosen, arguments.seed) else 1
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.healthy:
        return 0 if stay_silent(arguments.kind, seeds, Console(width=160), writes=arguments.write) else 1
    return 0 if hunt(chosen, seeds, Console(width=160), as_json=arguments.json, writes=arguments.write) else 1


if __name__ == "__main__":
    sys.exit(main())
