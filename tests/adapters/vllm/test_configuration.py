"""What an operator may write, what is refused at start, and whether the message says how to go on."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvledger.adapters.lab.simulation.connectors import KVLEDGER_TRANSFER
from kvledger.adapters.lab.simulation.engine import kv_cache_config, vllm_config
from kvledger.adapters.lab.simulation.hashed_model import block_bytes
from kvledger.adapters.units import size, written_size
from kvledger.adapters.vllm import KVLedgerConnector
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.lifecycle import ConfigurationError
from kvledger.lifecycle import events as e
from kvledger.lifecycle.handlers import New
from kvledger.lifecycle.turn import Turn
from kvledger.storage.events import BacklogEventStore, Durability, read_log
from kvledger.storage.kv import most_memory

pytestmark = pytest.mark.scheduler


def configuration(extra_config: dict[str, Any] | None, block_size: int = 16) -> Any:
    """VLLM's configuration with this `kv_connector_extra_config`, which nobody has looked at yet; None: no such key."""
    made = vllm_config(num_blocks=20, block_size=block_size, kv_transfer=dict(KVLEDGER_TRANSFER))
    if extra_config is not None:
        made.kv_transfer_config.kv_connector_extra_config = extra_config
    return made


def start(extra_config: dict[str, Any] | None, block_size: int = 16, role: Any = KVConnectorRole.SCHEDULER) -> Any:
    """Build one side of the connector as vLLM does."""
    return KVLedgerConnector(configuration(extra_config, block_size), role, kv_cache_config(20, block_size))


def refusal(extra_config: dict[str, Any], block_size: int = 16) -> str:
    """The message with which a configuration is refused, on both sides alike."""
    messages = []
    for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
        with pytest.raises(ConfigurationError) as caught:
            start(extra_config, block_size, role)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_an_empty_configuration_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key at all: 64 tokens a chunk, an eighth of the machine's memory, a log in the working directory."""
    monkeypatch.chdir(tmp_path)
    for extra_config in ({}, None):
        connector = start(extra_config)
        side = connector.scheduler_side
        assert side.journal.configuration.chunk_size == 64
        assert side.journal.configuration.num_slots == most_memory() // 8 // 1024**2 * 1024**2 // block_bytes(16)
        assert side.log.directory.parent == tmp_path / "kvledger-logs"
        assert isinstance(side.log.store, BacklogEventStore)
        connector.shutdown()
    assert len(list((tmp_path / "kvledger-logs").iterdir())) == 2, "every start has a directory of its own"


@pytest.mark.parametrize("block_size", [48, 128])
def test_a_chunk_is_one_block_where_blocks_do_not_divide_64_tokens(block_size: int) -> None:
    """No chunk ends within a block unless somebody asks for it."""
    connector = start({"log_dir": None}, block_size=block_size)
    assert connector.scheduler_side.journal.configuration.chunk_size == block_size


def test_an_unknown_key_is_refused_with_the_known_ones() -> None:
    """A misspelt key must not be ignored in silence: the nearest one is named, or else all."""
    message = refusal({"log_dir": None, "chunksize": 16, "zebra": True, "kv_role": "kv_both"})
    _, misspelt, strange, misplaced = message.splitlines()
    assert misspelt.strip() == "chunksize: 16: unknown key; did you mean chunk_size?"
    assert strange.strip() == f"zebra: True: unknown key; use one of {', '.join(ConnectorSettings.model_fields)}"
    assert misplaced.strip().startswith(
        "kv_role: 'kv_both': is a key of vLLM; move it out of kv_connector_extra_config, next"
    )


def test_a_size_of_logs_that_is_too_small_for_a_reader_is_refused_also_where_it_is_the_default() -> None:
    """Larger segments need a larger limit."""
    assert "max_log_bytes: 17179869184: is too small: a log needs 3 segments of 17GiB to be readable" in refusal(
        {"segment_bytes": "17GiB"}
    )


