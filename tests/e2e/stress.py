"""`make stress`: real engines with tiny pools, clients that come, go, share beginnings and are more or less urgent.

Every seed is a crowd of requests. Each configuration serves its seeds in one engine, each crowd twice, so that later
requests meet what earlier ones left in the host pool. Whoever was not aborted must say what an engine without a
connector and without preemption says; the log must pass every check.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import attrs

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.engines import ReadLog, read_sound_log
from kvledger.adapters.lab.demo.engine import ENVIRONMENT, sampling, settle, start
from kvledger.adapters.lab.demo.model import FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE, make_model
from kvledger.adapters.lab.demo.workload import Workload, connector

MAX_TOKENS = 60
BLOCK_SIZE = 32
AMPLE = Workload(num_blocks=160, max_model_len=320, max_num_seqs=16)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@attrs.frozen
class Configuration:
    """How an engine is set up."""

    name: str
    chunk_size: int = 32
    num_blocks: int = 14
    enable_prefix_caching: bool = False
    async_scheduling: bool = False
    num_host_blocks: int = 400
    more: dict[str, Any] = attrs.Factory(dict)
    connector: dict[str, Any] = attrs.Factory(dict)

    @property
    def workload(self) -> Workload:
        """The sizes of the engine."""
        return Workload(
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            chunk_size=self.chunk_size,
            max_num_seqs=6,
            max_num_batched_tokens=96,
            max_model_len=320,
            enable_prefix_caching=self.enable_prefix_caching,
        )


BESIDE = {"load_mode": "async", "save_mode": "async"}

CONFIGURATIONS = (
    Configuration("sync"),
    Configuration("async", chunk_size=8, async_scheduling=True),
    Configuration("caching", chunk_size=16, enable_prefix_caching=True, num_host_blocks=40),
    Configuration("async-caching", chunk_size=64, enable_prefix_caching=True, async_scheduling=True),
    Configuration("priority", chunk_size=8, num_host_blocks=30, more={"scheduling_policy": "priority"}),
    Configuration("ngram", chunk_size=8, more={"speculative_config": NGRAM}),
    Configuration("ngram-caching", chunk_size=32, enable_prefix_caching=True, more={"speculative_config": NGRAM}),
    Configuration("beside", chunk_size=8, connector=BESIDE),
    Configuration("beside-async", chunk_size=32, async_scheduling=True, connector=BESIDE),
    Configuration("beside-caching", chunk_size=16, enable_prefix_caching=True, num_host_blocks=40, connector=BESIDE),
    Configuration("beside-ngram", chunk_size=8, more={"speculative_config": NGRAM}, connector=BESIDE),
)


@attrs.frozen
class Client:
    """One request of a crowd, and when its client comes and goes."""

    request_id: str
    prompt: tuple[int, ...]
    arrives: int
    goes: int | None
    priority: int


@attrs.define
class Drafts:
    """What became of drafted tokens."""

    num_accepted: int = 0
    num_rejected: int = 0

    def watch(self, scheduler: Any) -> None:
        """Count from now on."""
        make = scheduler.make_spec_decoding_stats

        def count(*arguments: Any, num_draft_tokens: int, num_accepted_tokens: int, **options: Any) -> Any:
            self.num_accepted += num_accepted_tokens
            self.num_rejected += num_draft_tokens - num_accepted_tokens
            return make(
                *arguments, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **options
            )

        scheduler.make_spec_decoding_stats = count


def crowd(seed: int) -> list[Client]:
    """The clients of a seed; prompts of a seed share beginnings, some are longer than others by a few tokens only."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE) for _ in range(count)]

    beginning = tokens(150)
    repeated = tokens(4)
    clients = []
    for number in range(rng.randrange(4, 8)):
        prompt = beginning[: rng.choice([0, 0, 31, 32, 33, 64, 100, 150])] + tokens(rng.randrange(1, 70))
        if rng.random() < 0.4:
            prompt += repeated * rng.randrange(1, 8)  # something for a drafter to find
        arrives = rng.randrange(0, 60)
        goes = arrives + rng.randrange(1, 80) if rng.random() < 0.2 else None
        clients.append(Client(f"{seed}.{number}", tuple(prompt), arrives, goes, rng.randrange(3)))
    return clients


def serve(llm: Any, clients: Sequence[Client], *, with_priorities: bool = False) -> dict[str, list[int]]:
    """Outputs of all who stayed, by request id."""
    engine = llm.llm_engine
    waiting = sorted(clients, key=lambda client: client.arrives)
    leaving = [client for client in clients if client.goes is not None]
    outputs: dict[str, list[int]] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0].arrives <= step:
            client = waiting.pop(0)
            priority = client.priority if with_priorities else 0
            prompt = {"prompt_token_ids": list(client.prompt)}
            engine.add_request(client.request_id, prompt, sampling(MAX_TOKENS), priority=priority)
        for client in [client for client in leaving if client.goes == step]:
            engine.abort_request([client.request_id])
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason == "length":
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    return outputs


