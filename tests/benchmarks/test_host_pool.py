"""What benchmarks of the host pool count is what happened."""

from __future__ import annotations

import itertools

import pytest
from benchmarks import full_pool
from benchmarks.hook_watch import HookWatch
from benchmarks.tracker_memory import pool_memory


class Hooks:
    """A connector with two hooks, of which one calls the other."""

    def on_new_request(self, names: list[str]) -> None:
        """Two calls of C functions for each name."""
        for name in names:
            name.upper().lower()

    def request_finished(self, names: list[str]) -> None:
        """One call, and what the other hook calls."""
        self.on_new_request(names)


def test_calls_are_counted_in_the_hook_that_makes_the_most() -> None:
    """A hook that another hook calls belongs to that one."""
    hooks = Hooks()
    watch = HookWatch(hooks)
    watch.counts_calls = True
    counts = []
    for num_names in (10, 20, 30):
        watch.clear()
        hooks.on_new_request([])
        hooks.on_new_request(["a"] * num_names)
        counts.append(watch.most_calls)
    assert [after - before for before, after in itertools.pairwise(counts)] == [20, 20]
    hooks.request_finished(["a"] * 30)
    assert watch.most_calls > counts[-1]
    assert watch.longest_ns == 0


def test_time_is_measured_where_calls_are_not_counted() -> None:
    """The two are never measured together."""
    hooks = Hooks()
    watch = HookWatch(hooks)
    hooks.request_finished(["a"])
    assert watch.longest_ns > 0
    assert watch.most_calls == 0


@pytest.mark.scheduler
def test_the_longest_hook_makes_the_same_calls_in_every_run() -> None:
    """Times differ between two runs, calls do not; more chunks are more calls."""
    runs = [
        {figure.contender: figure.value for figure in full_pool.measure(1024) if figure.what == full_pool.CALLS}
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert runs[0]["KVLedgerConnector, chunk 16"] > runs[0]["KVLedgerConnector, chunk 256"] > 0


@pytest.mark.parametrize("prompt_chunks", [1, 75])
def test_the_pool_that_is_measured_is_full(prompt_chunks: int) -> None:
    """Every prompt's chunks are in it, and no request is left."""
    memory = pool_memory(3000, prompt_chunks)
    assert memory.num_chunks == 3000
    assert memory.num_bytes > 3000 * 16
    assert memory.pause_ms > 0
