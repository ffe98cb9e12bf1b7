"""The LRU stack agrees with a list of keys in the order of their use, and stays small."""

from __future__ import annotations

import random
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from kvledger.adapters.tools.pool_sizes import LruStack

_ENDLESS = 1 << 40

paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)
"""A prompt: which branch it takes at each chunk. Equal beginnings are equal prefixes."""
operations = st.lists(st.tuples(st.sampled_from(["use", "use", "use", "forget", "clear"]), paths), max_size=60)


def prefix(path: list[int]) -> list[bytes]:
    """A key for each chunk, which names all chunks before it."""
    return [bytes(path[:end]) for end in range(1, len(path) + 1)]


def depths(stack: LruStack, keys: list[bytes]) -> list[int]:
    """For each key up to the first missing one, how many keys a pool must hold so that it is in it."""
    return [num_above + place for num_above, num_keys in stack.runs(keys) for place in range(1, num_keys + 1)]


@given(operations, paths)
def test_the_depth_of_each_key_is_its_place_in_the_order_of_use(
    steps: list[tuple[str, list[int]]], asked: list[int]
) -> None:
    """Without sampling, compared with a list that is sorted anew at each use."""
    stack, order = LruStack(_ENDLESS), list[bytes]()
    for name, path in steps:
        keys = prefix(path)
        if name == "use":
            stack.use(keys, new=keys)
            order = [*keys, *(key for key in order if key not in keys)]
        elif name == "forget":
            stack.forget(keys[-1:])
            order = [key for key in order if key != keys[-1]]
        else:
            stack.clear()
            order = []
        assert len(stack) == len(order)
    expected = []
    for key in prefix(asked):
        if key not in order:
            break
        expected.append(order.index(key) + 1)
    assert depths(stack, prefix(asked)) == expected


def test_a_key_that_was_never_added_is_not_added_by_a_use() -> None:
    """A prompt that was computed and not saved is in no pool."""
    stack = LruStack(_ENDLESS)
    stack.use([b"a", b"b"], new=[b"a"])
    assert b"a" in stack
    assert b"b" not in stack


def test_numbers_of_uses_begin_anew_without_changing_the_order() -> None:
    """The tree that counts them does not grow with the number of uses."""
    stack = LruStack(_ENDLESS)
    for number in range(5_000):
        key = bytes([number % 7])
        stack.use([key], new=[key])
    assert [depths(stack, [bytes([number % 7])]) for number in range(4_999, 4_992, -1)] == [
        [each] for each in range(1, 8)
    ]
    assert len(stack._tree) < 2_000


def test_what_has_sunk_below_the_largest_pool_is_forgotten_first() -> None:
    """So a small pool is followed without sampling, however many chunks its log has."""
    stack = LruStack(100, max_keys=400)
    for number in range(10_000):
        key = number.to_bytes(8, "big")
        stack.use([key], new=[key])
        assert len(stack) <= 400
    assert stack.one_of == 1
    assert all((10_000 - number).to_bytes(8, "big") in stack for number in range(1, 101))


def sampled_stack(seed: int) -> tuple[LruStack, list[bytes]]:
    """A stack of at most 1,000 keys, and the 50,000 that were used."""
    stack, draw = LruStack(_ENDLESS, max_keys=1_000), random.Random(seed)
    keys = [draw.randbytes(16) for _ in range(50_000)]
    for key in keys:
        sampled = [[key][place] for place in stack.kept_places([key])]
        stack.use(sampled, new=sampled)
        assert len(stack) <= 1_000
    return stack, keys


def test_memory_is_bounded_by_following_fewer_keys() -> None:
    """Half of them at a time. Those that are left are the sample of all keys so far."""
    stack, keys = sampled_stack(seed=1)
    assert stack.one_of == 64
    kept = [key for key in keys if not crc32(key) & stack.mask]
    assert len(kept) == len(stack) > 500
    assert all(key in stack for key in kept)
    assert len(stack._tree) < 5_000


def test_a_sampled_depth_is_right_within_a_few_per_cent() -> None:
    """Of a stack of 50,000 keys about 800 are kept; the seed is fixed."""
    stack, keys = sampled_stack(seed=2)
    for depth in (10_000, 20_000, 40_000):
        key = next(key for key in reversed(keys[: len(keys) - depth + 1]) if key in stack)
        exact = len(keys) - keys.index(key)
        (estimated,) = depths(stack, [key])
        assert abs(estimated * stack.one_of / exact - 1) < 0.1


def test_keys_that_were_chosen_to_have_one_hash_do_not_fill_memory() -> None:
    """A log may hold any keys. Then nothing is remembered, and following goes on."""
    stack = LruStack(_ENDLESS, max_keys=16)
    keys = [key for key in (number.to_bytes(4, "big") for number in range(1 << 16)) if not crc32(key) & 0xFF][:64]
    stack.mask = (1 << 24) - 1
    for key in keys:
        stack._use_of[key] = 1
    stack.use(keys, new=keys)
    assert len(stack) == 0