def expected_outputs(model: Path, seeds: Sequence[int]) -> dict[str, list[int]]:
    """What every client of these seeds is told by an engine without a connector and with room for all."""
    with _engine(model, AMPLE, None, Configuration("reference")) as llm:
        return serve(llm, [attrs.evolve(client, goes=None) for seed in seeds for client in crowd(seed)])


def run(
    configuration: Configuration, model: Path, seeds: Sequence[int], expected: dict[str, list[int]], log_dir: Path
) -> tuple[ReadLog, Drafts]:
    """Serve the crowds of the seeds with the connector; returns the log after every check, and what was drafted.

    Raises:
        AssertionError: an output differs or is missing, or the log is not sound; the seed is in the message.
    """
    transfer = connector(
        log_dir,
        chunk_size=configuration.chunk_size,
        host_bytes=configuration.num_host_blocks * BLOCK_SIZE * 2 * 2 * 2 * 32 * 4,
        **configuration.connector,
    )
    with _engine(model, configuration.workload, transfer, configuration) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        log_path = scheduler.connector.scheduler_side.log.directory
        drafts = Drafts()
        drafts.watch(scheduler)
        for seed in seeds:
            # The second time, nobody goes and all come sooner; what the first time saved is in the host pool.
            for clients in (crowd(seed), _again(seed)):
                outputs = serve(llm, clients, with_priorities="scheduling_policy" in configuration.more)
                for client in clients:
                    output = outputs.get(client.request_id)
                    wanted = expected[client.request_id.removesuffix("+")]
                    right = output == wanted if client.goes is None else output in (None, wanted)
                    assert right, f"configuration {configuration.name}, seed {seed}: {client.request_id} said {output}"
        settle(llm)
    return read_sound_log(log_path), drafts


def _again(seed: int) -> list[Client]:
    return [
        attrs.evolve(client, request_id=client.request_id + "+", arrives=client.arrives // 4, goes=None)
        for client in crowd(seed)
    ]


@contextmanager
def _engine(
    model: Path, workload: Workload, transfer: dict[str, Any] | None, configuration: Configuration
) -> Iterator[Any]:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms.cpu import CpuPlatform

    switch_off = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def set_scheduling(platform: Any, vllm_config: Any) -> None:
        switch_off(platform, vllm_config)  # on CPU vLLM never schedules asynchronously, because it gains nothing there
        vllm_config.scheduler_config.async_scheduling = configuration.async_scheduling

    no_numba = "numba" not in sys.modules
    if no_numba:
        sys.modules["numba"] = _numba_that_compiles_nothing()
    with mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(set_scheduling)):
        llm = start(str(model), workload, transfer, **configuration.more)
    if no_numba:
        del sys.modules["numba"]
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def _numba_that_compiles_nothing() -> types.ModuleType:
    """For vLLM's n-gram drafter: the real one, once it is imported, keeps any engine from starting on CPU."""

    def decorate(*functions: Any, **_options: Any) -> Any:
        return functions[0] if functions and callable(functions[0]) else decorate

    module = types.ModuleType("numba")
    vars(module).update(
        jit=decorate, njit=decorate, prange=range, get_num_threads=lambda: 1, set_num_threads=lambda _count: None
    )
    return module


def main() -> int:
    """Exit code 0 where every configuration served its seeds, 1 where one did not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many crowds, over all configurations")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--configuration", choices=[each.name for each in CONFIGURATIONS], help="only this one")
    arguments = parser.parse_args()
    chosen = [each for each in CONFIGURATIONS if arguments.configuration in (None, each.name)]
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    num_failed = 0
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "tiny-llama"
        make_model(model)
        expected = expected_outputs(model, seeds)
        for number, configuration in enumerate(chosen):
            own = seeds[number :: len(chosen)]
            if not own:
                continue
            try:
                log, drafts = run(configuration, model, own, expected, Path(directory) / "logs" / configuration.name)
            except AssertionError as error:
                num_failed += 1
                print(f"{configuration.name}: {error}")
                continue
            figures = log.figures
            print(
                f"{configuration.name}: {len(own)} seeds from {own[0]}, {figures.num_requests} requests, "
                f"{figures.num_preemptions} preemptions, {figures.num_tokens_recovered} tokens recovered, "
                f"{figures.num_tokens_recomputed} recomputed, {drafts.num_accepted} drafts accepted, "
                f"{drafts.num_rejected} rejected, {len(log.events)} events",
                flush=True,
            )
    served = len(chosen) - num_failed
    print(f"{served} of {len(chosen)} configurations served everybody (seeds {seeds[0]} to {seeds[-1]})")
    return 1 if num_failed else 0


if __name__ == "__main__":
    for name, value in {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    sys.exit(main())