@pytest.mark.parametrize(("num_engines", "is_one_machine"), [(1, True), (2, True), (1, False)])
def test_the_default_of_host_bytes_follows_the_machine(num_engines: int, is_one_machine: bool) -> None:
    """An eighth, shared by engines; where machines may differ all ranks must count alike, so it is fixed."""
    settings = ConnectorSettings().filled_in(num_engines=num_engines, is_one_machine=is_one_machine)
    expected = (most_memory() or 0) / 8 / num_engines if is_one_machine else 4 * 1024**3
    assert abs(settings.host_bytes - expected) < 1024**2
    assert ConnectorSettings(host_bytes="1MiB").filled_in().host_bytes == 1024**2


def test_every_wrong_key_is_named_at_once() -> None:
    """So that it is corrected once, not once per start."""
    message = refusal({"chunk_size": -1, "durability": "maybe", "host_bytes": "much", "max_failed_loads": 0})
    for name, value in (
        ("chunk_size", "-1"),
        ("durability", "'maybe'"),
        ("host_bytes", "'much'"),
        ("max_failed_loads", "0"),
    ):
        (line,) = (line for line in message.splitlines() if line.strip().startswith(name))
        assert value in line


@pytest.mark.parametrize(("chunk_size", "block_size"), [(24, 16), (10, 16), (40, 32)])
def test_sizes_that_do_not_divide_are_refused(chunk_size: int, block_size: int) -> None:
    """Both figures and what to choose."""
    message = refusal({"log_dir": None, "chunk_size": chunk_size}, block_size)
    assert f"chunk_size: {chunk_size}: is neither a multiple nor a divisor of block_size {block_size}" in message
    assert f"a multiple or a divisor of {block_size}" in message


@pytest.mark.parametrize(
    ("chunk_size", "interval", "expected"),
    [(16, None, 256), (512, None, 512), (16, 0, 0), (16, 16, 16), (16, 1000, 1000)],
)
def test_how_many_tokens_are_saved_together(chunk_size: int, interval: int | None, expected: int) -> None:
    """As said, else 256 or a chunk."""
    settings = ConnectorSettings(chunk_size=chunk_size, save_interval_tokens=interval)
    ledger = settings.ledger_configuration(block_size=16, block_bytes=1024, num_ranks=1)
    assert ledger.save_interval_tokens == expected


def test_an_interval_of_less_than_a_chunk_is_refused_with_the_figures() -> None:
    """Nothing smaller than a chunk is saved, so it would not mean what it says."""
    message = refusal({"log_dir": None, "chunk_size": 64, "save_interval_tokens": 48})
    assert "save_interval_tokens: 48: is less than a chunk of 64 tokens" in message
    assert "write 0 to save each chunk" in message


def test_a_pool_that_cannot_hold_one_chunk_is_refused_with_the_figures() -> None:
    """Slots there are, slots needed, bytes of a block, and the remedy."""
    host_bytes = 15 * block_bytes(16)
    message = refusal({"log_dir": None, "chunk_size": 256, "host_bytes": host_bytes})
    assert "15 slots" in message
    assert "needs 16" in message
    assert message.startswith(f"host_bytes: '{written_size(host_bytes)}': ")
    assert f"of {size(block_bytes(16))}, one block of 16 tokens each" in message
    assert f'write "{written_size(16 * block_bytes(16))}" or more, or lower chunk_size' in message


def test_host_bytes_may_be_written_with_a_unit() -> None:
    """As people write them."""
    connector = start({"log_dir": None, "chunk_size": 16, "host_bytes": "1MiB"})
    assert connector.scheduler_side.journal.configuration.num_slots == 1024**2 // block_bytes(16)


