"""A prefix that is loaded several times at once is named by `why` and `stats`, and so is the load that a lookup awaits.

vllm#29087: a burst loads one prefix once per request. No command said so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lifecycle_driver import Driver, keys_of
from lifecycle_driver.concerned import check_stories
from stored_logs import write_log

from kvledger.lifecycle import events as e

PREFIX = keys_of("prefix", 4)


def burst(*, awaits_shared_loads: bool) -> Driver:
    """Requests `a`, `b` and `c` with one prefix of 64 tokens on the host; `c` shares half of it."""
    driver = Driver(
        chunk_size=16,
        num_slots=64,
        async_load_tokens=0,
        max_deferred_lookups=2,
        awaits_shared_loads=awaits_shared_loads,
    )
    driver.save_prefix("earlier", PREFIX, first_block=900)
    for number, name in enumerate("abc"):
        keys = PREFIX if name != "c" else PREFIX[:2]
        num_tokens = len(keys) * 16 + 10
        driver.arrive(name, num_tokens, keys)
        answer = driver.poll(name, 0, num_tokens)
        if isinstance(answer, e.LookupAnswered):
            driver.allocate(name, range(10 * number, 10 * number + 5), answer.num_external_tokens)
        else:
            driver.poll(name, 0, num_tokens)
    driver.ledger.commit()
    check_stories(driver.sink.events(), driver.configuration)
    return driver


def test_why_names_the_load_that_brought_the_same_tokens(run: Any, tmp_path: Path) -> None:
    """The tokens, the other request, its job and its event."""
    driver = burst(awaits_shared_loads=False)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    first = next(sequence for sequence, event in driver.sink.events() if isinstance(event, e.LoadIssued))
    out = run("why", log, "b").out
    words = f"tokens 0–63 (chunks 0–3): duplicated, because load 2 of a (event {first}) was already loading them"
    assert words in " ".join(out.split())
    out = run("why", log, "a").out
    assert "duplicated" not in out


def test_stats_name_the_prefixes_that_were_duplicated(run: Any, tmp_path: Path) -> None:
    """By the key of the last chunk that they have in common, with tokens."""
    driver = burst(awaits_shared_loads=False)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    out = run("stats", log).out
    text = " ".join(out.split())
    assert f"64 tokens of the prefix that ends with chunk {PREFIX[3].hex()}" in text
    assert f"32 tokens of the prefix that ends with chunk {PREFIX[1].hex()}" in text
    out = run("stats", log, "--json").out
    assert '"num_tokens_duplicated":96' in out.replace(" ", "")


def test_why_names_the_load_that_a_lookup_waits_for(run: Any, tmp_path: Path) -> None:
    """And nothing is duplicated then."""
    driver = burst(awaits_shared_loads=True)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    out = run("why", log, "b").out
    assert "the request waits for load 2 of a" in " ".join(out.split())
    assert "which already loads tokens 0–63" in " ".join(out.split())
    out = run("stats", log).out
    assert "duplicated" not in out
