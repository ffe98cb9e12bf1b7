"""In which order chunks were last touched: the order in which a full pool lets them go.

A request that grows touches its whole prefix again and again, and hardly anybody ever asks for the order. So touches
wait until somebody does, and a longer prefix of the same request takes the place of the shorter one. It must not know
why chunks are touched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence

_MAX_WAITING = 8192
"""Keys that may wait, so that taking them up stays short and their memory small."""


class Recency:
    """Chunk keys, oldest first: those that are in `kept` and not in `exempt`, which others change.

    Whoever adds a key to `kept`, or takes one from `exempt`, touches it; what leaves `kept`, or joins `exempt`, is to be
    discarded.
    """

    def __init__(self, kept: Container[bytes], exempt: Container[bytes]) -> None:
        self._kept = kept
        self._exempt = exempt
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: list[Sequence[bytes]] = []
        """Touches since the order was last asked for."""
        self._num_waiting = 0
        self._place_of_prefix: dict[str, int] = {}
        """Request id -> where among these its last prefix is."""

    def __iter__(self) -> Iterator[bytes]:
        self._take_up()
        return iter(self._order)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make them the youngest, in chunk order: deeper chunks count as older, for they are worth nothing alone."""
        self._waiting.append(keys)
        self._num_waiting += len(keys)
        if self._num_waiting > _MAX_WAITING:
            self._take_up()

    def touch_prefix(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Touch what a request begins with. `keys` is the caller's no more."""
        place = self._place_of_prefix.get(request_id)
        if place is not None:
            earlier = self._waiting[place]
            # A key stands for everything before it, so one that is equal says that all of them are touched anew.
            if len(earlier) <= len(keys) and earlier[-1] == keys[len(earlier) - 1]:
                self._waiting[place] = ()
                self._num_waiting -= len(earlier)
        if keys:
            self._place_of_prefix[request_id] = len(self._waiting)
            self.touch(keys)

    def discard(self, key: bytes) -> None:
        """Forget a key until it is touched again."""
        self._order.pop(key, None)

    def restore(self, keys: Iterable[bytes]) -> None:
        """Let this be the order."""
        self._forget_waiting()
        self._order.clear()
        self._order.update(dict.fromkeys(keys))

    def _take_up(self) -> None:
        order, kept, exempt = self._order, self._kept, self._exempt
        for keys in self._waiting:
            for key in reversed(keys):
                if key in order:
                    order.move_to_end(key)
                elif key in kept and key not in exempt:
                    order[key] = None
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._num_waiting = 0
        self._place_of_prefix.clear()
