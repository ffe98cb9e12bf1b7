"""Defines the keys of `kv_connector_extra_config`, and checks them before an engine starts.

kvledger refuses an unknown key, a size that cannot work and a handler that cannot be imported. The error says why, and
what to write instead.
"""

from __future__ import annotations

import enum
from typing import Literal, Self

import attrs
import pydantic

from kvledger.adapters.core import composed_core, installed_extensions
from kvledger.adapters.units import plural, size, written_size
from kvledger.adapters.vllm.log_settings import LogSettings
from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import ConfigurationError, Core, LedgerConfiguration, Refusal
from kvledger.storage.kv import HostMemory, most_memory

DEFAULT_CHUNK_SIZE = 64
DEFAULT_SAVE_INTERVAL_TOKENS = 256
SHARE_OF_MEMORY = 8
"""The default of `host_bytes` is the memory that the process could have, divided by this number."""
FIXED_HOST_BYTES = 4 * 1024**3
"""Default of `host_bytes` if ranks may be on several machines or the memory is unknown."""
LARGE_LOAD_BYTES = 32 * 1024**2
"""Size on one rank, in bytes, from which on a load is asynchronous by default. A synchronous load of this size delays
its step by more time than its request would lose by waiting for one more step."""


class TransferMode(enum.StrEnum):
    """When copies run: within a step (sync), while other steps run (async), or as kvledger chooses (auto)."""

    SYNC = "sync"
    ASYNC = "async"
    AUTO = "auto"


class Offer(enum.StrEnum):
    """Which of the saved tokens are offered to vLLM."""

    ALWAYS = "always"
    AUTO = "auto"


