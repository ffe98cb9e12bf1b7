"""Compare two editions of the core: `python tests/editions/compare.py COMMIT`, until the redesign is done.

COMMIT is checked out under `build/`. Both editions play the same stories, each in its own process:

- *logs*: worlds, walks and hybrid worlds; the events that both write have to be equal, byte for byte.
- *states*: what the earlier edition wrote is folded by both; the states have to be equal after every event, through the
  mapping in `plain_state`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("worlds", "walks", "hybrid")


# --- in the process of one edition ---------------------------------------------------------------


def stories(kind: str, seeds: range) -> Iterator[tuple[int, Any, list[Any], str]]:
    """(seed, configuration, events with their numbers, how it ended) of each story."""
    import logging

    from mutants.scenes import HybridWorlds, Walks

    logging.disable(logging.CRITICAL)
    for seed in seeds:
        if kind == "worlds":
            yield from world(seed)
            continue
        story = (Walks(is_reliable=False) if kind == "walks" else HybridWorlds()).play(seed, lambda _: None)
        yield seed, story.configuration, list(story.events), story.ended_by


def world(seed: int) -> Iterator[tuple[int, Any, list[Any], str]]:
    """All logs of one world."""
    from sim.logs import read_end
    from sim.run import live

    found, trouble = live(seed)
    if found is None:
        yield seed, None, [], trouble
        return
    final = getattr(found, "log", None)
    if final is None and found.log_dir is None:
        found.side.ledger.commit()
        final = read_end(found.side)
    for log in [*found.dead_logs, *([] if final is None else [final])]:
        yield seed, log.configuration, list(log.events), trouble


def untimed(event: Any) -> Any:
    """The event without what a real copy took."""
    import msgspec

    return msgspec.structs.replace(event, duration_ns=0) if hasattr(event, "duration_ns") else event


def plain_answer(answer: Any, sequence: int) -> tuple[Any, ...] | None:
    """An answer that was given, and where."""
    if answer is None:
        return None
    names = ("generation", "num_computed_tokens", "num_tokens", "num_hit_tokens", "num_external_tokens", "is_async")
    return (*(getattr(answer, name) for name in (*names, "miss_reason")), sequence)


def plain_state(projections: Any) -> Any:
    """What an edition believes, in plain values that both have."""
    its, tracker = projections, projections.tracker
    old = hasattr(its, "save_cursor")
    records = {}
    for record in tracker:
        ordinal, request_id = record.ordinal, record.request_id
        if old:
            tail = its.tails.of(ordinal)
            held = (its.blocks.of_life(ordinal), its.blocks.state.lost.get(ordinal))
            freed = (its.blocks.state.leaving.get(ordinal), its.blocks.state.left.get(ordinal))
            cursor, keys = its.save_cursor.num_chunks(ordinal), its.chunk_keys.of_life(ordinal)
            num_local = its.unfilled.state.num_local_tokens.get(ordinal)
        else:
            tail = record.tail
            held = (record.block_ids, record.lost_block_ids)
            freed = (record.window_freed_at, record.window_freed_before_step)
            cursor, keys, num_local = record.num_chunks_handled, record.keys, record.num_local_tokens
        if hasattr(record, "answer"):
            pending = plain_answer(record.answer, record.answered_at)
            claimed = plain_answer(record.claimed, 0)
            deferred = (
                record.num_deferrals,
                record.deferred_for,
                getattr(record, "wanted_boundary", 0) or getattr(record, "junction", 0),
            )
        else:
            cache = its.lookups
            given = cache.pending(request_id)
            pending = plain_answer(given, 0 if given is None else given.sequence)
            claimed = plain_answer(cache.taken_up(request_id), 0)
            deferred = (cache.num_deferred(request_id), cache.deferred_for(request_id), cache.junction(request_id))
        regions = (record.path, record.blocks, record.first, record.current, record.trust)
        counts = (
            *(record.generation, record.num_preemptions, record.num_failed_loads, record.num_tokens),
            *(record.num_prompt_tokens, record.num_tokens_before_preemption, record.state_since_ns),
            tracker.num_computed_tokens(record),
        )
        tables = [None if table is None else tuple(table) for table in held]
        about_tail = (
            None
            if tail is None
            else (tail.job_id, tail.first_token, tail.end_token, tail.slots, tail.is_saved, tail.load_id)
        )
        records[ordinal] = (
            request_id,
            [str(each) for each in regions],
            counts,
            tables,
            freed,
            cursor,
            tuple(keys),
            num_local,
            about_tail,
            (pending, claimed, deferred),
        )
    unfilled = its.unfilled.state if old else tracker.unfilled
    before = unfilled.lost_before if old else unfilled.lost_before_step
    blocks = (list(unfilled.blocks), [tuple(each) for each in unfilled.lost], [tuple(each) for each in before])
    slots = pool_of(its).slots.state
    pool = (
        {key: tuple(pool_of(its).get(key) or ()) for key in pool_of(its).state.committed},
        list(pool_of(its).state.by_age),
        list(slots.free),
        list(slots.failed),
        slots.num_touched,
        sorted(slots.references.items()),
        sorted(pair for pair in pool_of(its).promised.items() if pair[1]),
        sorted(pair for pair in pool_of(its).wanted.items() if pair[1]),
    )
    snapshot = projections.snapshot()
    same = [(name, snapshot[name]) for name in ("costs", "extensions")]
    clock = (
        tracker.time_ns,
        tracker.num_steps,
        tracker.num_arrived,
        unfilled.num_failures,
        sorted(unfilled.loads.items()),
    )
    return sorted(records.items()), blocks, pool, same, clock, plain_copies(its), plain_owed(its)


def pool_of(its: Any) -> Any:
    """What is in the host pool."""
    return its.chunks if hasattr(its, "chunks") else its.pool


def plain_copies(its: Any) -> Any:
    """Copies in flight and given up."""
    jobs = its.transfers if hasattr(its, "transfers") else its.jobs
    given_up = jobs.state.given_up if hasattr(its, "transfers") else jobs.given_up
    names = (
        *("job_id", "kind", "request_id", "ordinal", "generation", "chunks", "keys", "earlier_keys", "slots"),
        *("block_ids", "epoch", "is_async", "asked_step", "asked_ns", "work", "source", "ranks_done", "ranks_failed"),
        *("repeated_ranks", "error", "is_doubtful"),
    )

    def plain(copy: Any) -> tuple[str, ...]:
        return tuple(str(getattr(copy, name)) for name in names)

    return [plain(copy) for copy in jobs], sorted(map(plain, given_up.values())), jobs.next_job_id, jobs.epoch


def plain_owed(its: Any) -> Any:
    """What is owed outside."""
    if hasattr(its, "obligations"):
        state = its.obligations.state
        queues = [list(queue) for queue in (state.failed, state.sent, state.received, state.to_report)]
        unsent, reminders = list(state.jobs.items()), list(state.awaited.items())
        under_way, closed_at = list(state.in_flight), state.closed
        waiting = sorted((life, max(0, job)) for life, job in state.receiving.items())
        lives = (sorted(state.promised), waiting, sorted(state.held), sorted(state.coming_back))
    else:
        state = its.owed.state
        queues = [list(queue) for queue in (state.failed, state.sent, state.received, state.to_report)]
        unsent = [(job_id, (each.sequence, each.job)) for job_id, each in state.unsent.items()]
        reminders = [(job_id, (each.sequence, each.awaited)) for job_id, each in state.reminders.items()]
        under_way, closed_at = list(state.under_way), state.closed_at
        ends = state.ends.items()
        waiting = sorted(
            (life, each.load_id if each.load.value == "under_way" else 0)
            for life, each in ends
            if each.load.value != "none"
        )
        lives = (
            sorted(life for life, each in ends if each.is_promised),
            waiting,
            sorted(life for life, each in ends if each.blocks.value == "kept_for_copy"),
            sorted(life for life, each in ends if each.blocks.value != "none"),
        )
    return state.present, unsent, reminders, under_way, queues, lives, state.block_ids, closed_at


def state_digests(configuration: Any, events: list[Any]) -> list[str]:
    """A digest of the state after each event."""
    from kvledger.lifecycle import Core

    core, digests = Core.standard(), []
    if hasattr(core, "new_projections"):
        projections = core.new_projections(configuration)
    else:
        from kvledger.lifecycle.projections import Projections

        projections = Projections(core, configuration)
    for sequence, event in events:
        projections.fold(event, sequence)
        digests.append(hashlib.blake2b(repr(plain_state(projections)).encode(), digest_size=12).hexdigest())
    return digests


def child(arguments: argparse.Namespace) -> None:
    """Play the stories and print a line for each; with `--states`, write states or read the other edition's events."""
    import kvledger.lifecycle

    in_full = getattr(kvledger.lifecycle, "lookups_in_full", list)
    for seed, configuration, recorded, ended_by in stories(arguments.kind, range(arguments.first, arguments.last)):
        events = [(sequence, untimed(event)) for sequence, event in in_full(recorded)]
        told = re.sub(r"\d{8}T\d{6}Z-\d+-\d+", "", repr(events))  # the name of a log
        digest = hashlib.blake2b(told.encode(), digest_size=12).hexdigest()
        states = ""
        if arguments.states and configuration is not None:
            digests = state_digests(configuration, events)
            states = hashlib.blake2b("".join(digests).encode(), digest_size=12).hexdigest()
            if arguments.dump:
                Path(arguments.dump).write_bytes(pickle.dumps(digests))
        print(seed, len(events), digest, states, ended_by.replace("\n", " ")[-80:], flush=True)


