"""A request whose id is too long for a log is found by the id that its client gave, and by the one that vLLM made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lifecycle_driver import Driver
from stored_logs import write_log

from kvledger.adapters.tools.logs import index as index_module
from kvledger.lifecycle import begins_as, logged_request_id
from kvledger.lifecycle.request_ids import MAX_ID_BYTES

CLIENT_ID = "conversation of the tenant with the long name, " * 10
VLLM_ID = f"cmpl-{CLIENT_ID}-0-8f3a1c5e"


@pytest.fixture
def long_log(tmp_path: Path) -> Path:
    """Of two requests with long ids and one with a short one."""
    driver = Driver()
    for request_id in (VLLM_ID, "cmpl-" + CLIENT_ID.replace("tenant", "other tenant"), "cmpl-short"):
        driver.arrive(logged_request_id(request_id), 20)
    return write_log(tmp_path / "log", driver.observed, driver.configuration)


@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize(
    "wanted",
    [VLLM_ID, CLIENT_ID, logged_request_id(VLLM_ID), VLLM_ID[:100]],
    ids=["whole", "client's", "in the log", "beginning"],
)
@pytest.mark.parametrize("command", ["show", "why"])
def test_a_request_is_found_by_its_long_id(
    run: Any, long_log: Path, monkeypatch: pytest.MonkeyPatch, command: str, wanted: str, *, has_index: bool
) -> None:
    """The whole id, what the client gave of it, what the log has of it, or its beginning."""
    if has_index:
        monkeypatch.setattr(index_module, "INDEX_FROM_BYTES", 0)
    result = run(command, long_log, wanted)
    assert result.exit_code == 0, result.err
    assert logged_request_id(VLLM_ID)[:40] in result.out
    assert "other tenant" not in result.out


def test_an_unknown_long_id_is_not_printed_as_a_whole(run: Any, long_log: Path) -> None:
    """It would fill the terminal, and comparing it with all others would take minutes."""
    unknown = run("show", long_log, "y" * 100_000)
    assert unknown.exit_code == 64
    assert len(unknown.err) < 3 * MAX_ID_BYTES + 200


texts = st.text(st.characters(), max_size=400) | st.text(st.sampled_from("aé漢🚀…\ud800\udfff\0"), max_size=400)


@given(texts)
def test_an_id_in_a_log_is_short_valid_and_its_own(request_id: str) -> None:
    """At most 256 bytes of UTF-8. Reading a log and recording what was read gives the same log."""
    logged = logged_request_id(request_id)
    assert len(logged.encode()) <= MAX_ID_BYTES
    assert logged_request_id(logged) == logged


@given(texts)
def test_an_id_that_fits_stays_as_it_is(request_id: str) -> None:
    """In bytes, not characters."""
    fits = len(request_id.encode(errors="surrogatepass")) <= MAX_ID_BYTES
    is_text = request_id.encode(errors="ignore") == request_id.encode(errors="surrogatepass")
    assert (logged_request_id(request_id) == request_id) is (fits and is_text)


@given(st.text(min_size=0, max_size=20), st.text(min_size=300), st.text(max_size=20))
def test_a_cut_id_begins_as_the_id_inside_it(before: str, client_id: str, behind: str) -> None:
    """Whatever vLLM writes around it."""
    assert begins_as(logged_request_id(f"{before}{client_id}{behind}"), client_id)
    assert not begins_as(client_id[:100], client_id)
