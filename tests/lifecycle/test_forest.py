"""The forest evicts in the order of a plain list in which each use of a prefix makes all its chunks the youngest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

import attrs
import pytest

from kvledger.lifecycle.projections.forest import Forest, Queue


@attrs.define
class Pool:
    """A forest, and the plain list that it is compared with: chunk -> when it was used last."""

    stored: dict[bytes, bytes] = attrs.field(factory=dict)
    parent_of: dict[bytes, bytes | None] = attrs.field(factory=dict)
    queue: Queue = attrs.field(factory=Queue)
    held: list[Sequence[bytes]] = attrs.field(factory=list)
    used: dict[bytes, int] = attrs.field(factory=dict)
    now: int = 0
    forest: Forest = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.forest = Forest(self.parent_of, self.queue, self.stored)
        for keys in self.held:
            self.forest.count_holder(keys[-1])

    def use(self, keys: Sequence[bytes]) -> None:
        """A request with these chunks ends, for instance."""
        self.forest.use(keys)
        self._use(keys)

    def _use(self, keys: Sequence[bytes]) -> None:
        self.now += 1
        self.used |= dict.fromkeys(keys, self.now)

    def hold(self, keys: Sequence[bytes]) -> None:
        """A save of these chunks begins, or a lookup promises them."""
        assert self.forest.hold(keys, len(keys)) == keys[-1]
        self.held.append(keys)

    def let_go(self, number: int) -> None:
        """It ends."""
        keys = self.held.pop(number)
        self.forest.let_go(keys[-1])
        self._use(keys)

    def store(self, keys: Sequence[bytes]) -> None:
        """Chunks come into the pool."""
        for key in keys:
            self.stored[key] = b""
            self.forest.add(key)

    def evict(self, keys: Sequence[bytes]) -> None:
        """Chunks leave it."""
        for key in keys:
            del self.stored[key]
        self.forest.remove(keys)

    def taint(self, key: bytes) -> None:
        """The pool loses a chunk, wherever it is."""
        del self.stored[key]
        self.forest.forget(key)

    def expected(self, spare: Sequence[bytes] = ()) -> list[bytes]:
        """Whoever leaves, in the order of the plain list: the longest unused first, of a prefix the deepest."""
        stays = {*spare, *(key for keys in self.held for key in keys)}
        return sorted(self.stored.keys() - stays, key=lambda key: (self.used[key], -len(key)))

    def again(self) -> Pool:
        """As it is after it was written and read."""
        return Pool(dict(self.stored), dict(self.parent_of), Queue(self.queue), list(self.held), {}, self.now)


def prompt(draw: random.Random) -> list[bytes]:
    """The keys of a prompt; many begin alike. A key is as long as the prefix that it stands for."""
    text = draw.choice("abc")
    keys = [text.encode()]
    for _ in range(draw.randrange(12)):
        text += draw.choice("xyz") if draw.random() < 0.15 else "."
        keys.append(text.encode())
    return keys


@pytest.mark.parametrize("seed", range(60))
def test_chunks_leave_as_from_a_plain_list(seed: int) -> None:
    """Whatever is saved, promised, used, tainted and evicted, in whatever order."""
    draw, pool = random.Random(seed), Pool()
    for _ in range(400):
        keys = prompt(draw)
        match draw.choices(("save", "promise", "end", "use", "taint", "evict"), (30, 10, 35, 10, 2, 13))[0]:
            case "save" | "promise":
                pool.hold(keys[: draw.randint(1, len(keys))])
            case "end" if pool.held:
                number = draw.randrange(len(pool.held))
                if draw.random() < 0.7:  # else it was no save, or failed
                    pool.store(draw.choice((pool.held[number], pool.held[number][-2:])))
                pool.let_go(number)
            case "use":
                pool.use(keys)
            case "taint" if pool.stored:
                pool.taint(draw.choice(sorted(pool.stored)))
            case "evict":
                spare = pool.forest.deepest(keys, draw.randint(0, len(keys)))
                leaving = list(pool.forest.leaving(spare))
                assert leaving == pool.expected(pool.forest.path(spare))
                assert list(pool.again().forest.leaving(spare)) == leaving, "written and read, it is another one"
                assert pool.forest.may_leave(leaving)
                pool.evict(leaving[: draw.randrange(4)])
    ends = pool.parent_of.keys() - set(pool.parent_of.values())
    assert ends <= {*pool.stored, *(keys[-1] for keys in pool.held)}, "nodes stay for nobody"


def test_nothing_is_left_when_all_have_let_go_and_everything_has_left() -> None:
    """No ghost, no place, no node."""
    draw, pool = random.Random(1), Pool()
    for _ in range(200):
        pool.hold(prompt(draw))
        pool.store(pool.held[-1][:: draw.choice((1, 2))])
    for _ in range(200):
        pool.let_go(0)
    assert pool.parent_of
    pool.evict(list(pool.forest.leaving(None)))
    assert (pool.stored, pool.parent_of, list(pool.queue)) == ({}, {}, [])


def test_a_prefix_has_one_place_however_long_it_grows() -> None:
    """A chunk gives up its place when the next one comes."""
    pool, keys = Pool(), [b"a" * length for length in range(1, 1001)]
    for end in range(1, 1001):
        pool.hold(keys[:end])
        pool.store(keys[end - 1 : end])
        pool.let_go(0)
    assert list(pool.queue) == [keys[-1]]


def test_a_spared_chunk_stays_with_all_that_is_before_it() -> None:
    """A request does not evict its own beginning."""
    pool, keys = Pool(), [b"a" * length for length in range(1, 6)]
    pool.hold(keys)
    pool.store(keys)
    pool.let_go(0)
    assert list(pool.forest.leaving(keys[2])) == [keys[4], keys[3]]


def test_who_stays_leaves_after_all_others_and_asking_changes_nothing() -> None:
    """An extension's wish; the second answer is the first."""
    pool = Pool()
    for text in (b"aaaa", b"bb"):
        pool.hold([text[:length] for length in range(1, len(text) + 1)])
        pool.store(pool.held[0])
        pool.let_go(0)
    kept = {b"aa", b"a"}
    for _ in range(2):
        leaving = pool.forest.leaving(None, kept.__contains__)
        assert list(leaving) == [b"aaaa", b"aaa", b"bb", b"b", b"aa", b"a"]
    assert list(islice(pool.forest.leaving(None), 5)) == [b"aaaa", b"aaa", b"aa", b"a", b"bb"]


