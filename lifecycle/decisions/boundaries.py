"""Behind which prefix a load may end, where groups of layers see only a window: all that the next token sees is stored.

A prefix hit says that every whole chunk is there; of a group with a window a chunk may lack pages, because whoever
saved it did not see them any more.
"""

from __future__ import annotations

from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.request_record import RequestRecord


def last_boundary(num_tokens: int, record: RequestRecord, projections: Projections) -> int:
    """The longest prefix, of at most `num_tokens` tokens that are hit, behind which a load may end."""

    def is_stored(page: int, end_token: int) -> bool:
        return slot_of_page(page, end_token, record, projections) != NO_SLOT

    return projections.geometry.windows.last_boundary(num_tokens, projections.configuration.chunk_size, is_stored)


def slot_of_page(page: int, end_token: int, record: RequestRecord, projections: Projections) -> int:
    """The slot with an image of the page that is valid for a prefix of `end_token` tokens, or `NO_SLOT`."""
    geometry = projections.geometry
    chunk, place = geometry.place_of(page, -(-end_token // geometry.chunk_size))
    keys = record.keys
    slots = projections.chunks.get(keys[chunk]) if chunk < len(keys) else None
    slot = NO_SLOT if slots is None else slots[place]
    tail = record.saved_tail
    if slot == NO_SLOT and tail is not None and end_token <= tail.end_token:
        place = page - geometry.pages_spanning(tail.first_token, 1).start
        if 0 <= place < len(tail.slots):
            slot = tail.slots[place]
    return slot