def test_a_log_dir_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    """A file stands where the directory should be: named, with the remedy, before anything is served."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="name a writable directory, or null for no files") as caught:
        start({"log_dir": str(tmp_path / "file")})
    assert str(tmp_path / "file") in str(caught.value)
    with pytest.raises(ConfigurationError, match="log_dir"):
        start({"log_dir": "/proc/kvledger"})


@pytest.mark.parametrize("durability", list(Durability))
def test_durability_levels(tmp_path: Path, durability: Durability) -> None:
    """Each writes a log that is whole after the shutdown, and the header says what for."""
    connector = start({"log_dir": str(tmp_path), "durability": durability.value, "chunk_size": 16})
    connector.shutdown()
    (directory,) = tmp_path.iterdir()
    reader = read_log(directory)
    assert len(list(reader)) >= 1
    assert reader.damage == []
    assert reader.header["configuration"]["chunk_size"] == 16


def test_the_header_says_what_the_log_was_made_with(make_engine: Any) -> None:
    """Versions, fingerprints and sizes: what a reader needs years later."""
    engine = make_engine(num_blocks=20, chunk_size=16)
    header = engine.connector.scheduler_side.log.store.header
    assert header["configuration"] == attrs.asdict(engine.connector.scheduler_side.journal.configuration)
    for name in ("kvledger_version", "vllm_version", "table_fingerprint", "handler_fingerprint", "vocabulary"):
        assert header[name]
    json.dumps({name: value for name, value in header.items() if name != "vocabulary"})


class Shy(New):
    """A handler of a user: it never loads anything for new requests."""

    def lookup_requested(self, turn: Turn, event: Any) -> None:
        """Answer with nothing."""
        turn.decide(
            e.LookupAnswered(
                request_id=event.request_id,
                ordinal=turn.record.ordinal,
                generation=turn.record.generation,
                num_computed_tokens=event.num_computed_tokens,
                num_tokens=event.num_tokens,
                num_hit_tokens=0,
                num_external_tokens=0,
                is_async=False,
                miss_reason="missing",
                cause=turn.cause,
            )
        )


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user, with one handler and things that are none."""
    module = types.ModuleType("their_handlers")
    module.__dict__.update(Shy=Shy, NotAHandler=dict, number=3)
    monkeypatch.setitem(sys.modules, "their_handlers", module)
    return "their_handlers"


def test_a_handler_of_one_s_own(make_engine: Any, user_module: str) -> None:
    """Named as "module:Class" it takes the place of the one of its state, and the header tells."""
    engine = make_engine(
        replays=False, num_blocks=20, chunk_size=16, handlers=[f"{user_module}:Shy"], enable_prefix_caching=False
    )
    for request_id in ("writer", "reader"):
        engine.serve(request_id, range(64), 4)
    assert len(engine.projections.pool) == 4
    assert engine.logged(e.LoadIssued) == []
    assert {answer.miss_reason for answer in engine.logged(e.LookupAnswered)} == {"missing"}
    assert f"new={Shy.__module__}:Shy" in engine.connector.scheduler_side.log.store.header["handler_fingerprint"]
    engine.check_outputs()
    engine.check_replay(ConnectorSettings(handlers=(f"{user_module}:Shy",)).core())
    assert engine.replay().divergences, "without the handler today's code decides differently, and says so"


@pytest.mark.parametrize(
    "name", ["no_such_module:Class", "their_handlers:Missing", "their_handlers", "their_handlers:number"]
)
def test_a_handler_that_cannot_be_made_is_refused(user_module: str, name: str) -> None:
    """The name, the reason, and how to write it."""
    assert user_module == "their_handlers"
    with pytest.raises(ConfigurationError, match="'module:Class'") as caught:
        start({"log_dir": None, "handlers": [name]})
    assert repr(name) in str(caught.value)


def test_a_class_that_is_no_handler_is_refused(user_module: str) -> None:
    """It can be imported and made, but it handles nothing."""
    with pytest.raises(ConfigurationError, match=r"is not a kvledger\.lifecycle\.StateHandler"):
        start({"log_dir": None, "handlers": [f"{user_module}:NotAHandler"]})


