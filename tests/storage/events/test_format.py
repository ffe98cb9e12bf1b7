"""The bytes of format 1, for ever: a change that breaks these breaks every stored log."""

from __future__ import annotations

import struct
from hashlib import blake2b

import google_crc32c

from kvledger.storage.events import Frame, FrameKind
from kvledger.storage.events.frames import encode_frame, next_chain_hash, parse_frame
from kvledger.storage.events.segment_file import decode_header, encode_header

_HEADER = 2 * bytes.fromhex(
    "4b564c4544474552010073000000eeb61f7284ae66697273745f73657175656e636505a668656164657281aa626c6f63"
    "6b5f73697a6510a66c6f675f6964d9203031323334353637383961626364656630313233343536373839616263646566"
    "b270726576696f75735f686561645f68617368c41070707070707070707070707070707070"
)
_FRAME = bytes.fromhex("f54bef584fc607000000000500000000000000020000000bda2f4e17399238ad66268f4f7809327061796c6f6164")


def test_the_golden_segment_header_stays() -> None:
    """The stored block, two copies of the same bytes, is still written and still read."""
    assert encode_header("0123456789abcdef" * 2, 5, b"p" * 16, {"block_size": 16}) == _HEADER
    header = decode_header(_HEADER, "golden")
    assert (header.log_id, header.first_sequence, header.previous_head_hash) == ("0123456789abcdef" * 2, 5, b"p" * 16)
    assert (header.header, header.num_bytes) == ({"block_size": 16}, len(_HEADER))


def test_the_golden_frame_stays() -> None:
    """The stored frame is still written and still read."""
    frame_bytes, chain_hash = encode_frame(FrameKind.EVENTS, 5, 2, b"payload", b"p" * 16)
    assert frame_bytes == _FRAME
    frame = parse_frame(_FRAME, 0)
    assert frame == Frame(5, 2, FrameKind.EVENTS, b"payload", chain_hash)
    assert isinstance(frame, Frame)
    assert next_chain_hash(b"p" * 16, frame) == chain_hash


def test_a_frame_can_be_read_with_the_documented_table_alone() -> None:
    """docs/log-format.md is enough to write another reader."""
    marker, crc, length, kind, first_sequence, num_events, chain_hash = struct.unpack_from("<2sIIBQI16s", _FRAME)
    payload = _FRAME[39:]
    assert (marker, length, kind, first_sequence, num_events) == (b"\xf5\x4b", len(payload), 0, 5, 2)
    assert crc == google_crc32c.value(_FRAME[6:])
    assert chain_hash == blake2b(b"p" * 16 + _FRAME[6:23] + payload, digest_size=16).digest()
