"""What a user of a server feels: the time to the first token, the stall of a preempted request, throughput under load.

Real vLLM on CPU, with a random model that takes two seconds for a prompt of 2,000 tokens. Each contender is an engine
in a process of its own with one thread; they are asked the same in turns, and what is compared are ratios to no
connector within a turn, mostly in CPU time of all processes that a contender needs. Greedy outputs are compared, too.

Does not measure: a GPU, where computing is faster by more than copying; SimpleCPUOffloadConnector, which copies with
CUDA streams and does not start without them.
"""

from __future__ import annotations

import atexit
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.engine_process import MODEL_SIZES, Ask, Contender, EngineProcess, Served, Token, engine_process
from benchmarks.figures import Cases, Figure, compared

from kvledger.adapters.lab.demo.model import FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE, make_model

REPOSITORY = Path(__file__).resolve().parents[2]
LMCACHE_PYTHON = REPOSITORY / ".venv-lmcache" / "bin" / "python"
GIB = 1024**3
SMALL_POOL_BYTES = 32 * 1024**2
"""Of 43 blocks' pages: less than half of what a mixed load would like to find again."""

NONE = Contender("no connector", "none")
CONTENDERS = (
    NONE,
    Contender("kvledger", "kvledger", GIB),
    Contender("OffloadingConnector", "offloading", GIB),
    Contender("LMCache 0.5.6, chunks of 32", "lmcache", GIB, (("chunk_size", 32),)),
)
SMALL_POOLS = (
    NONE,
    Contender("kvledger", "kvledger", SMALL_POOL_BYTES),
    Contender("OffloadingConnector", "offloading", SMALL_POOL_BYTES),
)
OFFERS = (
    NONE,
    CONTENDERS[1],
    Contender("kvledger, `offer: always`", "kvledger", GIB, (("offer", "always"),)),
)
WATCHED = (
    Contender("one process", "watched", GIB),
    Contender("an engine core in a process of its own", "watched", GIB, has_own_core=True),
)
CHUNK_SIZES = (NONE, *(Contender(f"chunks of {n}", "kvledger", GIB, (("chunk_size", n),)) for n in (32, 64, 128, 256)))

UNITS = {
    "tokens computed again": "",
    "preemptions": "",
    "the copy": "ms",
    "its end until vLLM is told": "ms",
    "steps from its begin": "",
    "steps from its end": "",
    "loads while slow": "",
    "loads when fast again": "",
}
"""Of what is shown as it is, and may be none at all; all else are seconds, compared as ratios."""
Figures = Mapping[str, float]
"""What is measured -> how much."""
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
    answers = {"when new": engine.serve(ask, forgets=True), "from vLLM's prefix cache": engine.serve(ask)}
    answers["from the host pool"] = engine.serve(ask, forgets=True)
    figures = {}
    for name, served in answers.items():
        token = served.tokens[0][0]
        figures |= {f"CPU time {name}": token.cpu_s, f"wall time {name}": token.wall_s}
    return figures, said(*answers.values())


def preempted(engine: EngineProcess, chance: random.Random) -> tuple[Figures, list[list[int]]]:
    """A request of 1,530 tokens loses its blocks to two others; from the end of these to its next token."""
    others = Ask(prompt(chance, 1500), max_tokens=24), Ask(prompt(chance, 1400), max_tokens=8, arrives_at_step=8)
    served = engine.serve((*others, Ask(prompt(chance, 1530), max_tokens=40, priority=1)), forgets=True)
    *tokens_of_others, tokens = served.tokens
    ended = max((its[-1] for its in tokens_of_others), key=lambda token: token.cpu_s)
    resumed = next(token for token in tokens if token.cpu_s > ended.cpu_s)
    return {
        "CPU time of the stall": resumed.cpu_s - ended.cpu_s,
        "wall time of the stall": resumed.wall_s - ended.wall_s,
        "tokens computed again": served.num_tokens_recomputed,
        "preemptions": served.num_preemptions,
    }, said(served)


