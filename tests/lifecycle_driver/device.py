"""A device and a host without bytes: every page remembers which tokens' KV was written into it.

So a wrong page is seen when it is loaded, not when a model talks nonsense. It must not know the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

Content = tuple[object, ...]
"""Names a token together with everything before it."""


@attrs.define
class Device:
    """Blocks with reference counts and a prefix cache, and the host pool's slots."""

    block_size: int
    num_blocks: int
    pages: dict[int, list[Content | None]] = attrs.field(factory=dict)
    slots: dict[int, list[Content | None]] = attrs.field(factory=dict)
    free: list[int] = attrs.field(init=False)
    references: dict[int, int] = attrs.field(factory=dict)
    cached: dict[Content, int] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.free = list(range(self.num_blocks))

    def local_hit(self, contents: Sequence[Content]) -> list[int]:
        """Blocks of the longest cached prefix that leaves the last token to compute."""
        found: list[int] = []
        for end in range(self.block_size, len(contents), self.block_size):
            block = self.cached.get(contents[end - 1])
            if block is None:
                break
            found.append(block)
        return found

    def num_free_besides(self, blocks: Iterable[int]) -> int:
        """Blocks that could be taken if `blocks` were taken too."""
        return len(set(self.free) - set(blocks))

    def share(self, blocks: Iterable[int]) -> None:
        """Take blocks with what is in them."""
        for block in blocks:
            if block in self.free:
                self.free.remove(block)
            self.references[block] = self.references.get(block, 0) + 1

    def take(self, count: int) -> list[int]:
        """Take blocks; what was cached in them is forgotten, what was written stays until it is overwritten."""
        taken = [self.free.pop(0) for _ in range(count)]
        for block in taken:
            self.references[block] = 1
            self.forget([block])
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Drop references; free blocks keep their content."""
        for block in reversed(list(blocks)):
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Take blocks out of the prefix cache."""
        gone = set(blocks)
        self.cached = {content: block for content, block in self.cached.items() if block not in gone}

    def remember(self, contents: Sequence[Content], blocks: Sequence[int]) -> None:
        """Put full blocks into the prefix cache."""
        for index in range(len(contents) // self.block_size):
            self.cached.setdefault(contents[(index + 1) * self.block_size - 1], blocks[index])

    def holds(self, contents: Sequence[Content], blocks: Sequence[int]) -> bool:
        """Whether the blocks hold exactly these tokens from the first on."""
        return all(
            self._page(blocks[position // self.block_size])[position % self.block_size] == content
            for position, content in enumerate(contents)
        )

    def write(self, position: int, content: Content, blocks: Sequence[int]) -> None:
        """Compute one token."""
        self._page(blocks[position // self.block_size])[position % self.block_size] = content

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy pages to the host."""
        for block, slot in zip(blocks, slots, strict=True):
            self.slots[slot] = list(self._page(block))

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy pages to the device."""
        for block, slot in zip(blocks, slots, strict=True):
            self.pages[block] = list(self.slots[slot])

    def _page(self, block: int) -> list[Content | None]:
        return self.pages.setdefault(block, [None] * self.block_size)
