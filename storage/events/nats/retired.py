"""Records of retired segments, carried along: without them a log whose beginning is gone reads as damaged.

`retired.jsonl` beside the segments (docs/log-format.md) says what was retired. Where segments went before they were
shipped, the header block behind the gap carries one record for all of them. Where the stream itself drops old
messages, as its limits say, the mirror writes the record: nobody else can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import msgspec

from kvledger.storage.events.retirement import RETIREMENTS_NAME, Retirement
from kvledger.storage.events.segment_file import NO_PREVIOUS_HASH, SegmentHeader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["dropped_by_stream", "reason_to_drop", "record_between", "record_of_message"]

_MAX_RECORD_BYTES: Final = 4096


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Retirement)


def record_between(directory: Path, log_id: str, first_sequence: int, last_sequence: int) -> str | None:
    """Return one record for the sequences, made of those in `directory`; None if these leave a hole or do not fit."""
    try:
        lines = (directory / RETIREMENTS_NAME).read_bytes().splitlines()
    except OSError:
        return None
    records = {record.first_sequence: record for record in map(_decoded, lines) if record is not None}
    chain: list[Retirement] = []
    for _, record in sorted(records.items()):
        if record.log_id != log_id or record.last_sequence < first_sequence or record.first_sequence > last_sequence:
            continue
        if chain and (chain[-1].last_sequence + 1, chain[-1].head_hash) != (
            record.first_sequence,
            record.previous_head_hash,
        ):
            return None
        chain.append(record)
    if not chain or chain[0].first_sequence > first_sequence or chain[-1].last_sequence != last_sequence:
        return None
    whole = attrs.evolve(
        chain[-1],
        segment=chain[0].segment,
        first_sequence=chain[0].first_sequence,
        previous_head_hash=chain[0].previous_head_hash,
        num_bytes=sum(record.num_bytes for record in chain),
    )
    return _encoder.encode(whole).decode()


def record_of_message(text: str, log_id: str) -> bytes | None:
    """Return the line that a message carries, None if it is none of this log."""
    record = _decoded(text.encode()) if len(text) <= _MAX_RECORD_BYTES else None
    return _encoder.encode(record) if record is not None and record.log_id == log_id else None


def reason_to_drop(configuration: Mapping[str, Any]) -> Literal["age", "size"] | None:
    """Return why a stream with this configuration drops its oldest messages, None if it does not."""
    if configuration.get("max_age", 0) > 0:
        return "age"
    is_bounded = any(configuration.get(bound, -1) > 0 for bound in ("max_bytes", "max_msgs"))
    return "size" if is_bounded and configuration.get("discard", "old") == "old" else None


def dropped_by_stream(header: SegmentHeader, reason: Literal["age", "size"], at_unix_ns: int) -> bytes:
    """Return the line for everything before the segment with this header, which its stream dropped."""
    record = Retirement(
        log="",
        log_id=header.log_id,
        segment="",
        first_sequence=1,
        last_sequence=header.first_sequence - 1,
        previous_head_hash=NO_PREVIOUS_HASH.hex(),
        head_hash=header.previous_head_hash.hex(),
        num_bytes=0,
        reason=reason,
        retired_at_unix_ns=at_unix_ns,
    )
    return _encoder.encode(record)


def _decoded(line: bytes) -> Retirement | None:
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None
