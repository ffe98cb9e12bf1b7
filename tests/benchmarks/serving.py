"""What a user of a server feels: the time to the first token, the stall of a preempted request, throughput under load.

Real vLLM on CPU, with a random model that takes two seconds for a prompt of 2,000 tokens. Each contender is an engine
in a process of its own with one thread; they are asked the same in turns, and what is compared are ratios to no
connector within a turn, in CPU time of all processes that a contender needs. Greedy outputs are compared as well.

Does not measure: a GPU, where computing is faster by more than copying; SimpleCPUOffloadConnector, which copies with
CUDA streams and does not start without them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engine_process import MODEL_SIZES, Ask, Contender, EngineProcess, Served, Token, engine_process

from kvledger.adapters.demo.model import FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE, make_model

REPOSITORY = Path(__file__).resolve().parents[2]
LMCACHE_PYTHON = REPOSITORY / ".venv-lmcache" / "bin" / "python"
GIB = 1024**3
SMALL_POOL_BYTES = 32 * 1024**2
"""Of 43 blocks' pages: less than half of what a mixed load would like to find again."""

NONE = Contender("no connector", "none")
OURS = Contender("kvledger", "kvledger", GIB)
PEERS = (
    Contender("OffloadingConnector", "offloading", GIB),
    Contender("LMCache 0.5.6, chunks of 32", "lmcache", GIB, {"chunk_size": 32}),
)
SMALL_POOLS = (
    Contender("kvledger, small pool", "kvledger", SMALL_POOL_BYTES),
    Contender("OffloadingConnector, small pool", "offloading", SMALL_POOL_BYTES),
)

Figures = Mapping[str, float]
Scenario = Callable[[EngineProcess, random.Random], tuple[Figures, list[list[int]]]]
"""Serves, and returns figures and what was said. Equal random generators ask for the same."""


def prompt(chance: random.Random, num_tokens: int) -> tuple[int, ...]:
    """Random words."""
    return tuple(chance.randrange(FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE) for _ in range(num_tokens))


def said(*answers: Served) -> list[list[int]]:
    """Output token ids of all requests."""
    return [[token.token_id for token in tokens] for served in answers for tokens in served.tokens]


def first_token(engine: EngineProcess, chance: random.Random) -> tuple[Figures, list[list[int]]]:
    """One prompt of 2,000 tokens on an idle engine: new, again, and again when vLLM's own cache has forgotten it."""
    ask = (Ask(prompt(chance, 2000), max_tokens=1),)
    answers = {"cold": engine.serve(ask, forgets=True), "prefix_cache": engine.serve(ask)}
    answers["host"] = engine.serve(ask, forgets=True)
    figures = {}
    for name, served in answers.items():
        token = served.tokens[0][0]
        figures |= {f"{name}_first_token_cpu_s": token.cpu_s, f"{name}_first_token_wall_s": token.wall_s}
    return figures, said(*answers.values())


def preempted(engine: EngineProcess, chance: random.Random) -> tuple[Figures, list[list[int]]]:
    """A request of 1,530 tokens loses its blocks to two others; from the end of these to its next token."""
    others = Ask(prompt(chance, 1500), max_tokens=24), Ask(prompt(chance, 1400), max_tokens=8, arrives_at_step=8)
    served = engine.serve((*others, Ask(prompt(chance, 1530), max_tokens=40, priority=1)), forgets=True)
    *tokens_of_others, tokens = served.tokens
    ended = max((its[-1] for its in tokens_of_others), key=lambda token: token.cpu_s)
    resumed = next(token for token in tokens if token.cpu_s > ended.cpu_s)
    return {
        "stall_cpu_s": resumed.cpu_s - ended.cpu_s,
        "stall_wall_s": resumed.wall_s - ended.wall_s,
        "tokens_recomputed": served.num_tokens_recomputed,
        "preemptions": served.num_preemptions,
    }, said(served)


def mixed(engine: EngineProcess, chance: random.Random) -> tuple[Figures, list[list[int]]]:
    """Twelve requests about four documents of 640 tokens, more than the blocks hold at once."""
    documents = [prompt(chance, 640) for _ in range(4)]
    asks = [
        Ask(documents[number % 4] + prompt(chance, chance.randint(20, 200)), chance.randint(24, 72), number * 3)
        for number in range(12)
    ]
    served = engine.serve(asks, forgets=True)
    return {**_throughput(served), "tokens_recomputed": served.num_tokens_recomputed}, said(served)


def nothing_to_gain(engine: EngineProcess, chance: random.Random) -> tuple[Figures, list[list[int]]]:
    """Six new prompts of 300 tokens that fit: what a connector costs that nobody needs."""
    served = engine.serve([Ask(prompt(chance, 300), 48) for _ in range(6)], forgets=True)
    return _throughput(served), said(served)


