"""The order in which the host pool evicts chunks: a forest of chunk keys, and a queue of the keys that may leave.

A key hashes its chunk and all chunks before it, so the keys of all prompts form trees: the parent of a key is the key
of the chunk before it. A chunk is useless without the chunks before it. Therefore only leaves are evicted. A chunk
with a holder is not evicted, and a holder protects a whole prefix by holding the last key of the prefix.

The queue works like vLLM's queue of free blocks (`v1/core/block_pool.py`). A leaf with a holder is not in the queue.
When its last holder lets it go, it joins the queue at the end. When a leaf is evicted, its parent gets the leaf's
place. When a leaf gets a child, the leaf loses its place, because the child will get a later one. A prefix therefore
has one place, whatever its length. The order is as if every use moved all chunks of the prefix to the end of the queue
one by one, beginning with the last chunk.

A *ghost* is a node whose chunk is not in the pool. The ghost, or a node after it, has a holder: a save in flight that
will add the chunk, or a preempted request that will come back for it. A ghost protects the chunks before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain, takewhile


class Queue:
    """Keys in the order in which they are evicted, the first one first."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self.order: OrderedDict[bytes, None] = OrderedDict.fromkeys(keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.order)


class _Walk:
    """Progress of one iteration over the chunks that may leave."""

    def __init__(self, spare: bytes | None, stays: Callable[[bytes], bool] | None) -> None:
        self.spare = spare
        self.stays = stays
        self.num_left: dict[bytes, int] = {}
        """Node with several children, or with its own place → its children that remain if all found chunks leave."""
        self.passed: set[bytes] = set()
        """Nodes that come before their last child in the queue. Each of them leaves right after that child."""
        self.put_off: list[bytes] = []
        """Leaves that are evicted after all others."""


