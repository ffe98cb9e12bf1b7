"""A model whose KV is a hash of all tokens so far, so that wrong KV is found when the model reads it.

The KV of a position is the chained hash of all tokens up to this position. Before a step computes anything, every
position that the scheduler counts as computed must hold exactly this hash, in every layer. The next token is a function
of the last hash, so it is always the same, whenever and however often it is computed.

If the model reads wrong KV, it raises an error, except in one case. A step may be scheduled before the scheduler
knows that a load failed. Such a step may read the blocks of this load, and KV that was computed on top of them.
The model then goes on, as a real model does, writes wrong KV and samples wrong tokens. Other checks find wrong KV that
is kept and wrong tokens that are delivered. They check pages, vLLM's prefix cache and outputs.

With several groups of layers, as in hybrid models, each group has its own block table over the same tensors, and writes
its own KV. A group with a sliding window reads nothing before its window. For tokens before the window, the group's
table may have the null block, or a block that now belongs to another request.

Verifies: all blocks that a scheduled request reads have the right contents after the loads, before the forward pass.
Does not verify: timing, and the order in which a device runs its work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvledger.adapters.lab.simulation.expected import Expected, next_token
from kvledger.adapters.lab.simulation.tiny_model import VOCABULARY_SIZE

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

NUM_LAYERS = 2
"""Layers of one group; all groups use the same tensors."""
NULL_BLOCK = 0
BLOCK_SIZE = 16
"""Tokens of a block, by default."""


class CorruptKV(AssertionError):
    """A request would have read KV that does not belong to its tokens. `block_ids` are the blocks with this KV."""

    def __init__(self, message: str, block_ids: frozenset[int] = frozenset()) -> None:
        super().__init__(message)
        self.block_ids = block_ids


def block_bytes(block_size: int) -> int:
    """Return the bytes of one block over all layers of `HashedModel`."""
    return 2 * 8 * block_size * NUM_LAYERS


def layer_names(num_groups: int = 1) -> tuple[tuple[str, ...], ...]:
    """Return the names of the layers of each group."""
    return tuple(
        tuple(f"model.layers.{group * NUM_LAYERS + layer}.self_attn.attn" for layer in range(NUM_LAYERS))
        for group in range(num_groups)
    )


def marks(number: int, layer: torch.Tensor) -> torch.Tensor:
    """Return what layer `number` of a group adds to a position's hash, for each head and place in the content.

    A layer stores a number for each head and place. A different number is added for each, so all stored numbers of a
    position differ.
    """
    _, num_heads, _, content = layer.shape
    return torch.arange(num_heads * content).view(num_heads, content) * (number + 1)


class _Sequence(Expected):
    """A request as the model knows it: its tokens, their KV, and its block tables."""

    def __init__(self, num_prompt_tokens: int, tokens: list[int], block_ids: list[list[int]], weights: int) -> None:
        super().__init__(tokens, weights)
        self.num_prompt_tokens = num_prompt_tokens
        self.block_ids = block_ids
        """One table per group."""

    def keep_outputs(self, num_output_tokens: int) -> None:
        """Keep only the first `num_output_tokens` sampled tokens.

        The scheduler has dropped the later tokens. They are sampled again.
        """
        del self.tokens[self.num_prompt_tokens + num_output_tokens :]
        del self.kv[len(self.tokens) :]


class HashedModel:
    """KV tensors and the forward pass over them. `windows`: window of each group in tokens; 0: no window.

    `kv_caches` are the layers of a single group, as vLLM allocates them. Each tensor has the dimensions [blocks, heads,
    tokens, content] and numbers of eight bytes. All numbers of one token, over all heads and the content,
    differ from each other.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int] = (0,),
        kv_caches: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.block_size = block_size
        self._windows = windows
        if kv_caches is None:
            tensors = torch.zeros(NUM_LAYERS, num_blocks, 1, block_size, 2, dtype=torch.int64).unbind()
            self._layer_names = layer_names(len(windows))
            kv_caches = {
                name: tensor for names in self._layer_names for name, tensor in zip(names, tensors, strict=True)
            }
        else:
            self._layer_names = (tuple(kv_caches),)
        self.kv_caches = dict(kv_caches)
        # NumPy views of the same bytes: indexing takes a tenth of the time.
        self._kv = {name: tensor.view(torch.int64).numpy() for name, tensor in kv_caches.items()}
        self._marks = {
            name: marks(number, kv_caches[name]).numpy()
            for names in self._layer_names
            for number, name in enumerate(names)
        }
        self._sequences: dict[str, _Sequence] = {}
        self.weights = 0
        """Number with which every chain of hashes starts. If it changes, all KV that was cached before is wrong."""
        self.num_positions_checked = 0

    def update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Update the block tables from the scheduler's output, as a model runner does."""
        for request_id in scheduler_output.finished_req_ids:
            self._sequences.pop(request_id, None)
        for data in scheduler_output.scheduled_new_reqs:
            tokens = list(data.prefill_token_ids or data.prompt_token_ids or ())
            num_prompt_tokens = len(data.prompt_token_ids or ())
            block_ids = [list(table) for table in data.block_ids]
            self._sequences[data.req_id] = _Sequence(num_prompt_tokens, tokens, block_ids, self.weights)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, entry, num_output_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_output_tokens, strict=True
        ):
            sequence = self._sequences[request_id]
            if request_id in cached.resumed_req_ids:
                tokens = list(cached.all_token_ids[request_id])
                block_ids = [list(table) for table in entry] if entry else [[] for _ in self._windows]
                num_prompt_tokens = sequence.num_prompt_tokens
                self._sequences[request_id] = _Sequence(num_prompt_tokens, tokens, block_ids, self.weights)
                continue
            sequence.keep_outputs(num_output_tokens)
            for table, added in zip(sequence.block_ids, entry or (), strict=False):
                table.extend(added)

    def forward(
        self, scheduler_output: SchedulerOutput, excused_blocks: dict[int, int] | None = None
    ) -> tuple[list[str], list[list[int]]]:
        """Check the KV that the step reads, write the KV of the scheduled tokens, and sample tokens.

        A request samples a token if all of its known tokens are computed. In a real model's layer, all requests write
        before any request reads. A request may therefore read KV that another request writes in the same step.

        Args:
            scheduler_output: the scheduler's output for the step.
            excused_blocks: block → step in which the block's load failed, for failures of which the scheduler cannot
                know yet. Blocks that are computed on top of these blocks are added to the mapping.

        Raises:
            CorruptKV: wrong KV is read from a block that is not in `excused_blocks`.
        """
        excused = {} if excused_blocks is None else excused_blocks
        computed = {data.req_id: data.num_computed_tokens for data in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled: dict[str, list[int]] = {}
        left = list(scheduler_output.num_scheduled_tokens)
        while left:
            wrong: dict[str, CorruptKV] = {}
            for request_id in left:
                sequence = self._sequences[request_id]
                first = computed[request_id]
                last = first + scheduler_output.num_scheduled_tokens[request_id]
                try:
                    sampled[request_id] = self._compute(request_id, sequence, first, last)
                except CorruptKV as error:
                    wrong[request_id] = error
            if len(wrong) == len(left):
                for request_id, trouble in wrong.items():
                    first = computed[request_id]
                    last = first + scheduler_output.num_scheduled_tokens[request_id]
                    sampled[request_id] = self._compute_on(trouble, self._sequences[request_id], first, last, excused)
                break
            left = list(wrong)
        return list(scheduler_output.num_scheduled_tokens), [
            sampled[request_id] for request_id in scheduler_output.num_scheduled_tokens
        ]

    def _compute(self, request_id: str, sequence: _Sequence, first: int, last: int, *, error: int = 0) -> list[int]:
        """Write the KV of positions `first` to `last - 1`. Return the sampled token, if all known tokens are computed.

        `error` is added to the KV and to the sampled token.
        """
        num_known = len(sequence.tokens)
        sequence.compute_to(last)
        if not error:
            self._check(request_id, sequence, first)
        self._write(sequence, first, last, error)
        if last < num_known:
            return []
        token = (next_token(sequence.kv[last - 1]) + error) % VOCABULARY_SIZE
        if last == len(sequence.tokens):
            sequence.tokens.append(token)
        return [token]

    def _compute_on(
        self, trouble: CorruptKV, sequence: _Sequence, first: int, last: int, excused: dict[int, int]
    ) -> list[int]:
        """Compute on top of wrong KV, if the scheduler cannot know yet that it is wrong. Otherwise raise `trouble`."""
        if not trouble.block_ids or not trouble.block_ids <= excused.keys():
            raise trouble
        step = min(excused[block_id] for block_id in trouble.block_ids)
        for table in sequence.block_ids:
            excused.update(dict.fromkeys(table[first // self.block_size : -(-last // self.block_size)], step))
        return self._compute("", sequence, first, last, error=1)

    def _slots(self, table: Sequence[int], first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(first, last)
        return np.array(table)[positions // self.block_size], positions % self.block_size

    def _check(self, request_id: str, sequence: _Sequence, num_computed_tokens: int) -> None:
        for group, window in enumerate(self._windows):
            # The next token sees itself and the `window - 1` tokens before it; later tokens see no further back.
            first = max(0, num_computed_tokens - window + 1) if window else 0
            if first < num_computed_tokens:
                self._check_group(request_id, sequence, group, first, num_computed_tokens)

    def _check_group(
        self, request_id: str, sequence: _Sequence, group: int, first: int, num_computed_tokens: int
    ) -> None:
        blocks, offsets = self._slots(sequence.block_ids[group], first, num_computed_tokens)
        expected = np.array(sequence.kv[first:num_computed_tokens], dtype=np.int64) + group
        for layer in self._layer_names[group]:
            read = self._kv[layer][blocks, :, offsets] != expected[:, None, None] + self._marks[layer]
            is_wrong = read.any((1, 2)) | (blocks == NULL_BLOCK)
            if is_wrong.any():
                wrong = is_wrong.nonzero()[0]
                position = first + int(wrong[0])
                message = (
                    f"{request_id} reads wrong KV in {layer}: {len(wrong)} of {num_computed_tokens - first} positions, "
                    f"first at {position} in block {int(blocks[wrong[0]])}"
                )
                raise CorruptKV(message, frozenset(blocks[wrong].tolist()))
        self.num_positions_checked += num_computed_tokens - first

    def _write(self, sequence: _Sequence, first: int, last: int, error: int = 0) -> None:
        values = error + np.array(sequence.kv[first:last], dtype=np.int64)
        for group, table in enumerate(sequence.block_ids):
            blocks, offsets = self._slots(table, first, last)
            if bool((blocks == NULL_BLOCK).any()):
                message = f"positions {first} to {last} of group {group} would be written into the null block"
                raise CorruptKV(message)
            for layer in self._layer_names[group]:
                self._kv[layer][blocks, :, offsets] = (values + group)[:, None, None] + self._marks[layer]