@pytest.mark.parametrize("key", ["handlers", "extensions"])
@pytest.mark.parametrize(
    "makes", [lambda called: called.append, lambda called: type("Other", (), {"__init__": called.append})]
)
def test_nothing_is_called_that_is_no_class_of_the_kind(
    monkeypatch: pytest.MonkeyPatch, key: str, makes: Callable[[list[object]], object]
) -> None:
    """Incident: a name in `handlers` was called first and its result checked afterwards, so any function ran."""
    called: list[object] = []
    module = types.ModuleType("other_things")
    module.__dict__["thing"] = makes(called)
    monkeypatch.setitem(sys.modules, "other_things", module)
    with pytest.raises(ConfigurationError, match=rf"{key}: 'other_things:thing': is not a "):
        start({"log_dir": None, key: ["other_things:thing"]})
    assert called == []


@pytest.mark.parametrize(
    ("shape", "dimension"),
    [
        ((20, 2, 16, 64), 0),
        ((2, 20, 16, 2, 32), 1),
        ((40, 2, 8, 64), 0),
        ((2, 40, 8, 2, 32), 1),
        ((20480,), None),
        ((7, 5, 16), None),
    ],
)
def test_the_dimension_that_counts_blocks_is_found_or_left_open(shape: tuple[int, ...], dimension: int | None) -> None:
    """Blocks first, K and V apart, smaller kernel blocks; a flat buffer tells nothing and is left to be refused."""
    from kvledger.adapters.vllm.versions import block_dimension

    assert block_dimension(shape, 20) == dimension


@pytest.mark.parametrize(
    "setting", ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_parallelism_that_is_not_served_is_refused(setting: str) -> None:
    """Which setting, its value, and what to use instead."""
    settings = configuration({"log_dir": None})
    setattr(settings.parallel_config, setting, 2)
    with pytest.raises(ConfigurationError, match=f"{setting}: 2: ") as caught:
        KVLedgerConnector(settings, KVConnectorRole.SCHEDULER, kv_cache_config(20, 16))
    assert "tensor parallelism" in str(caught.value)


# --- asynchronous copies -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "what_may_stand_there"),
    [
        ("load_mode", "later", "'sync', 'async' or 'auto'"),
        ("load_mode", None, "'sync', 'async' or 'auto'"),
        ("save_mode", "never", "'sync', 'async' or 'auto'"),
        ("save_mode", True, "'sync', 'async' or 'auto'"),
        ("max_deferred_lookups", -1, "greater than or equal to 0"),
        ("max_deferred_lookups", "many", "valid integer"),
        ("max_failed_loads", 0, "greater than 0"),
        ("max_failed_loads", 1.5, "valid integer"),
        ("max_silent_ms", -5, "greater than or equal to 0"),
        ("max_silent_ms", "5s", "valid integer"),
        ("max_silent_ms", True, "valid integer"),
        ("load_mode", "asink", "did you mean 'async'?"),
        ("durability", "dsk", "must be 'os' or 'disk'; did you mean 'disk'?"),
        ("digests", "al", "must be 'off' or 'all', or a valid number; did you mean 'all'?"),
        ("host_bytes", -5, 'is not a size; write one such as "2GiB"'),
        ("host_bytes", "2 gigs", 'is not a size; write one such as "2GiB"'),
        ("host_bytes", True, 'is not a size; write one such as "2GiB"'),
        ("host_bytes", 0, "greater than 0"),
        ("log_dir", 3, "must be a path in quotes"),
        ("save_tails", "perhaps", "must be true or false"),
        ("handlers", "module:Class", "must be a list"),
    ],
)
def test_a_wrong_value_is_refused_with_what_may_stand_there(key: str, value: Any, what_may_stand_there: str) -> None:
    """Key, value and remedy in one line."""
    message = refusal({"log_dir": None} | {key: value})
    (line,) = (line for line in message.splitlines() if line.strip().startswith(f"{key}:"))
    assert what_may_stand_there in line
    assert repr(value) in line


@pytest.mark.parametrize(("key", "value"), [("max_deferred_lookups", 0), ("max_failed_loads", 1), ("max_silent_ms", 0)])
def test_the_least_values_serve(key: str, value: int) -> None:
    """Never wait, one failure is enough, silence is measured in steps alone."""
    connector = start({"log_dir": None, "chunk_size": 16, key: value})
    assert getattr(connector.scheduler_side.journal.configuration, key) == value
    connector.shutdown()