def mixed(engine: EngineProcess, chance: random.Random) -> tuple[Figures, list[list[int]]]:
    """Ten requests about five documents of 640 tokens, each asked about twice; the blocks hold four at once."""
    documents = [prompt(chance, 640) for _ in range(5)]
    asks = [
        Ask(documents[number % 5] + prompt(chance, chance.randint(20, 200)), chance.randint(24, 72), number * 3)
        for number in range(10)
    ]
    served = engine.serve(asks, forgets=True)
    return {**_throughput(served), "tokens computed again": served.num_tokens_recomputed}, said(served)


def nothing_to_gain(engine: EngineProcess, chance: random.Random) -> tuple[Figures, list[list[int]]]:
    """Six new prompts of 300 tokens that fit: what a connector costs that nobody needs."""
    served = engine.serve([Ask(prompt(chance, 300), 48) for _ in range(6)], forgets=True)
    return _throughput(served), said(served)


NUM_LOADS = 5


def watched_load(engine: EngineProcess, chance: random.Random) -> tuple[Figures, list[list[int]]]:
    """The same prompt of 2,000 tokens from the host pool, five times, on an engine that has nothing else to do."""
    ask = (Ask(prompt(chance, 2000), max_tokens=1),)
    answers = [engine.serve(ask, forgets=True) for _ in range(1 + NUM_LOADS)]
    loads = engine.watched_loads()[-NUM_LOADS:]
    return {
        "the copy": statistics.median(load.ended_ns - load.begun_ns for load in loads) / 1e6,
        "its end until vLLM is told": statistics.median(load.noticed_ns - load.ended_ns for load in loads) / 1e6,
        "steps from its begin": statistics.median(load.num_steps(after_ns=load.begun_ns) for load in loads),
        "steps from its end": statistics.median(load.num_steps(after_ns=load.ended_ns) for load in loads),
        "wall time to the first token": statistics.median(answer.tokens[0][0].wall_s for answer in answers[1:]),
    }, said(*answers)


SLOW_BYTES_PER_S = 8e6
"""Of 24 KiB a token: three milliseconds, where computing takes one."""
UNTIL_TRIED_AGAIN_S = 10.5
NUM_SLOW, NUM_FAST = 12, 4


def loads_that_lose(engine: EngineProcess, chance: random.Random) -> tuple[Figures, list[list[int]]]:
    """Prompts of 300 tokens from the host pool, one after the other: twelve times slower to load than to compute, and
    four times as fast as ever; in between time to try again, where loads are refused.
    """
    asks = [Ask(prompt(chance, 300), max_tokens=16) for _ in range(4)]
    first = engine.serve(asks, forgets=True)
    num_loads = engine.num_loads()
    slow = [engine.serve([ask], forgets=True, load_bytes_per_s=SLOW_BYTES_PER_S) for ask in _around(asks, NUM_SLOW)]
    num_slow_loads = engine.num_loads() - num_loads
    if 0 < num_slow_loads < NUM_SLOW:
        time.sleep(UNTIL_TRIED_AGAIN_S)
    fast = [engine.serve([ask], forgets=True) for ask in _around(asks, NUM_FAST)]
    return {
        "mean wall time to the first token while slow": statistics.mean(served.tokens[0][0].wall_s for served in slow),
        "the same when fast again": statistics.mean(served.tokens[0][0].wall_s for served in fast),
        "loads while slow": num_slow_loads,
        "loads when fast again": engine.num_loads() - num_loads - num_slow_loads,
    }, said(first, *slow, *fast)


def _around(asks: Sequence[Ask], count: int) -> Iterator[Ask]:
    return itertools.islice(itertools.cycle(asks), count)