# --- both ------------------------------------------------------------------------------------------


def import_root(tree: Path, root: Path) -> Path:
    """A folder from which `kvledger` is imported as it is in that tree."""
    (root / "kvledger").mkdir(parents=True, exist_ok=True)
    for name in ("lifecycle", "storage", "adapters"):
        link = root / "kvledger" / name
        if not link.is_symlink():
            link.symlink_to(tree / name)
    return root


def main() -> int:
    """0 where both editions agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--kind", choices=KINDS, default="worlds")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=20)
    parser.add_argument("--states", action="store_true", help="compare the states after every event, too (slow)")
    parser.add_argument("--dump", default="")
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return 0
    before = ROOT / "build" / "before"
    if not before.exists():
        subprocess.run(["git", "worktree", "add", "-q", "--detach", before, arguments.commit], cwd=ROOT, check=True)
    lines = []
    own = [sys.executable, __file__, "--child", "--kind", arguments.kind, *(["--states"] if arguments.states else [])]
    own += ["--first", str(arguments.first), "--last", str(arguments.last)]
    running = []
    for tree, name in ((before, "before-root"), (ROOT, "now-root")):
        path = f"{import_root(tree, ROOT / 'build' / name)}{os.pathsep}{tree / 'tests'}"
        running.append(
            subprocess.Popen(own, cwd=tree, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
        )
    lines = [process.communicate()[0].splitlines() for process in running]
    differ = [(a, b) for a, b in zip(*lines, strict=False) if a != b]
    for a, b in differ[:10]:
        print(f"before {a}\nnow    {b}")
    num_events = sum(int(line.split()[1]) for line in lines[0])
    print(f"{len(lines[0])} and {len(lines[1])} logs of {num_events} events, {len(differ)} differ")
    return 1 if differ or len(lines[0]) != len(lines[1]) or not lines[0] else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONHASHSEED"] = "0"  # else vLLM draws where its block hashes begin
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    raise SystemExit(main())