def _throughput(served: Served) -> Figures:
    gaps = sorted(gap for tokens in served.tokens for gap in _gaps(tokens))
    return {
        "cpu_s": served.cpu_s,
        "wall_s": served.wall_s,
        "gap_p50_cpu_s": gaps[len(gaps) // 2],
        "gap_p99_cpu_s": gaps[len(gaps) * 99 // 100],
        "first_token_cpu_s": statistics.mean(tokens[0].cpu_s for tokens in served.tokens),
    }


def _gaps(tokens: Sequence[Token]) -> Iterator[float]:
    """Seconds of CPU time between tokens of one request."""
    return (later.cpu_s - earlier.cpu_s for earlier, later in itertools.pairwise(tokens))


SCENARIOS: Mapping[str, Scenario] = {
    "first token": first_token,
    "preempted": preempted,
    "mixed": mixed,
    "nothing to gain": nothing_to_gain,
}


@attrs.define
class Measured:
    """Figures of each contender in each round, and how often an answer differed from that without a connector."""

    rounds: dict[str, list[Figures]] = attrs.field(factory=lambda: defaultdict(list))
    num_different: dict[str, int] = attrs.field(factory=lambda: defaultdict(int))

    def ratios(self, contender: str, figure: str) -> list[float]:
        """To no connector, round by round, ascending; empty where that has nothing of the kind."""
        pairs = zip(self.rounds[contender], self.rounds[NONE.name], strict=True)
        return sorted(mine[figure] / base[figure] for mine, base in pairs if base[figure])


def measure(contenders: Sequence[Contender], scenarios: Sequence[str], num_rounds: int) -> dict[str, Measured]:
    """Scenario -> figures; the first contender is no connector."""
    measured = {name: Measured() for name in scenarios}
    model = REPOSITORY / "build" / "bench" / "model-{hidden_size}-{num_hidden_layers}".format(**MODEL_SIZES)
    make_model(model, **MODEL_SIZES)
    with ExitStack() as running:
        engines = {}
        for contender in contenders:
            python = LMCACHE_PYTHON if contender.kind == "lmcache" else Path(sys.executable)
            engines[contender.name] = running.enter_context(engine_process(contender, model, python))
            nothing_to_gain(engines[contender.name], random.Random(0))
        for number in range(num_rounds):
            for name in scenarios:
                _take_turns(engines, name, number, measured[name])
    return measured


def _take_turns(engines: Mapping[str, EngineProcess], name: str, number: int, measured: Measured) -> None:
    names = list(engines)
    expected: list[list[int]] = []
    outputs: dict[str, list[list[int]]] = {}
    started = time.perf_counter()
    for place in range(len(names)):
        contender = names[(place + number) % len(names)]
        figures, outputs[contender] = SCENARIOS[name](engines[contender], random.Random(f"{name} {number}"))
        measured.rounds[contender].append(figures)
    expected = outputs[NONE.name]
    for contender, answers in outputs.items():
        measured.num_different[contender] += sum(map(list.__ne__, answers, expected))
    print(f"{name}, round {number}: {time.perf_counter() - started:.0f} s", file=sys.stderr)


def contenders(chosen: str, settings: Sequence[str]) -> list[Contender]:
    """No connector first; LMCache where it is installed."""
    ours = [OURS] + [attrs.evolve(OURS, name=f"kvledger {text}", settings=json.loads(text)) for text in settings]
    peers = [peer for peer in PEERS if peer.kind != "lmcache" or LMCACHE_PYTHON.exists()]
    return [NONE, *ours, *(peers if chosen == "all" else ()), *(SMALL_POOLS if chosen == "small" else ())]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scenario", action="append", choices=tuple(SCENARIOS), help="these alone")
    parser.add_argument("--contenders", choices=("all", "ours", "small"), default="all")
    parser.add_argument(
        "--settings", action="append", default=[], help="kvledger with these keys as well, a JSON object"
    )
    arguments = parser.parse_args()
    field = contenders(arguments.contenders, arguments.settings)
    results = measure(field, arguments.scenario or tuple(SCENARIOS), arguments.rounds)
    for name, measured in results.items():
        print(f"\n{name}")
        for contender in field:
            print(f"  {contender.name}: {measured.num_different[contender.name]} answers differ")
            for figure in measured.rounds[contender.name][0]:
                values = sorted(figures[figure] for figures in measured.rounds[contender.name])
                ratios = measured.ratios(contender.name, figure)
                shown = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})" if ratios else "-"
                print(f"    {figure}: {statistics.median(values):.3f}  {shown}")


if __name__ == "__main__":
    main()