@pytest.mark.parametrize("seed", range(20))
def test_what_an_extension_keeps_changes_the_order_of_no_others(seed: int) -> None:
    """Its chunks stay in front of the queue, and the places behind them are taken over where they are."""
    draw, pool = random.Random(seed), Pool()
    for _ in range(400):
        pool.hold(prompt(draw))
        pool.store(pool.held[0])
        pool.let_go(0)
        if draw.random() < 0.5:
            assert list(pool.forest.leaving(None)) == pool.expected()
            pool.evict(list(pool.forest.leaving(None, lambda key: key[:1] == b"a"))[: draw.randrange(4)])


def test_chunks_leave_in_no_order_but_from_the_end() -> None:
    """None that somebody holds, or that is not there, or twice, or before those after it."""
    pool, keys = Pool(), [b"a" * length for length in range(1, 5)]
    pool.hold(keys)
    pool.store(keys)
    assert not pool.forest.may_leave([keys[3]])
    pool.let_go(0)
    pool.taint(keys[2])
    wrong = ([keys[0]], [keys[1]], [keys[3], keys[3]], [keys[3], keys[0]], [keys[2]], [b"x"])
    assert not any(map(pool.forest.may_leave, wrong))
    assert pool.forest.may_leave([keys[3], keys[1], keys[0]])


def test_a_key_that_a_log_names_twice_in_a_prompt_keeps_nothing() -> None:
    """The one that is held is the last one, so nothing stays behind it."""
    pool = Pool()
    pool.hold([b"a", b"b", b"c", b"b"])
    pool.store([b"a", b"b"])
    pool.forest.let_go(b"b")
    assert list(pool.forest.leaving(None)) == [b"b", b"a"]


def test_a_log_that_names_keys_in_a_circle_makes_none() -> None:
    """A walk over a circle would never end."""
    pool = Pool()
    for keys in ([b"a", b"b", b"a"], [b"b", b"a", b"b", b"c"], [b"c", b"c", b"a"]):
        pool.forest.hold(keys, len(keys))
        pool.store(keys)
        pool.forest.let_go(keys[-1])
    pool.evict(list(pool.forest.leaving(None)))
    assert pool.stored == {}


def test_a_log_that_names_an_ancestor_behind_new_keys_makes_no_circle() -> None:
    """A bisection for where the new keys begin would pass over it, and give it a parent that descends from it."""
    pool = Pool()
    pool.hold([b"root", b"child"])
    pool.hold([b"child", b"1", b"2", b"root", b"3", b"4", b"5", b"6", b"last"])
    node: bytes | None = b"last"
    for _ in range(20):
        node = None if node is None else pool.forest.parent(node)
    assert node is None
