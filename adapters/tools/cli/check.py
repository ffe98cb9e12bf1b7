"""`kvledger check`: report what a configuration would do, before an engine starts.

The command runs the connector's own checks. These need vLLM, which is imported only when the command runs. The command
loads no weights, allocates nothing, and leaves nothing on disk.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
from cyclopts import Parameter

from kvledger.adapters.tools.cli.options import positive, value
from kvledger.adapters.tools.cli.output import Output, Written
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.units import plural, size
from kvledger.adapters.vllm_plugin import CONNECTORS, register
from kvledger.lifecycle import ConfigurationError, Hidden, Refusal, raise_if_unstoppable
from kvledger.storage.extras import CONNECTOR, require

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

    from kvledger.adapters.vllm.configuration import ConnectorSettings
    from kvledger.adapters.vllm.log_settings import LogSettings
    from kvledger.adapters.vllm.plan import Plan

_OURS = "KVLedgerConnector"
_PATH = re.compile(r"[^\s{}\[\]\"':@]{1,255}")
"""Text that looks like a file name. Messages quote only such text, because other text can contain passwords."""


_AS_VLLM = "give the same value as on the command line of your vLLM server"
_ONLY_1 = "give the same value as on the command line of your vLLM server; kvledger supports only 1"


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Server:
    """Options of the vLLM server that influence what the checked configuration does."""

    model: Annotated[
        Path | None, Parameter(metavar="DIR", help="directory of a model; only the model's config.json is read")
    ] = None
    block_size: Annotated[int | None, value(positive, "N", help=_AS_VLLM)] = None
    tensor_parallel_size: Annotated[
        int, value(positive, "N", alias="-tp", help="give the same value as on the command line of your vLLM server")
    ] = 1
    data_parallel_size: Annotated[
        int, value(positive, "N", alias="-dp", help="give the same value as on the command line of your vLLM server")
    ] = 1
    pipeline_parallel_size: Annotated[int, value(positive, "N", alias="-pp", help=_ONLY_1)] = 1
    decode_context_parallel_size: Annotated[int, value(positive, "N", alias="-dcp", help=_ONLY_1)] = 1
    prefill_context_parallel_size: Annotated[int, value(positive, "N", alias="-pcp", help=_ONLY_1)] = 1
    dtype: Annotated[str | None, Parameter(metavar="NAME", help=f"{_AS_VLLM}, such as bfloat16")] = None
    kv_cache_dtype: Annotated[str | None, Parameter(metavar="NAME", help=f"{_AS_VLLM}, such as fp8")] = None
    enforce_eager: Annotated[
        bool, Parameter(help="give this option if the command line of your vLLM server has it")
    ] = False
    prefix_caching_hash_algo: Annotated[
        Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] | None, Parameter(help=f"{_AS_VLLM}; default: sha256")
    ] = None


def run(
    configuration: Annotated[
        str | None,
        Parameter(
            metavar="JSON",
            help="the JSON object of --kv-transfer-config, or only its kv_connector_extra_config. Give the JSON itself "
            "or the path of a file that contains the JSON",
        ),
    ] = None,
    *,
    stdin: Annotated[bool, Parameter(name="-", help="read the JSON from stdin")] = False,
    server: Server = Server(),
    output: Written,
) -> ExitCode:
    """Report what each connector of kvledger in the configuration would do."""
    if stdin is (configuration is not None):
        raise CommandFailed("give the JSON in exactly one way: as text, as a file, or with - from stdin")
    transfer = _transfer(sys.stdin.read() if configuration is None else _text(configuration))
    if server.model is not None and not (server.model / "config.json").is_file():
        raise CommandFailed(f"{server.model} has no config.json; give the directory of a Hugging Face model")
    require("kvledger check", *CONNECTOR)
    register()  # a recorder may name a connector of kvledger without its module
    logging.disable(logging.CRITICAL)  # vLLM's own messages would hide the result
    try:
        for part in _parts(transfer):
            _check(part, transfer, server, output)
    except ConfigurationError as error:
        for refusal in error.refusals:
            _show_refusal(refusal, output)
        return ExitCode.REFUSED
    finally:
        logging.disable(logging.NOTSET)
    return ExitCode.SOUND


def _show_refusal(refusal: Refusal, output: Output) -> None:
    if output.is_json:
        output.record("refused", attrs.asdict(refusal))
    else:
        output.field("refused", str(refusal), "red")


def _text(given: str) -> str:
    if given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or "not a text file"
        shown = repr(given) if _PATH.fullmatch(given) else Hidden.of(given)
        raise CommandFailed(
            f"{shown} is neither a JSON object nor a readable file ({reason}); give a JSON object, or a file that "
            "contains one"
        ) from error


def _transfer(text: str) -> dict[str, Any]:
    """Parse the text, and return the JSON object of `--kv-transfer-config`.

    If the text has only the `kv_connector_extra_config`, build the object around it.

    Raises:
        CommandFailed: the text is not a JSON object.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"not valid JSON ({error}); in a shell, put the JSON in single quotes (')") from error
    if not isinstance(given, dict):
        raise CommandFailed(f"expected a JSON object, got {type(given).__name__}")
    if any(key.startswith("kv_") and key != "kv_cache_layout" for key in given):
        return given
    name = "KVLedgerRecorder" if "connector" in given else _OURS
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": given}