class Forest:
    """Trees of chunk keys. Each chunk in the pool, each ghost, and each chunk before one of these is a node."""

    def __init__(self, parent_of: dict[bytes, bytes | None], queue: Queue, committed: Container[bytes]) -> None:
        """Create the forest from folded state, which later folds change in place.

        Args:
            parent_of: node → the node before it, None for the first chunk of a prompt. Parents come first.
            queue: the leaves without a holder, and other nodes that were used later than all of their children.
            committed: the keys of the chunks in the pool.
        """
        self._parent_of = parent_of
        self._order = queue.order
        self._committed = committed
        self._leaves = set(parent_of)
        self._num_more: dict[bytes, int] = {}
        """Node → number of its children beyond the first. Most nodes have one child and are left out."""
        self._num_holders: dict[bytes, int] = {}
        for parent in parent_of.values():
            if parent is not None:
                self._add_child(parent)

    def parent(self, key: bytes) -> bytes | None:
        """Return the key before this one; None for a prompt's first key and for keys that are no nodes."""
        return self._parent_of.get(key)

    def path(self, key: bytes | None) -> list[bytes]:
        """Return the keys of the prefix that ends with a node, the first key first."""
        path = []
        while key is not None:
            path.append(key)
            key = self._parent_of.get(key)
        return path[::-1]

    def deepest(self, keys: Sequence[bytes], end: int) -> bytes | None:
        """Return the last node among the first `end` keys of a prompt; None if there is none."""
        # All keys before a node are nodes, so bisection finds the last one.
        place = bisect_left(keys, 1, 0, min(end, len(keys)), key=lambda key: key not in self._parent_of)
        return keys[place - 1] if place else None

    # --- holding -------------------------------------------------------------------------------

    def hold(self, keys: Sequence[bytes], end: int) -> bytes | None:
        """Hold the first `end` keys of a prompt, whether their chunks are in the pool or not.

        Returns:
            The last of these keys, for `let_go`; None if there are no keys.
        """
        end = min(end, len(keys))
        if end <= 0:
            return None
        key = keys[end - 1]
        if key not in self._parent_of:
            self._grow(keys, end)
        self.count_holder(key)
        return key

    def count_holder(self, key: bytes) -> None:
        """Count another holder of a node."""
        self._num_holders[key] = self._num_holders.get(key, 0) + 1
        self._order.pop(key, None)

    def _grow(self, keys: Sequence[bytes], end: int) -> None:
        """Make the first `end` keys nodes. A key keeps its first parent, so no log can create a cycle."""
        parent_of = self._parent_of
        first = end - 1
        while first and keys[first - 1] not in parent_of:  # no bisection: a log may name nodes after others
            first -= 1
        parent = keys[first - 1] if first else None
        new = dict.fromkeys(keys[first:end])
        new[keys[end - 1]] = new.pop(keys[end - 1])  # the last one, even if a log repeats a key
        parent_of.update(zip(new, chain((parent,), new), strict=False))
        self._leaves.add(keys[end - 1])
        if parent is not None:
            self._add_child(parent)
            self._order.pop(parent, None)

    def _add_child(self, parent: bytes) -> None:
        if parent in self._leaves:
            self._leaves.remove(parent)
        else:
            self._num_more[parent] = self._num_more.get(parent, 0) + 1

    def let_go(self, key: bytes) -> None:
        """Remove a holder of a node. If no holder remains, the node's prefix becomes the most recently used one."""
        num_left = self._num_holders.get(key, 1) - 1
        if num_left:
            self._num_holders[key] = num_left
            return
        self._num_holders.pop(key, None)
        is_ghost = key in self._leaves and key not in self._committed
        self._append(self._cut(key) if is_ghost else key)

    def _cut(self, leaf: bytes) -> bytes | None:
        """Remove a leaf, and the ghosts before it that nothing needs any more. Return the node before all of these."""
        parent_of, num_more = self._parent_of, self._num_more
        committed, num_holders, order = self._committed, self._num_holders, self._order
        self._leaves.remove(leaf)
        node = parent_of.pop(leaf)
        while node is not None and node not in num_more:
            if node in committed or node in num_holders or node in order:
                self._leaves.add(node)
                return node
            node = parent_of.pop(node)
        if node is not None:
            num_more[node] -= 1
            if not num_more[node]:
                del num_more[node]
        return node

    # --- use -----------------------------------------------------------------------------------

    def use(self, keys: Sequence[bytes]) -> None:
        """Mark the chunks of a prompt as the most recently used ones. Keys that are no nodes are ignored."""
        self._append(self.deepest(keys, len(keys)))

    def _append(self, key: bytes | None) -> None:
        node = self._bearer(key)
        if node is not None:
            self._order[node] = None
            self._order.move_to_end(node)

    def _bearer(self, node: bytes | None) -> bytes | None:
        """Return the node to queue for this node: for a chunk the node itself, for a ghost the last chunk before it.

        Returns None if there is no such chunk, or if a holder keeps the node out of the queue.
        """
        while node is not None and node not in self._committed and node not in self._num_holders:
            node = self._parent_of[node]
        return None if node in self._num_holders else node

    def add(self, key: bytes) -> None:
        """Make the key of a new chunk a node, if it is not one already."""
        if key not in self._parent_of:
            self._parent_of[key] = None
            self._leaves.add(key)
            self._append(key)

    # --- leaving -------------------------------------------------------------------------------

    def leaving(self, spare: bytes | None, stays: Callable[[bytes], bool] | None = None) -> Iterator[bytes]:
        """Iterate over the chunks of the pool that may leave, in eviction order. Changes nothing.

        Args:
            spare: a node that stays, and with it all nodes before it.
            stays: key → whether this leaf is evicted after all others. Default: no leaf is.
        """
        walk = _Walk(spare, stays)
        return chain(self._leaving(self._order, walk), self._put_off(walk))

    def _put_off(self, walk: _Walk) -> Iterator[bytes]:
        walk.stays = None
        yield from self._leaving(walk.put_off, walk)

    def _leaving(self, starts: Iterable[bytes], walk: _Walk) -> Iterator[bytes]:
        parent_of, num_more, num_holders = self._parent_of, self._num_more, self._num_holders
        order, leaves, committed = self._order, self._leaves, self._committed
        num_left, passed, spare, stays = walk.num_left, walk.passed, walk.spare, walk.stays
        for start in starts:
            if num_left.get(start, 0 if start in leaves else 1):
                passed.add(start)
                continue
            key = start
            while key != spare and key not in num_holders:
                if stays is not None and key in committed and stays(key):
                    num_left[key] = 0
                    walk.put_off.append(key)
                    break
                if key in committed:
                    yield key
                parent = parent_of[key]
                if parent is None:
                    break
                if parent in num_more:
                    num_left[parent] = num_left.get(parent, num_more[parent] + 1) - 1
                    if num_left[parent]:
                        break
                if parent in order and parent not in passed:  # its own place comes later
                    num_left[parent] = 0
                    break
                key = parent

    def may_leave(self, keys: Sequence[bytes]) -> bool:
        """Whether these chunks of the pool may be evicted in this order.

        No chunk may have a holder. All chunks that continue a chunk must come before it in `keys`.
        """
        num_left: dict[bytes, int] = {}
        for key in keys:
            is_idle = key in self._committed and key not in self._num_holders
            if not is_idle or num_left.get(key, 0 if key in self._leaves else 1):
                return False
            num_left[key] = 1  # a repeated key must not leave twice
            node = self._parent_of[key]
            while node is not None:
                num_left[node] = num_left.get(node, self._num_more.get(node, 0) + 1) - 1
                if num_left[node] or node in self._committed or node in self._num_holders:
                    break
                node = self._parent_of[node]
        return True

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove evicted chunks. Usually they are at the front of the queue.

        The place of a removed chunk goes to the chunk before it in the prompt. If a removed chunk has a holder or a
        child, its node stays as a ghost.
        """
        order, leaves, gone = self._order, self._leaves, set(keys)
        num_places = sum(map(order.__contains__, gone))
        front: dict[bytes, None] = {}
        """Nodes that keep their place, or get the place of a removed chunk."""
        while num_places:
            first, _ = order.popitem(last=False)
            num_places -= first in gone
            node = self._bearer(self._cut(first) if first in leaves and first not in self._committed else first)
            # A node with children needs a place only after an entry that stays, which may be one of the children.
            if node is not None and (node in leaves or front) and node not in order:
                front.pop(node, None)
                front[node] = None
        for key in reversed(front):
            order[key] = None
            order.move_to_end(key, last=False)

    def forget(self, key: bytes) -> None:
        """Remove a chunk that the pool has lost, anywhere in the queue. The preceding chunk gets its place."""
        if key in self._num_holders or key not in self._parent_of:
            return
        has_place = key in self._order
        later = list(takewhile(key.__ne__, reversed(self._order))) if has_place else []
        """Nodes after the chunk in the queue, the last one first. Usually none: the chunk has just been used."""
        self._order.pop(key, None)
        node = self._bearer(self._cut(key) if key in self._leaves else key)
        if has_place and node not in later:
            self._append(node)
            for other in reversed(later):
                self._order.move_to_end(other)
