"""Serves the first requests of a production trace through vLLM's real scheduler, with each connector.

The trace is in Mooncake's format: a JSON object on each line with `timestamp` (milliseconds), `input_length` and
`output_length` (tokens), and `hash_ids`, one for every 512 tokens of the prompt. Equal ids are equal tokens. Tokens
after the last whole 512 belong to one request alone.

A number of requests is served at a time, in the order of the trace; the next one arrives when one has ended, so the
timestamps do not matter. A request that the device cannot hold whole is skipped.

Connectors are measured one after the other. Their times are CPU time of the scheduler's thread.
Does not measure: copies, the model, the worker's side of the hooks.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import attrs
import msgspec
from benchmarks.figures import CannotMeasure, Cases, Figure, percentile_99, with_ratios
from benchmarks.hook_watch import HookWatch
from benchmarks.served import BLOCK_SIZE, NOBODY, Load, MakeTransfer, Server, Stepped, connectors, log_bytes
from rich.console import Console
from vllm.v1.request import Request

HASHED_TOKENS = 512
"""Tokens that one hash id stands for."""
NUM_REQUESTS = 2500
"""Requests of the trace that are served if nothing else is asked for."""
_FORMAT = "Mooncake's format has one JSON object a line, as docs/benchmarks.md shows"
_FIRST_OWN_TOKEN = 1 << 40
"""Token ids from here on are of one request alone."""
_progress = Console(stderr=True, highlight=False)


@attrs.frozen
class Sizes:
    """How large the server is, in requests at a time and in blocks or pages of 16 tokens."""

    num_at_a_time: int = 64
    device_blocks: int = 9_000
    host_pages: int = 150_000


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: float
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]

    def __post_init__(self) -> None:
        num_expected = -(-self.input_length // HASHED_TOKENS)
        if len(self.hash_ids) != num_expected:
            message = f"`hash_ids` has {len(self.hash_ids)} entries, {self.input_length} tokens need {num_expected}"
            raise ValueError(message)

    def prompt_token_ids(self, number: int) -> list[int]:
        """The prompt of the request with this number."""
        num_whole, num_own = divmod(self.input_length, HASHED_TOKENS)
        starts = [hash_id * HASHED_TOKENS for hash_id in self.hash_ids[:num_whole]]
        first_own = _FIRST_OWN_TOKEN + number * HASHED_TOKENS
        return [
            *itertools.chain(*(range(s, s + HASHED_TOKENS) for s in starts)),
            *range(first_own, first_own + num_own),
        ]

    @property
    def num_blocks(self) -> int:
        """Blocks that it has in the end."""
        return -(-(self.input_length + self.output_length) // BLOCK_SIZE)


def read_trace(path: Path, num_requests: int) -> list[TraceRequest]:
    """The first requests of a trace.

    Raises:
        CannotMeasure: the file cannot be read, or a line is not of the format.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    requests = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(itertools.islice(lines, num_requests), 1):
                try:
                    requests.append(decoder.decode(line))
                except msgspec.DecodeError as error:
                    message = f"{path}, line {number}: {error}; correct or delete the line: {_FORMAT}"
                    raise CannotMeasure(message) from None
    except OSError as error:
        raise CannotMeasure(f"{path}: {error.strerror}; name a file with a trace that can be read") from None
    if not requests:
        raise CannotMeasure(f"{path}: no request is in it; {_FORMAT}")
    return requests


class _TraceServer(Server):
    """Serves the requests of a trace until the last one has ended."""

    def __init__(self, requests: Sequence[TraceRequest], sizes: Sizes, kv_transfer: Mapping[str, Any] | None) -> None:
        load = Load(
            num_requests=sizes.num_at_a_time,
            num_prompt_tokens=(1, max(request.input_length for request in requests)),
            num_output_tokens=(1, max(request.output_length for request in requests)),
            num_blocks=sizes.device_blocks,
        )
        super().__init__(load, kv_transfer, num_steps=0)
        self._num_at_a_time = sizes.num_at_a_time
        self._coming: Iterator[TraceRequest] = iter(requests)
        self.num_computed_tokens = self.num_loaded_tokens = self.num_hit_tokens = 0
        """Computed; loaded by the connector; hit in vLLM's own prefix cache. Again after each preemption."""

    def serve(self, name: str, num_requests: int) -> None:
        """Serve them all, and say on stderr how far it is."""
        told = 0
        while self.num_arrived < num_requests or self.scheduler.requests:
            self.step()
            num_ended = self.num_arrived - len(self.scheduler.requests)
            if num_ended * 10 // num_requests > told:
                told = num_ended * 10 // num_requests
                _progress.print(f"  {name}: {num_ended:,} of {num_requests:,} requests have ended")

    def step(self) -> Stepped:
        """Count the tokens of a step as well."""
        stepped = super().step()
        scheduled = stepped.scheduled
        self.num_computed_tokens += scheduled.total_num_scheduled_tokens
        cached = scheduled.scheduled_cached_reqs
        had = [request.num_computed_tokens for request in scheduled.scheduled_new_reqs]
        had += [
            num_computed_tokens
            for request_id, num_computed_tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if request_id in cached.resumed_req_ids
        ]
        self.num_hit_tokens += sum(had)
        for outputs in stepped.outputs.values():
            loads = outputs.scheduler_stats and outputs.scheduler_stats.connector_prefix_cache_stats
            if loads:
                num_loaded_tokens = loads.hits + loads.preempted_hits
                self.num_loaded_tokens += num_loaded_tokens
                self.num_hit_tokens -= num_loaded_tokens
        return stepped

    def _arrivals(self) -> list[Request]:
        num_free = self._num_at_a_time - len(self.scheduler.requests)
        return [
            self._new_request(request.prompt_token_ids(self.num_arrived), request.output_length)
            for request in itertools.islice(self._coming, num_free)
        ]