def _parts(transfer: dict[str, Any]) -> list[KVTransferConfig]:
    """Return the configurations of all connectors of kvledger in `transfer`, including children of a `MultiConnector`.

    Connectors of other projects cannot be checked and are left out.

    Raises:
        CommandFailed: the configuration has no connector of kvledger.
    """
    from kvledger.adapters.vllm.transfer import accepted, connectors

    every = list(connectors(accepted(transfer)))
    ours = [each for each in every if each.kv_connector in CONNECTORS]
    if ours:
        return ours
    names = " and ".join(str(each.kv_connector) for each in every)
    raise CommandFailed(
        f"{names}: not provided by kvledger, so not checked; to record a connector, set kv_connector to "
        'KVLedgerRecorder and put the configuration of that connector under "connector" in kv_connector_extra_config'
    )


def _check(transfer: KVTransferConfig, whole: dict[str, Any], server: Server, output: Output) -> None:
    from kvledger.adapters.recorder.settings import accepted_recorder
    from kvledger.adapters.recorder.wrapped import wrapped_transfer
    from kvledger.adapters.vllm import versions
    from kvledger.adapters.vllm.configuration import ConnectorSettings
    from kvledger.adapters.vllm.key_secrecy import DEFAULT_ALGORITHM, refuse_weak_hash, why_guessable
    from kvledger.adapters.vllm.transfer import connectors
    from kvledger.adapters.vllm.without_weights import platform

    output_of = _Shown(output, str(transfer.kv_connector))
    algorithm = server.prefix_caching_hash_algo or DEFAULT_ALGORITHM
    if transfer.kv_connector != _OURS:
        for_hybrid_memory = transfer.kv_connector == "KVLedgerRecorderHMA"
        of_recorder, wrapped = accepted_recorder(transfer, for_hybrid_memory=for_hybrid_memory)
        of_recorder.refuse_few_segments(server.data_parallel_size * (1 + server.tensor_parallel_size))
        inner = wrapped_transfer(transfer.kv_connector_extra_config, transfer)
        ours = [each for each in connectors(inner, "connector") if each.kv_connector in CONNECTORS]
        full_disk = of_recorder.refuse_log_dir()
        output_of.recorder(of_recorder, wrapped.__name__)
        output_of.keys(algorithm, why_guessable(algorithm))
        if full_disk:
            output_of.note(full_disk)
        _note_plugin(transfer, output_of)
        for each in ours:
            _check(each, whole, server, output)
        return
    settings = ConnectorSettings.from_extra_config(transfer.kv_connector_extra_config)
    settings.core()
    versions.refuse_parallelism({name: getattr(server, name) for name in versions.UNSUPPORTED_PARALLELISM})
    refuse_weak_hash(algorithm)
    settings.refuse_few_segments(server.data_parallel_size)
    full_disk = settings.refuse_log_dir()
    settings.refuse_beyond_machine(server.tensor_parallel_size)
    output_of.settings(settings)
    output_of.keys(algorithm, why_guessable(algorithm))
    if full_disk:
        output_of.note(full_disk)
    _note_plugin(transfer, output_of)
    if server.model is None:
        output_of.note(
            "the size of a block and the numbers of slots and tokens in the pool depend on the model; give --model DIR "
            "to show these figures"
        )
        return
    planned = _planned(server.model, settings, whole, server)
    output_of.plan(planned)
    if server.block_size is None and not planned.groups.declined:
        output_of.note(
            f"these figures are for the size of blocks that vLLM chooses on this machine ({platform()}); if the server "
            "has another device, run this command on the server's machine"
        )


def _note_plugin(transfer: KVTransferConfig, output_of: _Shown) -> None:
    """Say if vLLM, started in this environment, would not find the connector."""
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is None or "kvledger" in plugins.split(",") or transfer.kv_connector_module_path:
        return
    output_of.note(
        "here VLLM_PLUGINS does not name kvledger, so vLLM would not find the connector; add kvledger to VLLM_PLUGINS, "
        f'or set "kv_connector_module_path": "{CONNECTORS[str(transfer.kv_connector)]}"'
    )


def _planned(model: Path, settings: ConnectorSettings, transfer: dict[str, Any], server: Server) -> Plan:
    from kvledger.adapters.vllm.plan import plan
    from kvledger.adapters.vllm.without_weights import ModelOptions, configured, in_words, kv_cache_of, platform

    options = ModelOptions(
        block_size=server.block_size,
        tensor_parallel_size=server.tensor_parallel_size,
        data_parallel_size=server.data_parallel_size,
        dtype=server.dtype,
        kv_cache_dtype=server.kv_cache_dtype,
        enforce_eager=server.enforce_eager,
        prefix_caching_hash_algo=server.prefix_caching_hash_algo,
    )
    try:
        vllm_config = configured(model, options, transfer)
        kv_cache_config = kv_cache_of(vllm_config)
    except ConfigurationError:
        raise
    except BaseException as error:
        raise_if_unstoppable(error)
        reason = f"vLLM cannot create a KV cache for {model} on this machine ({platform()}): {in_words(error)}"
        remedy = "if a device or a package is missing, run this command on the machine of the server"
        raise ConfigurationError(Refusal(reason, remedy)) from error
    planned = plan(vllm_config, kv_cache_config, settings)
    planned.refuse_beyond_memory()
    return planned


