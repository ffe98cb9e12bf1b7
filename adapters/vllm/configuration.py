"""The keys of `kv_connector_extra_config`, checked before an engine starts.

An unknown key, a size that cannot work or a handler that cannot be imported is refused with the figures and
the remedy, before a single request is served.
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
"""The default of `host_bytes` is this part of the memory that the process could have."""
FIXED_HOST_BYTES = 4 * 1024**3
"""The default where ranks may be on machines of which each has another memory, or nothing says how much there is."""
LARGE_LOAD_BYTES = 32 * 1024**2
"""From here on a load holds up a step for longer than a request loses by waiting for one step more."""


class TransferMode(enum.StrEnum):
    """When copies run: within a step, or asynchronously, while steps go on."""

    SYNC = "sync"
    ASYNC = "async"
    AUTO = "auto"


class Offer(enum.StrEnum):
    """Which of what is saved is offered to vLLM."""

    ALWAYS = "always"
    AUTO = "auto"


class ConnectorSettings(LogSettings):
    """What an operator may say; every key has a default that serves."""

    chunk_size: pydantic.PositiveInt | None = None
    """Tokens per chunk, the unit of matching; a multiple or a divisor of vLLM's block size.
    Default: 64, or one block where blocks of the model do not divide that."""

    save_interval_tokens: pydantic.NonNegativeInt | None = None
    """How many tokens a request decodes before they are saved, in whole chunks; at least a chunk, or 0: each chunk when
    it has settled. A prompt is saved at once, and what is left at a preemption and at the end.
    Default: 256, or one chunk where that is longer."""

    host_bytes: pydantic.ByteSize | None = pydantic.Field(None, gt=0)
    """Host memory for saved pages, of all ranks together: an int or a string such as "4GiB". More than the machine and
    its control groups have left is refused at start. Default: an eighth of what the machine has, or its control groups
    allow, shared by the server's engines there (data parallel); 4 GiB where ranks are on several machines."""

    share_pool: bool = True
    """Where all ranks hold the same KV (MLA under tensor parallelism) and are on one machine, keep it once for all of
    them, in memory that they share; false: each rank keeps its own, as for any other model."""

    offer: Offer = Offer.AUTO
    """auto: a load that would take longer than computing what it brings, as measured while serving, is not offered,
    but for one every ten seconds that measures again; always: every load is offered."""

    save_tails: bool = True
    """Copy out a preempted request's part-filled last chunk too, so that nothing of it is computed again."""

    keep_for_preempted: bool = True
    """Never evict what a preempted request will come back for; a pool full of that declines new saves."""

    load_mode: TransferMode = TransferMode.AUTO
    """sync: loads precede the step that needs them; async: they run while other requests go on, and the
    request waits for them; auto: async for large ones (32 MiB a rank), and for all where only that is safe."""

    save_mode: TransferMode = TransferMode.AUTO
    """sync: what settles is copied out at the end of its step; async: while steps go on; auto: async on CUDA."""

    kv_cache_layout: Literal["BLNHC", "BLHNC"] | None = None
    """How vLLM is asked to lay out its KV cache: BLNHC or BLHNC, in which a block is one run of memory over all layers
    instead of one run a layer. vLLM warns and takes another one where the model's kernels read none such. null: vLLM's
    own choice."""

    handlers: tuple[str, ...] = ()
    """State handlers of your own, as "module:Class"; each replaces the one of its state."""

    extensions: tuple[str, ...] = ()
    """Extensions of the core, as "module:Class"; those that installed packages name (entry points
    `kvledger.extensions`) are loaded as well, each once."""

    extension_settings: dict[str, dict[str, bool | int | float | str]] = pydantic.Field(default_factory=dict)
    """Settings of extensions: extension, key, value."""

    max_deferred_lookups: pydantic.NonNegativeInt = 8
    """How many steps in a row a preempted request waits for its own saves before it accepts what is there, and for how
    many loads of the same prefix by other requests a request waits. 0: it never waits."""

    max_failed_loads: pydantic.PositiveInt = 3
    """Failed loads after which a request gets no more of them."""

    max_silent_steps: pydantic.PositiveInt = 64
    """A copy that a worker has not reported for so many steps, and for `max_silent_ms`, is asked after; again so long,
    and it counts as failed."""

    max_silent_ms: pydantic.NonNegativeInt = 5_000
    """See `max_silent_steps`: an idle engine makes many steps in no time."""

    def filled_in(self, *, num_engines: int = 1, is_one_machine: bool = True) -> Self:
        """The same with the default of `host_bytes`, which depends on the machine and on nothing that changes there."""
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
        """What is known with the tokens of a block alone: of chunks, with a pool that holds no more than one.

        Raises:
            ConfigurationError: chunk and block do not divide, or less than a chunk is to be saved together.
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
        """Sizes in tokens and slots.

        Args:
            block_size: tokens of one KV cache block.
            block_bytes: bytes of one block over all layers on one rank.
            num_ranks: workers that each copy every block, or their part of it.
            num_pools: what `host_bytes` is divided by: 1 where all ranks share a pool, by default one each.
            windows: tokens that each group of layers sees, 0 for all.
            supports_async_saves: whether the device can copy without slowing the steps down.
            needs_async_loads: whether only asynchronous loads are safe.
            has_prefix_cache: whether vLLM's own prefix cache is on.

        Raises:
            ConfigurationError: chunk and block do not divide, or the pool cannot hold one chunk.
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
        """How many blocks a pool holds.

        Raises:
            ConfigurationError: no chunk, with the size that holds one.
        """
        num_slots, num_needed = self.pool_bytes // num_pools // block_bytes, sizes.pages_per_chunk * num_groups
        if num_slots < num_needed:
            what = "is" if num_pools == 1 else f"over {num_pools} pools is"
            reason = (
                f"{what} {plural(num_slots, 'slot')} of {size(block_bytes)}, a block of {sizes.block_size} tokens "
                f"each, and a chunk of {sizes.chunk_size} tokens needs {num_needed}"
            )
            least = written_size(-(-num_needed * block_bytes * num_pools // 1024) * 1024)
            raise self._refused(reason, f'write "{least}" or more, or lower chunk_size')
        return num_slots

    def _refused(self, reason: str, remedy: str) -> ConfigurationError:
        """Of `host_bytes`."""
        return ConfigurationError(Refusal(reason, remedy, "host_bytes", written_size(self.pool_bytes)))

    def refuse_beyond_memory(self, memory: HostMemory | None, *, num_pools: int, num_local_pools: int) -> None:
        """Refuse a `host_bytes` of which this machine's part is more than this memory of it.

        To be asked before any rank has taken its share: what is asked for here is what all pools of this machine
        will take, since they are made at once and each rank would find enough for its own.

        Raises:
            ConfigurationError: what is asked for, what can be had, what limits it, and what to write instead.
        """
        if memory is None:
            messages.info("the memory that can be had is not known here, host_bytes is not compared with it")
            return
        num_bytes = self.pool_bytes // num_pools * num_local_pools
        if num_bytes <= memory.num_usable_bytes:
            return
        most = memory.num_usable_bytes // num_local_pools * num_pools
        least_left = size(memory.num_bytes - memory.num_usable_bytes)
        share = "" if num_local_pools == num_pools else f", of which {num_local_pools} of {num_pools} pools are here,"
        reason = (
            f"asks for {size(self.pool_bytes)}{share} where {size(memory.num_bytes)} can be had ({memory.limit}) and "
            f"{least_left} of it is left to the engine"
        )
        unit = 1024**3 if most >= 4 * 1024**3 else 1024**2
        raise self._refused(
            reason, f'write "{written_size(most // unit * unit)}" or less, or give the process more memory'
        )

    def refuse_beyond_machine(self, num_ranks: int) -> None:
        """Refuse a `host_bytes` of which all ranks together, on this machine, would take more than it has in total.

        Raises:
            ConfigurationError: with the figures and the remedy.
        """
        most = most_memory()
        if most is not None:
            memory = HostMemory(most, "what the machine has, or its control groups allow")
            self.filled_in().refuse_beyond_memory(memory, num_pools=num_ranks, num_local_pools=num_ranks)

    def idle_configuration(self) -> LedgerConfiguration:
        """For a model that is not served: nothing is saved, so no size matters."""
        return LedgerConfiguration(block_size=1, chunk_size=1, num_slots=1)

    def _async_load_tokens(self, block_size: int, block_bytes: int, *, needs_async_loads: bool) -> int | None:
        if self.load_mode is TransferMode.SYNC:
            return None
        if self.load_mode is TransferMode.ASYNC or needs_async_loads:
            return 0
        return -(-LARGE_LOAD_BYTES // block_bytes) * block_size

    def core(self) -> Core:
        """The standard core with all extensions, and with the handlers of `handlers` in their places.

        Raises:
            ConfigurationError: a name that cannot be imported or is none of these, parts that do not fit together, or a
                setting that no extension has.
        """
        core = composed_core(self.handlers, (*installed_extensions(), *self.extensions))
        core.check_settings(self.extension_settings)
        return core