@attrs.frozen
class Served:
    """What serving a trace took with one connector."""

    num_requests: int
    num_computed_tokens: int
    """All but output tokens, which everybody computes once. After a preemption those are computed again, and count."""
    num_hit_tokens: int
    """In vLLM's own prefix cache."""
    num_loaded_tokens: int
    cpu_s: float
    step_ms: float
    """99th percentile."""
    hook_ms: float
    """The longest."""
    log_bytes: float
    """A step."""
    num_preemptions: int


def serve(requests: Sequence[TraceRequest], sizes: Sizes) -> dict[str, Served]:
    """Connector → what serving these requests took with it. Those that the device cannot hold are skipped."""
    requests = fitting(requests, sizes)
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: serve_with(name, requests, sizes, Path(folder) / str(number), make)
            for number, (name, make) in enumerate(connectors(sizes.host_pages).items())
        }


def fitting(requests: Sequence[TraceRequest], sizes: Sizes) -> list[TraceRequest]:
    """Those that the device can hold.

    Raises:
        CannotMeasure: it can hold none.
    """
    # vLLM keeps one block for itself.
    found = [request for request in requests if request.num_blocks < sizes.device_blocks]
    _progress.print(f"  {len(requests) - len(found):,} of {len(requests):,} requests do not fit on the device: skipped")
    if not found:
        raise CannotMeasure(f"no request fits in the {sizes.device_blocks:,} blocks of the device; use another trace")
    return found


def serve_with(name: str, requests: Sequence[TraceRequest], sizes: Sizes, log_dir: Path, make: MakeTransfer) -> Served:
    """What serving these requests took with one connector; a log is left in the folder."""
    server = _TraceServer(requests, sizes, make(log_dir))
    hooks = HookWatch(server.scheduler.connector)
    gc.collect()
    gc.freeze()  # as EngineCore does
    server.serve(name, len(requests))
    gc.unfreeze()
    steps_ns = list(map(sum, zip(server.schedule_ns, server.update_ns, strict=True)))
    num_output_tokens = sum(request.output_length - 1 for request in requests)  # the last one is not computed
    served = Served(
        server.num_arrived,
        server.num_computed_tokens - num_output_tokens,
        server.num_hit_tokens,
        server.num_loaded_tokens,
        sum(steps_ns) / 1e9,
        percentile_99(steps_ns) / 1e6,
        hooks.longest_ns / 1e6,
        log_bytes(log_dir) / server.num_steps,
        server.num_preemptions,
    )
    server.scheduler.shutdown()
    return served


def _measure(trace: Path | None, num_requests: int) -> Sequence[Figure]:
    if trace is None:
        raise CannotMeasure("there is no trace; name a file in Mooncake's format: make bench TRACE=FILE")
    served = serve(read_trace(trace, num_requests), Sizes())

    def rounds(value: Callable[[Served], float]) -> dict[str, list[float]]:
        return {name: [value(each)] for name, each in served.items()}

    figures = []
    for name, each in served.items():
        figures += [
            Figure("tokens computed", name, each.num_computed_tokens, ""),
            Figure("hit in the prefix cache", name, each.num_hit_tokens, ""),
            Figure("loaded", name, each.num_loaded_tokens, ""),
        ]
    figures += with_ratios("scheduler CPU", "s", rounds(lambda each: each.cpu_s), anchor=NOBODY)
    figures += with_ratios("99th percentile of a step", "ms", rounds(lambda each: each.step_ms), anchor=NOBODY)
    for name, each in served.items():
        if name != NOBODY:
            figures.append(Figure("longest hook", name, each.hook_ms, "ms"))
        if each.log_bytes:
            figures.append(Figure("log a step", name, each.log_bytes, "B"))
        figures.append(Figure("preemptions", name, each.num_preemptions, ""))
    return figures


def cases(*, full: bool, trace: Path | None = None, num_requests: int = NUM_REQUESTS) -> Cases:
    """One; both forms are the same."""
    del full
    sizes = Sizes()
    return {
        f"the first {num_requests:,} requests, {sizes.num_at_a_time} at a time": partial(_measure, trace, num_requests)
    }
