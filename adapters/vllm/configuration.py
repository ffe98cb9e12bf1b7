"""The keys of `kv_connector_extra_config`, checked before an engine starts.

kvledger refuses an unknown key, a size that cannot work and a handler that cannot be imported, with the figures and the
remedy.
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
"""Divisor of the memory that the process could have, for the default of `host_bytes`."""
FIXED_HOST_BYTES = 4 * 1024**3
"""Default of `host_bytes` if ranks may be on several machines or the memory is unknown."""
LARGE_LOAD_BYTES = 32 * 1024**2
"""Bytes from which a load delays a step by more than a request loses by waiting one step more."""


class TransferMode(enum.StrEnum):
    """When copies run: within a step, or asynchronously, while steps go on."""

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
    """Tokens per chunk, the unit of matching: a multiple or a divisor of vLLM's block size. Default: 64, or one block
    if the model's block size does not divide 64."""

    save_interval_tokens: pydantic.NonNegativeInt | None = None
    """Tokens that a request decodes before its whole chunks are saved: at least a chunk, or 0 to save each chunk when
    it has settled. A prompt is saved at once, the rest at a preemption and at the end. Default: 256, or one chunk if
    that is longer."""

    host_bytes: pydantic.ByteSize | None = pydantic.Field(None, gt=0)
    """Host memory for saved pages, all ranks together: an int or a string such as "4GiB". More than the machine and its
    control groups have left is refused at start. Default: an eighth of what the machine has, or its control groups
    allow, divided among the server's engines there (data parallel); 4 GiB if ranks are on several machines."""

    share_pool: bool = True
    """Whether ranks that hold the same KV (MLA under tensor parallelism) and are on one machine keep it once, in shared
    memory; false: each rank keeps its own, as for any other model."""

    offer: Offer = Offer.AUTO
    """auto: a load that would take longer than computing its tokens, as measured while serving, is not offered, except
    for one every ten seconds that measures again; always: every load is offered."""

    save_tails: bool = True
    """Whether the part-filled last chunk of a preempted request is saved too, so that none of its tokens are computed
    again."""

    keep_for_preempted: bool = True
    """Whether chunks that a preempted request needs are never evicted; a pool full of them declines new saves."""

    load_mode: TransferMode = TransferMode.AUTO
    """sync: loads run before the step that needs them; async: they run while other requests go on, and the request
    waits for them; auto: async for large loads (32 MiB per rank), and for all loads if only async is safe."""

    save_mode: TransferMode = TransferMode.AUTO
    """sync: what settles is copied out at the end of its step; async: while steps go on; auto: async on CUDA, unless
    vLLM zeroes new blocks, as in a KV cache of mixed precision."""

    kv_cache_layout: Literal["BLNHC", "BLHNC"] | None = None
    """The layout that kvledger asks vLLM for: BLNHC or BLHNC, in which a block is one run of memory over all layers
    instead of one per layer. If the model's kernels cannot read it, vLLM warns and takes another one. null: vLLM's own
    choice."""

    handlers: tuple[str, ...] = ()
    """Your own state handlers, as "module:Class"; each replaces the one of its state."""

    extensions: tuple[str, ...] = ()
    """Extensions of the core, as "module:Class". Those that installed packages name (entry points
    `kvledger.extensions`) are loaded as well, each once."""

    extension_settings: dict[str, dict[str, bool | int | float | str]] = pydantic.Field(default_factory=dict)
    """Settings of extensions: extension, key, value."""

    max_deferred_lookups: pydantic.NonNegativeInt = 8
    """Steps in a row that a preempted request waits for its own saves before it accepts what is there; also the number
    of loads of the same prefix by other requests that a request waits for. 0: it never waits."""

    max_failed_loads: pydantic.PositiveInt = 3
    """Failed loads after which a request gets no further load."""

    max_silent_steps: pydantic.PositiveInt = 64
    """Steps without a worker's report after which kvledger asks the workers about a copy, once `max_silent_ms` have
    passed too. After the same time again the copy counts as failed."""

    max_silent_ms: pydantic.NonNegativeInt = 5_000
    """Milliseconds for `max_silent_steps`: an idle engine runs many steps in no time."""

    def filled_in(self, *, num_engines: int = 1, is_one_machine: bool = True) -> Self:
        """Return the settings with the default of `host_bytes`, which is the same at every start on a machine."""
        if self.host_bytes is not None:
            return self
        most = most_memory() if is_one_machine else None
        num_bytes = FIXED_HOST_BYTES if most is None else most // SHARE_OF_MEMORY // num_engines // 1024**2 * 1024**2
        return self.model_copy(update={"host_bytes": pydantic.ByteSize(num_bytes)})

    @property
    def pool_bytes(self) -> int:
        """`host_bytes`, or its default for one engine."""
        return int(self.filled_in().host_bytes or 0)

    def sizes(self, block_size: int) -> LedgerConfiguration:
        """Return what follows from the block size alone; the number of slots is a placeholder.

        Raises:
            ConfigurationError: chunk and block do not divide one another, or the save interval is less than a chunk.
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
        """Return the configuration of the ledger, in tokens and slots.

        Args:
            block_size: tokens of one KV cache block.
            block_bytes: bytes of one block over all layers on one rank.
            num_ranks: workers, each of which copies every block or its part of it.
            num_pools: pools that `host_bytes` is divided among: 1 if all ranks share a pool, by default one per rank.
            windows: tokens that each group of layers sees, 0 for all.
            supports_async_saves: whether the device can copy without slowing the steps down.
            needs_async_loads: whether only asynchronous loads are safe.
            has_prefix_cache: whether vLLM's own prefix cache is on.

        Raises:
            ConfigurationError: chunk and block do not divide one another, or the pool cannot hold one chunk.
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
            ConfigurationError: no chunk fits; names a size that holds one.
        """
        num_slots, num_needed = self.pool_bytes // num_pools // block_bytes, sizes.pages_per_chunk * num_groups
        if num_slots < num_needed:
            what = "gives" if num_pools == 1 else f"divided among {num_pools} pools gives"
            reason = (
                f"{what} {plural(num_slots, 'slot')} of {size(block_bytes)}, one block of {sizes.block_size} tokens "
                f"each, but a chunk of {sizes.chunk_size} tokens needs {num_needed}"
            )
            least = written_size(-(-num_needed * block_bytes * num_pools // 1024) * 1024)
            raise self._refused(reason, f'write "{least}" or more, or lower chunk_size')
        return num_slots

    def _refused(self, reason: str, remedy: str) -> ConfigurationError:
        """Return an error about `host_bytes`."""
        return ConfigurationError(Refusal(reason, remedy, "host_bytes", written_size(self.pool_bytes)))

    def refuse_beyond_memory(self, memory: HostMemory | None, *, num_pools: int, num_local_pools: int) -> None:
        """Refuse a `host_bytes` whose part on this machine is more than the usable part of `memory`.

        Call it before any rank allocates: it counts all pools of this machine, but each rank would find enough for its
        own pool.

        Raises:
            ConfigurationError: names what is asked for, what is available and why, and what to write instead.
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
        """Refuse a `host_bytes` that is more than this machine's total memory, if all ranks run on it.

        Raises:
            ConfigurationError: with the figures and the remedy.
        """
        most = most_memory()
        if most is not None:
            memory = HostMemory(most, "the memory of the machine or the limit of its control groups")
            self.filled_in().refuse_beyond_memory(memory, num_pools=num_ranks, num_local_pools=num_ranks)

    def idle_configuration(self) -> LedgerConfiguration:
        """Return the configuration for a model that is not served: nothing is saved, so no size matters."""
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
            ConfigurationError: a name cannot be imported or is not a handler or an extension, parts do not fit
                together, or no extension has a setting.
        """
        core = composed_core(self.handlers, (*installed_extensions(), *self.extensions))
        core.check_settings(self.extension_settings)
        return core
