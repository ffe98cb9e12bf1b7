"""A connector that gives a request what was saved under another request's keys is named.

vllm#53495, vllm#44250 and LMCache#2961: keys of token ids alone, so that one LoRA adapter, or one tenant's cache salt,
is offered what another one stored. The log of the recorded connector was called sound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.connectors import Example, Recorded, Several
from sim.lmcache_mp import LMCacheMP
from sim.recorded import audited
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvledger.adapters.lab.simulation.connectors import ConnectorSetup, Offloading, SimpleCPU

pytestmark = pytest.mark.scheduler

Record = Callable[..., tuple[Any, Any]]
HOOKS = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "request_finished_all_groups")
APART: dict[str, dict[str, Any]] = {
    "adapter": {"lora": "law"},
    "salt": {"salt": "a tenant's"},
    "both": {"lora": "poems", "salt": "another tenant's"},
}


def add(engine: Any, request_id: str, *, lora: str = "", salt: str | None = None, num_tokens: int = 100) -> Request:
    """Queue a request with the same tokens, and with what sets it apart."""
    adapter = LoRARequest(lora, len(lora), f"/{lora}") if lora else None
    request = Request(
        request_id=request_id,
        prompt_token_ids=list(range(num_tokens)),
        sampling_params=SamplingParams(max_tokens=2, ignore_eos=True, temperature=0),
        pooling_params=None,
        cache_salt=salt,
        lora_request=adapter,
        block_hasher=engine._block_hasher,
    )
    engine.scheduler.add_request(request)
    engine.outputs.setdefault(request_id, [])
    return request


def serve(engine: Any, request_id: str, **apart: Any) -> Request:
    """From its arrival to its end."""
    request = add(engine, request_id, **apart)
    engine.run()
    return request


class SeenAs:
    """A request that has the block hashes of another one."""

    def __init__(self, request: Request, other: Request) -> None:
        self._request = request
        self.block_hashes = other.block_hashes[: len(request.block_hashes)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def mistake_all_for(engine: Any, other: Request) -> None:
    """From now on, the recorded connector takes every request for one with the hashes of this one."""
    connector = engine.scheduler.connector.wrapped
    seen: dict[str, SeenAs] = {}

    def mistake(hook: str) -> None:
        call = getattr(connector, hook)

        def called(request: Request, *arguments: Any) -> Any:
            return call(seen.setdefault(request.request_id, SeenAs(request, other)), *arguments)

        setattr(connector, hook, called)

    for hook in HOOKS:
        mistake(hook)


def named(recording: Any) -> list[tuple[str, str, str]]:
    """Rule, request and what is said of it."""
    return [(each.rule, each.request_id, each.detail) for each in audited(recording).violations]


@pytest.mark.parametrize("apart", APART)
def test_bytes_that_another_request_saved_under_its_keys_are_named(record: Record, apart: str) -> None:
    """ExampleConnector names its files after token ids and media alone; with digests the log shows whose bytes came."""
    setup = Recorded(inner=Example(), name="KVLedgerRecorder")
    engine, recording = record(setup=setup, digests="all", enable_prefix_caching=False)
    serve(engine, "first")
    serve(engine, "second", **APART[apart])
    ((rule, request_id, detail),) = named(recording)
    assert (rule, request_id) == ("SAVED_UNDER_KEY", "second")
    assert "with the bytes that 'first' saved under another key" in detail


CONNECTORS: dict[str, tuple[Callable[[], ConnectorSetup], dict[str, Any]]] = {
    "offloading": (Offloading, {}),
    "offloading-late": (lambda: Offloading(num_questions=3), {"async_scheduling": True}),
    "simple": (SimpleCPU, {}),
    "simple-late": (lambda: SimpleCPU(num_questions=3), {"async_scheduling": True}),
    "simple-lazy": (lambda: SimpleCPU(is_lazy=True), {"num_blocks": 12}),
}


@pytest.mark.parametrize("digests", ["all", "off"])
@pytest.mark.parametrize("name", CONNECTORS)
def test_a_hit_of_keys_that_nobody_has_saved_is_named(record: Record, name: str, digests: str) -> None:
    """The connector's store was empty when the engine started, so that it can have nothing of these keys."""
    make, options = CONNECTORS[name]
    engine, recording = record(make(), digests=digests, **options)
    first = serve(engine, "first", lora="law")
    serve(engine, "between", salt="something else", num_tokens=150)
    serve(engine, "again", lora="law")
    assert named(recording) == []
    mistake_all_for(engine, first)
    serve(engine, "second", lora="poems")
    found = named(recording)
    assert found
    assert {(rule, request_id) for rule, request_id, _ in found} == {("SAVED_UNDER_KEY", "second")}


@pytest.mark.parametrize("is_mistaken", [False, True])
def test_a_child_of_multi_connector_is_named_too(record: Record, is_mistaken: bool) -> None:
    """With digests, whichever child it is."""
    engine, recording = record(Several(children=(Offloading(), SimpleCPU())), digests="all")
    first = serve(engine, "first", lora="law")
    engine.scheduler.reset_prefix_cache()
    if is_mistaken:
        mistake_all_for(engine, first)
    serve(engine, "second", lora="poems")
    found = {(rule, request_id) for rule, request_id, _ in named(recording)}
    assert found == ({("SAVED_UNDER_KEY", "second")} if is_mistaken else set())


@pytest.mark.parametrize("digests", ["all", "off"])
@pytest.mark.parametrize("name", [*CONNECTORS, "example", "lmcache"])
def test_requests_that_are_kept_apart_are_sound(record: Record, name: str, digests: str) -> None:
    """Salts come again and prompts grow, in a small pool; no request is given another one's KV."""
    makers = {**CONNECTORS, "example": (Example, {}), "lmcache": (lambda: LMCacheMP(chunk_size=16), {})}
    make, options = makers[name]
    recorder = "KVLedgerRecorderHMA" if name in CONNECTORS else "KVLedgerRecorder"
    options = {"num_blocks": 20, **options, "enable_prefix_caching": name != "example"}
    engine, recording = record(setup=Recorded(inner=make(), name=recorder), digests=digests, **options)
    for number in range(9):
        salt = f"salt {number % 3}" if name != "example" else None
        engine.add(f"r{number}", range(100 if name == "example" else 40 + 10 * number), 20, cache_salt=salt)
        if number % 3 == 2:
            engine.run(2000)
    engine.run(2000)
    assert [found for found in named(recording) if found[0] == "SAVED_UNDER_KEY"] == []
