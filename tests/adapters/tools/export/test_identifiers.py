"""Ids of requests in little room can still be told apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvledger.adapters.tools.export.identifiers import Pieces, told_apart


def seen(pieces: Pieces) -> str:
    """How an id looks."""
    return "".join("…" if is_hidden else text for text, is_hidden in pieces)


def test_what_all_ids_begin_and_end_with_is_left_out() -> None:
    """Ids of one client may differ in their middle alone."""
    ids = [f"chatcmpl-tenant-a-{number:04}-0-completion" for number in (17, 18)]
    assert [seen(pieces) for pieces in told_apart(ids).values()] == ["cha…0017…ion", "cha…0018…ion"]


def test_a_long_id_is_cut_in_its_middle() -> None:
    """Its beginning and its end tell more than its middle."""
    (pieces,) = told_apart(["cmpl-0123456789abcdef0123456789abcdef-0-847eea4d"]).values()
    assert seen(pieces) == "cmpl-01234…0-847eea4d"


@given(st.sets(st.text(st.sampled_from("ab-"), max_size=60), max_size=12))
def test_no_two_ids_look_the_same_and_none_is_lost(ids: set[str]) -> None:
    """Whoever copies an id gets the whole one."""
    shown = told_apart(ids)
    assert {"".join(text for text, _ in pieces) for pieces in shown.values()} == ids
    assert len({seen(pieces) for pieces in shown.values()}) == len(ids)