class ConnectorSettings(LogSettings):
    """The settings of the connector; every key has a default."""

    chunk_size: pydantic.PositiveInt | None = None
    """Tokens per chunk, a multiple or a divisor of vLLM's block size. Two prompts share only whole chunks. Default: 64,
    or one block if the model's block size does not divide 64."""

    save_interval_tokens: pydantic.NonNegativeInt | None = None
    """Number of tokens that a request decodes before kvledger saves the chunks with these tokens: at least one chunk,
    or 0 to save each chunk when its tokens have settled. The prompt's chunks do not wait for this interval. When a
    request is preempted or finishes, kvledger saves all of its chunks that are not saved yet. Default: 256, or one
    chunk if a chunk is longer."""

    host_bytes: pydantic.ByteSize | None = pydantic.Field(None, gt=0)
    """Host memory for saved pages of all ranks together: a number of bytes or a string such as "4GiB". kvledger refuses
    to start if the machine or a control group of the process has less memory available. Default: an eighth of the
    machine's memory, or of the control group's limit if it is lower, divided by the number of the server's engines on
    the machine (data parallel). If ranks may be on several machines or the memory is unknown, the default is 4 GiB."""

    share_pool: bool = True
    """Whether ranks that hold the same KV (MLA under tensor parallelism) share one host pool, if they are on one
    machine. false: each rank has its own pool. Ranks that hold different KV always have their own pools."""

    offer: Offer = Offer.AUTO
    """auto: kvledger does not offer a load if loading takes longer than computing the same tokens. It measures both
    times while serving. While loading is slower, it still offers one load every ten seconds, to measure again. always:
    kvledger offers every load."""

    save_tails: bool = True
    """Whether kvledger also saves the tail of a preempted request: the tokens of its last chunk, if that chunk is not
    full. The request can then load the tail's tokens instead of computing them again."""

    keep_for_preempted: bool = True
    """Whether kvledger never evicts a chunk that a preempted request needs. If such chunks fill the host pool, kvledger
    declines new saves. false: kvledger may evict these chunks too."""

    load_mode: TransferMode = TransferMode.AUTO
    """sync: a load runs within the step that needs the loaded tokens, before its forward pass. async: a load runs while
    steps of other requests run; only the request that needs the loaded tokens waits. auto: loads of at least 32 MiB per
    rank are asynchronous. With async scheduling, auto makes all loads asynchronous, because a failed synchronous load
    could give a client wrong tokens."""

    save_mode: TransferMode = TransferMode.AUTO
    """sync: kvledger saves settled chunks at the end of a step. async: kvledger saves settled chunks while later steps
    run. auto: like async on CUDA, except if vLLM zeroes new blocks, as it does for a KV cache of mixed precision;
    otherwise like sync."""

    kv_cache_layout: Literal["BLNHC", "BLHNC"] | None = None
    """KV cache layout that kvledger asks vLLM for. In the layouts BLNHC and BLHNC, a block is one contiguous part of
    memory for all layers, instead of one part per layer. If the model's kernels cannot read the layout, vLLM warns and
    uses another one. null: vLLM chooses the layout."""

    handlers: tuple[str, ...] = ()
    """Your own handlers, each as "module:Class". Your handler of a state replaces kvledger's handler of this state."""

    extensions: tuple[str, ...] = ()
    """Extensions of the core, each as "module:Class". kvledger also loads the extensions that installed packages name
    in the entry points `kvledger.extensions`. It loads an extension only one time, even if several places name it."""

    extension_settings: dict[str, dict[str, bool | int | float | str]] = pydantic.Field(default_factory=dict)
    """Settings of extensions, as an object: name of the extension → key → value."""

    max_deferred_lookups: pydantic.NonNegativeInt = 8
    """Largest number of consecutive lookups of a request that kvledger defers. vLLM looks up a waiting request in each
    step. kvledger defers the lookup of a preempted request while the request's chunks are being saved. It also defers a
    request's lookup while another request loads the same chunks; all deferrals for one such load count as one. 0:
    kvledger defers no lookup."""

    max_failed_loads: pydantic.PositiveInt = 3
    """Number of failed loads after which a request is quarantined, so that kvledger offers it no further load."""

    max_silent_steps: pydantic.PositiveInt = 64
    """Number of steps that kvledger waits for the workers to report a copy. After these steps, and after
    `max_silent_ms`, it asks the workers to report the copy. If both limits pass again and a worker has not reported the
    copy, the copy counts as failed."""

    max_silent_ms: pydantic.NonNegativeInt = 5_000
    """Milliseconds that must pass in addition to the steps of `max_silent_steps`, before kvledger asks the workers
    about a copy. An idle engine can run many steps in a short time."""

    def filled_in(self, *, num_engines: int = 1, is_one_machine: bool = True) -> Self:
        """Return the settings with the default of `host_bytes` filled in, if `host_bytes` is not set.

        The default is the same at every start on the same machine.
        """
        if self.host_bytes is not None:
            return self
        most = most_memory() if is_one_machine else None
        num_bytes = FIXED_HOST_BYTES if most is None else most // SHARE_OF_MEMORY // num_engines // 1024**2 * 1024**2
        return self.model_copy(update={"host_bytes": pydantic.ByteSize(num_bytes)})

    @property
    def pool_bytes(self) -> int:
        """`host_bytes`, or the default for one engine if `host_bytes` is not set."""
        return int(self.filled_in().host_bytes or 0)

    def sizes(self, block_size: int) -> LedgerConfiguration:
        """Return a configuration with the sizes for this block size. The number of slots is a placeholder.

        Raises:
            ConfigurationError: neither the chunk size nor the block size is a multiple of the other, or the save
                interval is less than a chunk.
        """
        chunk_size = self.chunk_size
        if chunk_size is None:
            chunk_size = block_size if DEFAULT_CHUNK_SIZE % block_size else DEFAULT_CHUNK_SIZE
        save_interval_tokens = self.save_interval_tokens
        if save_interval_tokens is None:
            save_interval_tokens = max(DEFAULT_SAVE_INTERVAL_TOKENS, chunk_size)
        return LedgerConfiguration(
            block_size=block_size,
            chunk_size=chunk_size,
            num_slots=chunk_size,
            save_interval_tokens=save_interval_tokens,
        )

    def ledger_configuration(
        self,
        *,
        block_size: int,
        block_bytes: int,
        num_ranks: int,
        num_pools: int | None = None,
        windows: tuple[int, ...] = (0,),
        supports_async_saves: bool = False,
        needs_async_loads: bool = False,
        has_prefix_cache: bool = False,
    ) -> LedgerConfiguration:
        """Return the configuration on which kvledger's decisions depend, with sizes in tokens and slots.

        Args:
            block_size: tokens of one KV cache block.
            block_bytes: bytes of one block on one rank.
            num_ranks: number of workers.
            num_pools: number of pools among which `host_bytes` is divided: 1 if all ranks share a pool. None: one pool
                per rank.
            windows: window of each group in tokens, 0 for a group without a window.
            supports_async_saves: whether the device can copy without slowing the steps down.
            needs_async_loads: whether only asynchronous loads are safe.
            has_prefix_cache: whether vLLM's own prefix cache is on.

        Raises:
            ConfigurationError: neither the chunk size nor the block size is a multiple of the other, the save interval
                is less than a chunk, or the pool cannot hold one chunk.
        """
        num_pools = num_ranks if num_pools is None else num_pools
        sizes = self.sizes(block_size)
        return attrs.evolve(
            sizes,
            num_slots=self._num_slots(sizes, block_bytes, num_pools, len(windows)),
            windows=windows,
            num_ranks=num_ranks,
            offers_slow_loads=self.offer is Offer.ALWAYS,
            save_tails=self.save_tails,
            keep_for_preempted=self.keep_for_preempted,
            max_deferred_lookups=self.max_deferred_lookups,
            awaits_shared_loads=has_prefix_cache,
            max_failed_loads=self.max_failed_loads,
            max_silent_steps=self.max_silent_steps,
            max_silent_ms=self.max_silent_ms,
            extensions=self.extension_settings,
            async_load_tokens=self._async_load_tokens(block_size, block_bytes, needs_async_loads=needs_async_loads),
            async_saves=self.save_mode is TransferMode.ASYNC
            or (self.save_mode is TransferMode.AUTO and supports_async_saves),
        )

    def _num_slots(self, sizes: LedgerConfiguration, block_bytes: int, num_pools: int, num_groups: int) -> int:
        """Return the number of slots of one pool.

        Raises:
            ConfigurationError: no chunk fits into a pool. The error names a size that is large enough.
        """
        num_slots, num_needed = self.pool_bytes // num_pools // block_bytes, sizes.pages_per_chunk * num_groups
        if num_slots < num_needed:
            what = "gives" if num_pools == 1 else f"divided among {num_pools} pools gives"
            reason = (
                f"{what} {plural(num_slots, 'slot')} of {size(block_bytes)}, one block of {sizes.block_size} tokens "
                f"each, but a chunk of {sizes.chunk_size} tokens needs {num_needed} of them"
            )
            least = written_size(-(-num_needed * block_bytes * num_pools // 1024) * 1024)
            raise self._refused(reason, f'write "{least}" or more, or lower chunk_size')
        return num_slots

    def _refused(self, reason: str, remedy: str) -> ConfigurationError:
        """Return an error about `host_bytes`."""
        return ConfigurationError(Refusal(reason, remedy, "host_bytes", written_size(self.pool_bytes)))

    def refuse_beyond_memory(self, memory: HostMemory | None, *, num_pools: int, num_local_pools: int) -> None:
        """Refuse `host_bytes` if the pools on this machine need more than the usable part of `memory`.

        Call this before any rank allocates its pool. A rank that looks only at its own pool may find enough memory,
        although there is too little for all pools of the machine.

        Raises:
            ConfigurationError: the pools do not fit. The error names the requested size, the available memory, the
                limit that restricts it, and a size that fits.
        """
        if memory is None:
            messages.info(
                "the available memory is unknown: neither /proc/meminfo nor a control group can be read; make sure "
                "that host_bytes fits"
            )
            return
        num_bytes = self.pool_bytes // num_pools * num_local_pools
        if num_bytes <= memory.num_usable_bytes:
            return
        most = memory.num_usable_bytes // num_local_pools * num_pools
        least_left = size(memory.num_bytes - memory.num_usable_bytes)
        share = "" if num_local_pools == num_pools else f" ({num_local_pools} of {num_pools} pools are on this machine)"
        reason = (
            f"asks for {size(self.pool_bytes)}{share}, but {size(memory.num_bytes)} is available ({memory.limit}), of "
            f"which {least_left} is reserved for the engine"
        )
        unit = 1024**3 if most >= 4 * 1024**3 else 1024**2
        raise self._refused(
            reason, f'write "{written_size(most // unit * unit)}" or less, or give the process more memory'
        )

    def refuse_beyond_machine(self, num_ranks: int) -> None:
        """Refuse a `host_bytes` that is more than this machine's total memory.

        Call this only if all ranks run on this machine.

        Raises:
            ConfigurationError: `host_bytes` is too large. The error names a size that fits.
        """
        most = most_memory()
        if most is not None:
            memory = HostMemory(most, "the memory of the machine or the limit of its control groups")
            self.filled_in().refuse_beyond_memory(memory, num_pools=num_ranks, num_local_pools=num_ranks)

    def idle_configuration(self) -> LedgerConfiguration:
        """Return the configuration for a model that kvledger declines. Nothing is saved, so the sizes do not matter."""
        return LedgerConfiguration(block_size=1, chunk_size=1, num_slots=1)

    def _async_load_tokens(self, block_size: int, block_bytes: int, *, needs_async_loads: bool) -> int | None:
        if self.load_mode is TransferMode.SYNC:
            return None
        if self.load_mode is TransferMode.ASYNC or needs_async_loads:
            return 0
        return -(-LARGE_LOAD_BYTES // block_bytes) * block_size

    def core(self) -> Core:
        """Return the standard core with all extensions and the handlers of `handlers`.

        Raises:
            ConfigurationError: a name cannot be imported; a class is not a handler or not an extension; handlers and
                extensions do not fit together; or `extension_settings` has a setting that no extension has.
        """
        core = composed_core(self.handlers, (*installed_extensions(), *self.extensions))
        core.check_settings(self.extension_settings)
        return core