@pytest.mark.parametrize(
    ("load_mode", "needs_async_loads", "async_load_tokens"),
    [
        ("sync", False, None),
        ("sync", True, None),
        ("async", False, 0),
        ("async", True, 0),
        ("auto", False, 32 * 16),
        ("auto", True, 0),
    ],
)
def test_which_loads_are_asynchronous(load_mode: str, needs_async_loads: bool, async_load_tokens: int | None) -> None:
    """With auto those from 32 MiB a rank on, here 32 blocks of 1 MiB; all of them where only that is safe."""
    settings = ConnectorSettings(load_mode=load_mode)  # type: ignore[arg-type] -- as an operator writes it
    ledger = settings.ledger_configuration(
        block_size=16, block_bytes=1024**2, num_ranks=2, needs_async_loads=needs_async_loads
    )
    assert ledger.async_load_tokens == async_load_tokens


@pytest.mark.parametrize(
    ("save_mode", "supports_async_saves", "async_saves"),
    [
        ("sync", False, False),
        ("sync", True, False),
        ("async", False, True),
        ("async", True, True),
        ("auto", False, False),
        ("auto", True, True),
    ],
)
def test_which_saves_are_asynchronous(save_mode: str, supports_async_saves: bool, async_saves: bool) -> None:
    """With auto where the device copies without taking anything from the steps."""
    settings = ConnectorSettings(save_mode=save_mode)  # type: ignore[arg-type] -- as an operator writes it
    ledger = settings.ledger_configuration(
        block_size=16, block_bytes=1024, num_ranks=1, supports_async_saves=supports_async_saves
    )
    assert ledger.async_saves is async_saves


def test_a_worker_has_a_second_engine_only_where_something_is_asynchronous(make_engine: Any) -> None:
    """It costs a thread or two streams."""
    for modes, overlaps in ((("sync", "sync"), False), (("async", "sync"), True), (("sync", "async"), True)):
        engine = make_engine(num_blocks=8, chunk_size=16, load_mode=modes[0], save_mode=modes[1])
        assert (engine.worker._worker_side._async_engine is not None) is overlaps


@pytest.mark.parametrize(
    ("load_mode", "policy", "async_scheduling", "is_warned_of"),
    [
        ("sync", "recompute", True, True),
        ("sync", "recompute", False, False),
        ("sync", "fail", True, True),  # as a child of MultiConnector we are shown a policy that does not count
        ("auto", "recompute", True, False),
        ("async", "recompute", True, False),
    ],
)
def test_loads_that_are_not_safe_are_warned_of(
    make_engine: Any,
    caplog: pytest.LogCaptureFixture,
    load_mode: str,
    policy: str,
    async_scheduling: bool,
    is_warned_of: bool,
) -> None:
    """Where vLLM would deliver a token that was computed on top of a failed load; the warning names the remedies."""
    make_engine(
        num_blocks=8,
        chunk_size=16,
        load_mode=load_mode,
        async_scheduling=async_scheduling,
        kv_transfer={"kv_load_failure_policy": policy},
    )
    ours = (record for record in caplog.records if record.name == "vllm.kvledger")
    warnings = [record.getMessage() for record in ours if record.levelname == "WARNING"]
    assert bool(warnings) is is_warned_of
    assert all("load_mode" in warning and "kv_load_failure_policy" in warning for warning in warnings)


def test_where_new_blocks_are_zeroed_no_save_is_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM zeroes what a preempted request lost before the step could wait for the copies: zeros would be saved."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvledger.adapters.vllm.versions import supports_async_saves

    on_cuda: Any = types.SimpleNamespace(device_config=types.SimpleNamespace(device_type="cuda"))
    assert supports_async_saves(on_cuda, kv_cache_config(20, 16))
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
    assert not supports_async_saves(on_cuda, kv_cache_config(20, 16))
    assert "write 'sync' or 'auto'" in refusal({"log_dir": None, "save_mode": "async"})
    start({"log_dir": None, "chunk_size": 16, "save_mode": "auto", "load_mode": "async"}).shutdown()