def _throughput(served: Served) -> Figures:
    gaps = sorted(gap for tokens in served.tokens for gap in _gaps(tokens))
    return {
        "CPU time of all": served.cpu_s,
        "wall time of all": served.wall_s,
        "median CPU time between tokens": gaps[len(gaps) // 2],
        "99th percentile of CPU time between tokens": gaps[len(gaps) * 99 // 100],
        "mean CPU time to the first token": statistics.mean(tokens[0].cpu_s for tokens in served.tokens),
    }


def _gaps(tokens: Sequence[Token]) -> Iterator[float]:
    """Seconds of CPU time between tokens of one request."""
    return (later.cpu_s - earlier.cpu_s for earlier, later in itertools.pairwise(tokens))


Case = tuple[Scenario, Sequence[Contender]]
CASES: Mapping[str, Case] = {
    "time to the first token of a prompt of 2,000 tokens": (first_token, CONTENDERS),
    "a preempted request": (preempted, CONTENDERS),
    "a mixed load, a host pool with room": (mixed, CONTENDERS),
    "nothing to be gained": (nothing_to_gain, CONTENDERS),
    "a mixed load, a host pool that is too small": (mixed, SMALL_POOLS),
    "an asynchronous load on an idle engine": (watched_load, WATCHED),
}
FURTHER: Mapping[str, Case] = {
    "loads that take longer than computing": (loads_that_lose, OFFERS),
    "chunk sizes, time to the first token": (first_token, CHUNK_SIZES),
    "chunk sizes, a mixed load": (mixed, CHUNK_SIZES),
    "chunk sizes, nothing to be gained": (nothing_to_gain, CHUNK_SIZES),
}


def cases(*, full: bool, num_rounds: int | None = None) -> Cases:
    """Three rounds of what servers meet; in full five, slow loads, and kvledger's chunk sizes."""
    engines = Engines()
    chosen = {**CASES, **FURTHER} if full else CASES
    return {
        name: partial(engines.measure, name, scenario, contenders, num_rounds or (5 if full else 3))
        for name, (scenario, contenders) in chosen.items()
    }


class Engines:
    """Those of the case at hand; they stay for the next one where that wants them, too, and work only when asked."""

    def __init__(self) -> None:
        self._running: dict[Contender, tuple[EngineProcess, ExitStack]] = {}
        self._model = REPOSITORY / "build" / "bench" / "model-{hidden_size}-{num_hidden_layers}".format(**MODEL_SIZES)
        atexit.register(self._keep, ())

    def measure(
        self, name: str, scenario: Scenario, contenders: Sequence[Contender], num_rounds: int
    ) -> Sequence[Figure]:
        """Let each serve the same in turns, a different one first in each round; LMCache where it is installed."""
        engines = self._started([each for each in contenders if each.kind != "lmcache" or LMCACHE_PYTHON.exists()])
        rounds: dict[str, list[Figures]] = {each: [] for each in engines}
        num_different = dict.fromkeys(engines, 0)
        names = list(engines)
        for number in range(num_rounds):
            answers = {}
            for each in names[number % len(names) :] + names[: number % len(names)]:
                figures, answers[each] = scenario(engines[each], random.Random(f"{name} {number}"))
                rounds[each].append(figures)
                print(".", end="", file=sys.stderr, flush=True)
            for each in names:
                num_different[each] += sum(map(list.__ne__, answers[each], answers[names[0]]))
        print(file=sys.stderr)
        return [*_figures(rounds), *(Figure("answers that differ", name, n, "") for name, n in num_different.items())]

    def _started(self, contenders: Sequence[Contender]) -> dict[str, EngineProcess]:
        self._keep(contenders)
        make_model(self._model, **MODEL_SIZES)
        for each in contenders:
            if each not in self._running:
                python = LMCACHE_PYTHON if each.kind == "lmcache" else Path(sys.executable)
                until_ended = ExitStack()
                engine = until_ended.enter_context(engine_process(each, self._model, python))
                self._running[each] = engine, until_ended
                nothing_to_gain(engine, random.Random(0))  # warm
        return {each.name: self._running[each][0] for each in contenders}

    def _keep(self, contenders: Collection[Contender]) -> None:
        for each in set(self._running) - set(contenders):
            _, until_ended = self._running.pop(each)
            until_ended.close()


def _figures(rounds: Mapping[str, Sequence[Figures]]) -> Iterator[Figure]:
    for what in next(iter(rounds.values()))[0]:
        values = {name: [figures[what] for figures in its] for name, its in rounds.items()}
        if what in UNITS:
            yield from (Figure(what, name, statistics.median(its), UNITS[what]) for name, its in values.items())
        else:
            yield from compared(what, "s", values, anchor=next(iter(rounds)))
