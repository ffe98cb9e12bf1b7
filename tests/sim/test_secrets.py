"""No token ids, no prompts, no salts in a log: everything that an engine wrote is searched for them."""

from __future__ import annotations

import base64
import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.lab.simulation.hashed_model import BLOCK_SIZE, block_bytes
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

SALT = "tenant-7f3a/secret salt"
FIRST_TOKEN = 987_650_000
"""Tokens that are no number of anything else: no count, no block, no time."""
SEQUENCE_LENGTH = 3


def prompt(number: int) -> list[int]:
    """A prompt of its own, behind a beginning that all share."""
    shared = [FIRST_TOKEN + 7 * place for place in range(2 * BLOCK_SIZE)]
    return shared + [FIRST_TOKEN + 10_000 * (number + 1) + 13 * place for place in range(BLOCK_SIZE + 5)]


def encodings(tokens: Sequence[int]) -> Iterator[bytes]:
    """Every way in which a run of token ids could get into a file."""
    for byte_order, kind in itertools.product("<>", "IQ"):
        yield struct.pack(f"{byte_order}{len(tokens)}{kind}", *tokens)
    packed = b"".join(msgspec.msgpack.encode(token) for token in tokens)
    yield packed
    text = json.dumps(list(tokens))
    for shown in (text, text.replace(" ", ""), " ".join(map(str, tokens))):
        yield shown.strip("[]").encode()


@pytest.fixture(scope="module", params=["sync", "async"])
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs of an engine with preemptions, salts, a reset, an abort, and hooks that fail and quote what they got."""
    log_dir: Path = tmp_path_factory.mktemp("logs")
    modes = {"load_mode": request.param, "save_mode": request.param}
    engine = SimulatedEngine(
        num_blocks=14, chunk_size=BLOCK_SIZE, host_bytes=block_bytes(BLOCK_SIZE) * 64, log_dir=str(log_dir), **modes
    )
    side: Any = engine.connector.scheduler_side
    for number in range(6):
        engine.add(f"request-{number}", prompt(number), 40, cache_salt=SALT if number % 2 else None)
    observe, failures = side.journal.observe, iter(range(3))

    def quoting(event: e.Event) -> Any:
        if isinstance(event, e.RequestFinished | e.BlocksAllocated) and next(failures, None) is not None:
            message = f"cannot take up {engine.scheduler.requests!r} with {prompt(0)} and salt {SALT}"
            raise ValueError(message)
        return observe(event)

    side.journal.observe = quoting
    for _ in range(20):
        engine.step()
    engine.abort("request-5")
    engine.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
    engine.run()
    assert engine.num_preemptions > 0
    engine.shutdown()
    return log_dir


def test_no_file_holds_a_run_of_token_ids_or_a_salt(served: Path) -> None:
    """In no width, order or spelling; nor the salt in hexadecimal or base 64."""
    contents = b"".join(file.read_bytes() for file in served.rglob("*") if file.is_file())
    assert len(contents) > 10_000
    for number in range(6):
        tokens = prompt(number)
        for start in range(len(tokens) - SEQUENCE_LENGTH + 1):
            for encoded in encodings(tokens[start : start + SEQUENCE_LENGTH]):
                assert encoded not in contents
    salt = SALT.encode()
    for spelled in (salt, salt.hex().encode(), base64.b64encode(salt).rstrip(b"="), SALT.encode("utf-16-le")):
        assert spelled not in contents


def test_no_field_of_any_event_is_a_token_id(served: Path) -> None:
    """Not one of them, alone or in a tuple; and no text quotes one."""
    secret = {token for number in range(6) for token in prompt(number)}
    num_failures = 0
    for directory in served.iterdir():
        for _, event in open_log(directory).events():
            num_failures += isinstance(event, e.HookFailed)
            for value in values_of(event):
                if isinstance(value, int):
                    assert value not in secret, event
                elif isinstance(value, str):
                    assert str(FIRST_TOKEN)[:5] not in value, event
    assert num_failures == 3, "the hooks that quote secrets were recorded"


def values_of(value: object) -> Iterator[object]:
    """All plain values in an event."""
    if isinstance(value, e.Event):
        for name in type(value).__match_args__:
            yield from values_of(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from values_of(item)
    else:
        yield value


def test_the_search_would_find_them() -> None:
    """A search that finds nothing proves something only if it finds what is there, however it is spelled."""
    tokens = prompt(0)[:SEQUENCE_LENGTH]
    leaks = [msgspec.msgpack.encode(prompt(0)), repr(prompt(0)).encode(), struct.pack(f"<{len(tokens)}I", *tokens)]
    for leak in leaks:
        assert any(spelled in leak for spelled in encodings(tokens))
    assert FIRST_TOKEN in values_of(e.StepScheduled(1, 1, (), (FIRST_TOKEN,), (), (), 0))