# --- host_bytes and the memory there is --------------------------------------------------------------


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that has 1000 MiB left; whoever allocates a pool on it fails the test."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {1000 * 1024} kB\n")
    monkeypatch.setattr("kvledger.storage.kv.host_memory.ROOT", tmp_path)
    monkeypatch.setattr("torch.zeros", lambda *_arguments, **_options: pytest.fail("memory was allocated"))


@pytest.mark.usefixtures("small_machine")
def test_more_than_the_machine_has_is_refused_before_a_page_is_touched(caplog: pytest.LogCaptureFixture) -> None:
    """What is asked for, what there is, what limits it, and what to write instead; what is written then serves.

    A server's output has it as a message, too: vLLM's tracebacks of several processes follow.
    """
    with pytest.raises(ConfigurationError) as caught:
        start({"log_dir": None, "host_bytes": "951MiB"}, role=KVConnectorRole.WORKER)
    message = str(caught.value)
    for told in (
        "host_bytes: '951MiB': asks for 951.0 MiB, but 1000.0 MiB is available",
        "(MemAvailable in /proc/meminfo is 1024000 kB)",
        "of which 50.0 MiB is reserved for the engine",
        'write "950MiB" or less',
    ):
        assert told in message
    (said,) = (record.getMessage() for record in caplog.records if record.name == "vllm.kvledger")
    assert said.startswith(f"kvledger: {message}\n")
    start({"log_dir": None, "host_bytes": "950MiB"}, role=KVConnectorRole.WORKER)


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(
    ("backend", "num_nodes", "most"), [("mp", 1, "950MiB"), ("mp", 2, "1900MiB"), ("ray", 1, "3800MiB")]
)
def test_all_ranks_of_a_machine_are_counted_together(backend: str, num_nodes: int, most: str) -> None:
    """They start at once, and each would find enough for itself. Of ranks that Ray places each speaks for itself."""
    settings = configuration({"log_dir": None, "host_bytes": "5000MiB"})
    settings.parallel_config.world_size = 4
    settings.parallel_config.distributed_executor_backend = backend
    settings.parallel_config.nnodes = num_nodes
    with pytest.raises(ConfigurationError, match=f'write "{most}" or less'):
        KVLedgerConnector(settings, KVConnectorRole.WORKER, kv_cache_config(20, 16))


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pool_that_all_ranks_share_is_counted_once(rank: int) -> None:
    """By the first, which makes it: when another one looks, it may have been taken already."""
    settings = configuration({"log_dir": None, "host_bytes": "951MiB"})
    settings.parallel_config.world_size = 4
    settings.parallel_config.rank = rank
    settings.parallel_config.distributed_executor_backend = "mp"
    same_on_all = kv_cache_config(20, 16)
    same_on_all.kv_tp_replicas = 4
    refused = pytest.raises(ConfigurationError, match=r'asks for 951.0 MiB, but.* write "950MiB" or less')
    with refused if rank == 0 else contextlib.nullcontext():
        KVLedgerConnector(settings, KVConnectorRole.WORKER, same_on_all)


@pytest.mark.usefixtures("small_machine")
def test_the_scheduler_side_does_not_ask_for_memory() -> None:
    """It is made after the workers have taken theirs."""
    start({"log_dir": None, "chunk_size": 16}, role=KVConnectorRole.SCHEDULER).shutdown()


def test_where_the_memory_is_not_known_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And that is said."""
    monkeypatch.setattr("kvledger.storage.kv.host_memory.ROOT", tmp_path)
    with caplog.at_level("INFO", "vllm.kvledger"):
        start({"log_dir": None, "host_bytes": "1TiB"}, role=KVConnectorRole.WORKER)
    assert "the available memory is unknown" in caplog.text


def test_this_machine_has_no_tebibyte() -> None:
    """The real files of a real machine."""
    with pytest.raises(ConfigurationError, match="host_bytes: '1TiB': asks for"):
        start({"log_dir": None, "host_bytes": "1TiB"}, role=KVConnectorRole.WORKER)
