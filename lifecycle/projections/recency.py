"""In which order chunks were last touched: the order in which a full pool lets them go.

A request that grows touches its whole prefix again and again, and hardly anybody ever asks for the order. So touches
wait until somebody does, and a longer prefix of the same request takes the place of the shorter one. It must not know
why chunks are touched.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

_MAX_WAITING = 16_384
"""Keys of prefixes that may wait."""
_NUM_LEFT = _MAX_WAITING * 7 // 8
"""How many are left when there were too many; the oldest are dropped."""


class Recency:
    """Chunk keys, oldest first. Deeper chunks count as older: without its beginning a prefix is worth nothing."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict.fromkeys(keys)
        """Every key, in the order of those touches that do not wait."""
        self._waiting: deque[Sequence[bytes]] = deque()
        """Touches in their order: prefixes are lists of their own, which are emptied when they wait no more."""
        self._num_waiting = 0
        """Keys of the prefixes among them."""
        self._prefix_of: dict[int, list[bytes]] = {}
        """Life of a request -> its last prefix."""

    def __iter__(self) -> Iterator[bytes]:
        self._take_up(0)
        return iter(self._order)

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    def add(self, keys: tuple[bytes, ...]) -> None:
        """Make chunks the youngest, whether they were there or not."""
        order = self._order
        for key in reversed(keys):
            order[key] = None
        self._waiting.append(keys)

    def touch_prefix(self, ordinal: int, keys: list[bytes]) -> None:
        """Make what a request begins with the youngest, as far as it is there. The list is the caller's no more."""
        earlier = self._prefix_of.get(ordinal)
        # A key stands for everything before it, so one that is equal says that all of them are touched anew.
        if earlier and len(earlier) <= len(keys) and earlier[-1] == keys[len(earlier) - 1]:
            self._num_waiting -= len(earlier)
            earlier.clear()
        self._prefix_of[ordinal] = keys
        self._waiting.append(keys)
        self._num_waiting += len(keys)
        if self._num_waiting > _MAX_WAITING:
            self._take_up(_NUM_LEFT)

    def discard(self, key: bytes) -> None:
        """Forget a key until it is added again."""
        self._order.pop(key, None)

    def _take_up(self, num_left: int) -> None:
        order, waiting = self._order, self._waiting
        while waiting and (not num_left or self._num_waiting > num_left):
            keys = waiting.popleft()
            # Without a line of Python for each key; some may be gone, or not be there yet.
            deque(map(order.move_to_end, filter(order.__contains__, reversed(keys))), 0)
            if isinstance(keys, list):
                self._num_waiting -= len(keys)
                keys.clear()
        self._prefix_of = {ordinal: keys for ordinal, keys in self._prefix_of.items() if keys}
