"""A chunk key that is made from the wrong hash is named: the log has the beginning of the right one, read apart."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvledger.adapters.lab.simulation.hashed_model import CorruptKV
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.chunk_keys import ChunkKeySource
from kvledger.adapters.vllm.observe import KeyChecks
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

CHUNK_SIZES = pytest.mark.parametrize("chunk_size", [8, 16, 32])


def broken(capsys: pytest.CaptureFixture[str], log_dir: Path) -> dict[str, int]:
    """Rule → how often `verify` finds it broken."""
    (log,) = log_dir.iterdir()
    capsys.readouterr()
    main(["verify", str(log), "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (verdict,) = [each for each in found if each["type"] == "verdict"]
    return dict(verdict["num_violations"])


@pytest.mark.parametrize("chunk_size", [4, 16, 64])
def test_each_key_has_the_hash_of_its_last_whole_block(make_engine: Any, chunk_size: int) -> None:
    """Four bytes of it; zeros where no block has ended. Where chunks are blocks, the key is the hash."""
    engine = make_engine(num_blocks=30, chunk_size=chunk_size)
    request = engine.add("request", range(150), 4)
    engine.run()
    events = engine.logged(e.ChunkKeysObserved)
    found = list(itertools.chain.from_iterable(batched(event.hash_prefixes) for event in events))
    ends = range(chunk_size, chunk_size * (len(found) + 1), chunk_size)
    hashes = [bytes(4), *(bytes(each)[:4] for each in request.block_hashes)]
    assert found == [hashes[end // 16] for end in ends]
    are_hashes = chunk_size % 16 == 0
    assert {event.are_block_hashes for event in events} == {are_hashes}
    keys = [key for event in events for key in event.keys]
    assert all((key[:4] == prefix) is are_hashes for key, prefix in zip(keys, found, strict=True))


def batched(prefixes: bytes) -> list[bytes]:
    """One for each chunk."""
    return [prefixes[first : first + 4] for first in range(0, len(prefixes), 4)]


def test_a_request_whose_key_covers_more_than_the_hash_is_told_from_others(make_engine: Any) -> None:
    """With an adapter or embeddings the key must not be vLLM's hash alone."""
    engine = make_engine(num_blocks=30, chunk_size=16)
    checks = KeyChecks(chunk_size=16, hash_block_size=16)
    plain = engine.add("plain", range(40), 4)
    assert checks.are_block_hashes(plain)
    assert not KeyChecks(chunk_size=8, hash_block_size=16).are_block_hashes(plain)
    for inputs in (
        {"lora_request": LoRARequest("adapter", 1, "/adapters/one")},
        {"prompt_embeds": torch.zeros(40, 2)},
        {"prompt_is_token_ids": [True] * 40},
    ):
        other = Request("other", list(range(40)), SamplingParams(max_tokens=4), None, **inputs)
        assert not checks.are_block_hashes(other)
        assert versions.has_unhashed_inputs(other)


def test_a_key_that_leaves_out_the_adapter_breaks_a_rule(
    make_engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two adapters with the same name and path would share KV."""
    monkeypatch.setattr(versions, "has_unhashed_inputs", lambda _request: False)
    engine = make_engine(num_blocks=30, chunk_size=16, log_dir=str(tmp_path), replays=False)
    request = engine.add("request", range(40), 4)
    request.lora_request = LoRARequest("adapter", 1, "/adapters/one")
    engine.connector.get_num_new_matched_tokens(request, 0)
    request.lora_request = None
    engine.run()
    engine.shutdown()
    assert "KEY_IDENTITY" in broken(capsys, tmp_path)


def converse(engine: Any) -> None:
    """Two turns of a session, and a reader of the first; its last token, which the second drops, ends a chunk."""
    engine.serve("session", range(88), 8, resumable=True)
    said = [*range(88), *engine.outputs["session"]]
    source = engine.connector.scheduler_side.request_reader._keys
    source.keys(engine.scheduler.requests["session"], 0, None)  # for who remembers them
    engine.add("session", range(300, 340), 4, resumable=True)
    with contextlib.suppress(CorruptKV):
        engine.run()
    engine.abort("session")
    with contextlib.suppress(CorruptKV):
        engine.run()
        engine.serve("reader", said, 1)
    del engine.outputs["session"]


def kept_from_before(source: ChunkKeySource) -> Callable[..., tuple[bytes, ...]]:
    """Keys that are remembered by request and chunk, and never made again."""
    original = source.keys
    known: dict[tuple[str, int], bytes] = {}

    def keys(request: Any, first_chunk: int, parent: bytes | None) -> tuple[bytes, ...]:
        made = original(request, first_chunk, parent)
        return tuple(known.setdefault((request.request_id, chunk), key) for chunk, key in enumerate(made, first_chunk))

    return keys


@CHUNK_SIZES
def test_keys_from_before_a_sessions_next_turn_break_a_rule(
    make_engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], chunk_size: int
) -> None:
    """The dropped token's chunk keeps its key, although other tokens are in it now."""
    engine = make_engine(num_blocks=40, chunk_size=chunk_size, log_dir=str(tmp_path), replays=False)
    source = engine.connector.scheduler_side.request_reader._keys
    source.keys = kept_from_before(source)
    converse(engine)
    engine.shutdown()
    assert "KEY_IDENTITY" in broken(capsys, tmp_path)


@CHUNK_SIZES
def test_keys_of_an_ended_request_with_the_same_id_break_a_rule(
    make_engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], chunk_size: int
) -> None:
    """A resumed or repeated request is given those of its life before."""
    engine = make_engine(num_blocks=40, chunk_size=chunk_size, log_dir=str(tmp_path), replays=False)
    source = engine.connector.scheduler_side.request_reader._keys
    source.keys = kept_from_before(source)
    engine.serve("request", range(60), 4)
    with contextlib.suppress(CorruptKV):  # and it would be computed
        engine.serve("request", range(500, 560), 4)
    engine.shutdown()
    assert "KEY_IDENTITY" in broken(capsys, tmp_path)


@CHUNK_SIZES
def test_without_a_mistake_nothing_is_broken(
    make_engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], chunk_size: int
) -> None:
    """The measure for the others."""
    engine = make_engine(num_blocks=40, chunk_size=chunk_size, log_dir=str(tmp_path), replays=False)
    converse(engine)
    engine.serve("request", range(60), 4)
    engine.serve("request again", range(500, 560), 4)
    engine.shutdown()
    assert broken(capsys, tmp_path) == {}
