"""Sizes and limits that the core needs to fold and decide.

The header of every log contains them. With another chunk size, for example, the same events have another meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from kvledger.lifecycle.ranges import MAX_BLOCK_TOKENS, MAX_GROUPS, MAX_INT64, MAX_RANKS, MAX_SLOTS, MAX_TOKENS
from kvledger.lifecycle.shown import shown, without_credentials


@attrs.frozen
class Refusal:
    """Why a configuration cannot work, and the remedy. Passwords and access tokens in addresses are left out."""

    reason: str = attrs.field(converter=without_credentials)
    """The reason, with the numbers that do not fit."""
    remedy: str = ""
    key: str = ""
    """Key of the wrong setting, as the user wrote it; nested keys are joined by dots, as in `connector.kv_role`.

    Empty if no single key is wrong.
    """
    value: object = attrs.field(default=None, converter=shown)
    """Value of the wrong setting, without secrets; None if `key` is empty or has no value."""

    def __str__(self) -> str:
        given = f"{self.key}: {self.value!r}: " if self.key else ""
        return f"{given}{self.reason}; {self.remedy}" if self.remedy else f"{given}{self.reason}"


class ConfigurationError(ValueError):
    """A configuration that cannot work, with a `Refusal` for each mistake. A plain string becomes a `Refusal`."""

    def __init__(self, *refused: Refusal | str) -> None:
        self.refusals = tuple(each if isinstance(each, Refusal) else Refusal(each) for each in refused)
        super().__init__(*self.refusals)

    def __str__(self) -> str:
        if len(self.refusals) == 1:
            return str(self.refusals[0])
        return "\n  ".join([f"{len(self.refusals)} settings cannot be used:", *map(str, self.refusals)])


_RANGES: Mapping[str, tuple[int, int]] = {
    "block_size": (1, MAX_BLOCK_TOKENS),
    "chunk_size": (1, MAX_BLOCK_TOKENS),
    "num_ranks": (1, MAX_RANKS),
    "async_load_tokens": (0, MAX_TOKENS),
    "save_interval_tokens": (0, MAX_TOKENS),
    "max_deferred_lookups": (0, MAX_INT64),
    "max_failed_loads": (1, MAX_INT64),
    "max_silent_steps": (1, MAX_INT64),
    "max_silent_ms": (0, MAX_INT64),
}
"""Setting → smallest and largest value."""


def _as_tuple(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sizes)


@attrs.frozen
class LedgerConfiguration:
    """Settings of the core, the same for a whole log. Sizes are in tokens and slots; one slot holds one page.

    Raises:
        ConfigurationError: a number is outside its range, neither chunk size nor block size is a multiple of the
            other, the save interval is less than a chunk, no group sees all tokens, or the pool cannot hold one chunk.
    """

    block_size: int
    chunk_size: int
    num_slots: int
    windows: tuple[int, ...] = attrs.field(default=(0,), converter=_as_tuple)
    """Window size of each group, in tokens; 0: the group has no window and sees all tokens."""
    num_ranks: int = 1
    offers_slow_loads: bool = True
    """Whether a load is offered even if it takes longer than computing its tokens, as measured while serving."""
    save_tails: bool = True
    """Whether the tail of a preempted request is saved too. The tail is the partly filled last chunk."""
    keep_for_preempted: bool = True
    """Whether chunks that a preempted request needs are never evicted while the request waits for blocks."""
    async_load_tokens: int | None = None
    """Loads of at least this many tokens are asynchronous. Other loads precede their step's forward pass.

    None: no load is asynchronous. With several groups of layers, every load is asynchronous, even with None.
    """
    save_interval_tokens: int = 0
    """Length of an interval, in tokens. Chunks that end after the prompt are saved one interval at a time.

    The chunks of an interval are saved together, when all of them have settled.

    0: each chunk is saved when it has settled.
    """
    async_saves: bool = False
    """Whether settled chunks are saved asynchronously. If not, they are saved at the end of the step."""
    max_deferred_lookups: int = 8
    """Maximum number of consecutive deferrals before a lookup is answered.

    Deferrals for another request's load of the same chunks count as one, as long as they wait for the same load.
    """
    awaits_shared_loads: bool = False
    """Whether a lookup is deferred while another request loads the same chunks.

    Set it only if vLLM's own prefix cache is on. After the load, that cache shares the loaded blocks.
    """
    settles_in_flight: bool = True
    """Whether the tokens of steps in flight count as settled when a request is preempted or ends.

    Without speculative decoding it is True: a worker begins the copies of a step after it has computed all earlier
    steps. With speculative decoding it is False, because vLLM may reject drafts.
    """
    max_failed_loads: int = 3
    """Number of failed loads after which a request is quarantined, so it gets no more loads."""
    max_silent_steps: int = 64
    max_silent_ms: int = 5_000
    """Milliseconds after which kvledger asks the workers about a job that a rank has not reported.

    `max_silent_steps` steps must have passed too. kvledger then waits for the same time and number of steps once more.
    If the job has not been reported by then, it fails.
    """

    extensions: Mapping[str, Mapping[str, bool | int | float | str]] = attrs.field(factory=dict, hash=False)
    """Extension → key → configured value. A key that is left out has its default."""

    def __attrs_post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                message = f"{name} is {value}; it must be from {least} to {most}"
                raise ConfigurationError(message)
        self._check_chunks()
        if len(self.windows) > MAX_GROUPS:
            message = f"windows has {len(self.windows)} entries; it must have at most {MAX_GROUPS}"
            raise ConfigurationError(message)
        for size in self.windows:
            if abs(size) > MAX_TOKENS:
                message = f"windows has the entry {size}; each entry must be from 0 to {MAX_TOKENS}"
                raise ConfigurationError(message)
        if not self.windows or min(self.windows) < 0 or all(self.windows):
            message = (
                f"windows is {self.windows}; it needs an entry for each group of layers. No entry may be negative, and "
                "at least one must be 0, for a group that sees all tokens"
            )
            raise ConfigurationError(message)
        if self.num_slots > MAX_SLOTS:
            message = f"num_slots is {self.num_slots}, but must be at most {MAX_SLOTS}; lower host_bytes"
            raise ConfigurationError(message)
        if self.num_slots < self.pages_per_chunk:
            message = (
                f"the host pool has {self.num_slots} slots, but one chunk of {self.chunk_size} tokens needs "
                f"{self.pages_per_chunk} slots; raise host_bytes or lower chunk_size"
            )
            raise ConfigurationError(message)

    def _check_chunks(self) -> None:
        if self.chunk_size % self.block_size and self.block_size % self.chunk_size:
            reason = f"is neither a multiple nor a divisor of block_size {self.block_size}"
            remedy = f"write a multiple or a divisor of {self.block_size}"
            raise ConfigurationError(Refusal(reason, remedy, "chunk_size", self.chunk_size))
        if 0 < self.save_interval_tokens < self.chunk_size:
            reason = f"is less than a chunk of {self.chunk_size} tokens, but only whole chunks are saved"
            remedy = "lower chunk_size, or write 0 to save each chunk when it has settled"
            raise ConfigurationError(Refusal(reason, remedy, "save_interval_tokens", self.save_interval_tokens))

    @property
    def copies_async(self) -> bool:
        """Whether any copy may be asynchronous. With several groups, every load is asynchronous."""
        return self.async_saves or self.async_load_tokens is not None or len(self.windows) > 1

    @property
    def pages_per_chunk(self) -> int:
        """Number of pages of one chunk: at least one per group, even if the chunk is shorter than a block."""
        return max(1, self.chunk_size // self.block_size) * len(self.windows)
