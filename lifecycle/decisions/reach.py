"""Which pages of groups with a window can still be read when something is saved, and are worth it.

Two sets: what the next token sees is the request's own. What its windows have left in this very step is free already,
but intact until the step's forward; of that, what makes a boundary loadable is worth a copy: the end of the last whole
chunk, and a junction, where an earlier lookup of the same request was cut short for want of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvledger.lifecycle.events import NULL_BLOCK
from kvledger.lifecycle.windows import Windows


class Reach(msgspec.Struct, frozen=True):
    """What can be read when `num_settled_tokens` are settled; `left_since` as `BlockTable` tells it, or None."""

    windows: Windows
    num_settled_tokens: int
    left_since: int | None = None
    boundaries: tuple[int, ...] = ()

    def keeps(self, page: int, block_ids: Sequence[int]) -> bool:
        """Whether the page is there to be copied, and worth it. Of full attention always."""
        block, group = divmod(page, self.windows.num_groups)
        if not self.windows.sizes[group]:
            return True
        if page >= len(block_ids) or block_ids[page] == NULL_BLOCK:
            return False
        return self._is_seen(block, group) or self._is_worth(block, group)

    def has_left(self, page: int) -> bool:
        """Whether a page that is kept must be copied before the forward, because its block is free."""
        block, group = divmod(page, self.windows.num_groups)
        return not self._is_seen(block, group)

    def _is_seen(self, block: int, group: int) -> bool:
        return block >= self.windows.first_block(group, self.num_settled_tokens)

    def _is_worth(self, block: int, group: int) -> bool:
        if self.left_since is None or block < self.windows.first_block(group, self.left_since):
            return False
        return any(
            self.windows.first_block(group, boundary) <= block < -(-boundary // self.windows.block_size)
            for boundary in self.boundaries
        )
