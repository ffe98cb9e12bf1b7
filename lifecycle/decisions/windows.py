"""Effects of sliding windows on saves and loads.

A save cannot copy every page: vLLM frees the pages that no token sees any more. A stored chunk may therefore lack pages
of groups with a window. A load may end only at a boundary after which every page that the next token sees is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvledger.lifecycle.events import NO_SLOT, NULL_BLOCK
from kvledger.lifecycle.geometry import Windows
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.request_record import RequestRecord


class SavablePages(msgspec.Struct, frozen=True):
    """The pages of a block table that a save can copy and that are worth a copy.

    - All pages of groups without a window.
    - Pages that the next token sees. The request holds them.
    - Pages that a window has moved past in this step, if a load up to one of the boundaries needs them. vLLM has
      freed these pages, but their contents are intact until the step's forward pass.
    """

    windows: Windows
    block_ids: Sequence[int]
    num_settled_tokens: int
    window_freed_at: int | None
    """Number of settled tokens when vLLM last freed pages outside the windows, before this step.

    Pages that a window has moved past since then are freed, but still intact. None: no freed page is intact.
    """
    boundaries: tuple[int, ...]
    """Numbers of tokens after which a load should be able to end."""

    def __contains__(self, page: int) -> bool:
        block, group = divmod(page, self.windows.num_groups)
        if not self.windows.sizes[group]:
            return True
        if page >= len(self.block_ids) or self.block_ids[page] == NULL_BLOCK:
            return False
        return self._is_seen(block, group) or self._is_worth_a_copy(block, group)

    def is_freed(self, page: int) -> bool:
        """Whether vLLM has freed the page, so that it must be copied before the forward pass."""
        block, group = divmod(page, self.windows.num_groups)
        return not self._is_seen(block, group)

    def blocks(self) -> Iterator[int]:
        """Return the block ids of the pages that a save can copy and that are worth a copy."""
        return (block_id for page, block_id in enumerate(self.block_ids) if page in self)

    def _is_seen(self, block: int, group: int) -> bool:
        return block >= self.windows.first_block(group, self.num_settled_tokens)

    def _is_worth_a_copy(self, block: int, group: int) -> bool:
        if self.window_freed_at is None or block < self.windows.first_block(group, self.window_freed_at):
            return False
        return any(
            self.windows.first_block(group, boundary) <= block < -(-boundary // self.windows.block_size)
            for boundary in self.boundaries
        )


def last_boundary(num_tokens: int, request: RequestRecord, projections: Projections) -> int:
    """Return the length of the longest prefix after which a load may end.

    The prefix has at most `num_tokens` tokens, as many as the hit.
    """

    def is_stored(page: int, end_token: int) -> bool:
        return slot_of_page(page, end_token, request, projections) != NO_SLOT

    return projections.geometry.windows.last_boundary(num_tokens, projections.configuration.chunk_size, is_stored)


def slot_of_page(page: int, end_token: int, request: RequestRecord, projections: Projections) -> int:
    """Return a slot in which the page is valid for a prefix of `end_token` tokens; `NO_SLOT` if there is none."""
    geometry, keys = projections.geometry, request.keys
    chunk, place = geometry.place_of(page, geometry.num_chunks_touched(end_token))
    slots = projections.pool.get(keys[chunk]) if chunk < len(keys) else None
    if slots is not None and slots[place] != NO_SLOT:
        return slots[place]
    tail = request.tail
    if tail is None or not tail.is_saved or end_token > tail.end_token:
        return NO_SLOT
    place = page - geometry.pages_spanning(tail.first_token, 1).start
    return tail.slots[place] if 0 <= place < len(tail.slots) else NO_SLOT