class _Shown:
    """Prints the result for one connector, as text or as JSON."""

    def __init__(self, output: Output, name: str) -> None:
        self._output = output
        self._name = name

    def settings(self, settings: LogSettings) -> None:
        """Print every setting as JSON, or the connector's name and the place of its log as text."""
        if self._output.is_json:
            from kvledger.adapters.recorder.options import recorded_options

            every = settings.model_dump(mode="json")
            if isinstance(every.get("connector"), dict):
                every["connector"] = recorded_options(every["connector"])
            self._output.record("settings", {"kv_connector": self._name, "kv_connector_extra_config": every})
            return
        self._output.field("connector", self._name, "bold")
        self._output.field("log", _log_text(settings))

    def recorder(self, settings: LogSettings, wrapped: str) -> None:
        """Print the settings of a recorder."""
        self.settings(settings)
        self.note(f"records {wrapped} without changing its answers")

    def note(self, text: str) -> None:
        """Print a note."""
        if self._output.is_json:
            self._output.record("note", {"connector": self._name, "text": text})
        else:
            self._output.field("note", text)

    def keys(self, algorithm: str, why_guessable: str) -> None:
        """Print the hash algorithm of the chunk keys, and the reason if a key can confirm a guessed prompt.

        Args:
            algorithm: the hash algorithm.
            why_guessable: the reason; empty if no key can confirm a guess.
        """
        if self._output.is_json:
            why = why_guessable or None
            self._output.record("keys", {"connector": self._name, "algorithm": algorithm, "guessable": why})
        elif why_guessable:
            self._output.field("keys", f"{algorithm}; here {why_guessable}", "yellow")
        else:
            self._output.field("keys", f"{algorithm}, from the seed in PYTHONHASHSEED")

    def plan(self, planned: Plan) -> None:
        """Print the sizes of blocks, chunks and pools for the model, or why kvledger declines the model."""
        figures = _figures(planned)
        if self._output.is_json:
            self._output.record("plan", {"connector": self._name, "declined": planned.groups.declined, **figures})
            return
        for reason in planned.groups.declined:
            self._output.field("declined", f"{reason}; requests run as if there were no connector", "yellow")
        if planned.groups.declined:
            return
        times = Counter(planned.configuration.windows)
        sees = ", ".join(
            (f"the last {window}" if window else "all") + (f" ({number} groups)" if number > 1 else "")
            for window, number in times.items()
        )
        self._output.field(
            "blocks",
            f"{figures['block_size']} tokens each, in {plural(figures['num_groups'], 'group')} of layers; tokens that "
            f"a group reads: {sees}",
        )
        self._output.field("chunks", f"{figures['chunk_size']} tokens")
        self._output.field(
            "pool",
            f"{size(figures['host_bytes'])} in all, {plural(figures['num_slots'], 'slot')} in each pool, room for "
            f"{plural(figures['num_tokens'], 'token')}",
        )
        ranks = plural(figures["num_ranks"], "rank")
        shared = "one pool for all of them" if planned.shares_pool else plural(planned.num_pools, "pool")
        self._output.field("a pool", f"{size(figures['bytes_a_pool'])}, {figures['bytes_a_token']} bytes a token")
        self._output.field("ranks", f"{ranks}, {shared}")


def _figures(planned: Plan) -> dict[str, int]:
    """Return name → figure. `host_bytes` is the size of all pools together; each pool has `num_slots` slots."""
    configuration = planned.configuration
    num_groups = len(configuration.windows)
    return {
        "block_size": configuration.block_size,
        "chunk_size": configuration.chunk_size,
        "num_groups": num_groups,
        "num_ranks": configuration.num_ranks,
        "num_pools": planned.num_pools,
        "host_bytes": planned.settings.pool_bytes,
        "num_slots": configuration.num_slots,
        "num_tokens": configuration.num_slots // num_groups * configuration.block_size,
        "bytes_a_pool": configuration.num_slots * planned.block_bytes,
        "bytes_a_token": planned.block_bytes * num_groups // configuration.block_size,
    }


def _log_text(settings: LogSettings) -> str:
    if settings.log_dir is None:
        return f"in memory, the newest {size(settings.memory_log_bytes)}"
    limit = "without limit" if settings.max_log_bytes is None else f"at most {size(settings.max_log_bytes)}"
    survives = (
        "the log survives a crash of the machine, except for the events of the last moments"
        if settings.durability == "disk"
        else "the log survives a crash of the process, but not a power cut"
    )
    return f"{settings.log_dir.absolute()}, {limit}, {survives}"
