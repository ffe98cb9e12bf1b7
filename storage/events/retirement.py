"""The record of segments that were retired: what they held, from which hash to which, when and why.

`retired.jsonl` in a log's directory, one line a segment, appended and synced before the segment is deleted; in a
directory of logs, the same for the last segments of logs that are gone altogether. With it a log without its beginning
can still be told from one out of which somebody took something. A line that a crash tore is passed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import attrs
import msgspec

from kvledger.storage.events.files import append_line, read_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["RETIREMENTS_NAME", "Retirement", "read_retirements", "retired_between", "write_retirement"]

RETIREMENTS_NAME: Final = "retired.jsonl"


@attrs.frozen
class Retirement:
    """One retired segment. `log` is the name of its directory; hashes are hexadecimal."""

    log: str
    log_id: str
    segment: str
    first_sequence: int
    last_sequence: int
    previous_head_hash: str
    """The chain hash before its first frame, as its header named it."""
    head_hash: str
    """The chain hash of its last frame, which the next segment's header names."""
    num_bytes: int
    reason: Literal["age", "size"]
    retired_at_unix_ns: int


def write_retirement(directory: Path, retirement: Retirement) -> None:
    """Append to the record in `directory`; it is on disk when this returns. Raises `OSError`."""
    append_line(directory / RETIREMENTS_NAME, msgspec.json.encode(retirement))


def read_retirements(directory: Path) -> list[Retirement]:
    """The record in `directory`, in the order in which it was written; empty where there is none."""
    try:
        lines = read_file(directory / RETIREMENTS_NAME).splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Retirement))
        except msgspec.MsgspecError:
            continue
    return found


def retired_between(
    retirements: Sequence[Retirement], log_id: object, first_sequence: int, end_sequence: int
) -> list[Retirement] | None:
    """The retirements that account for `first_sequence` up to before `end_sequence`, without a hole, in order.

    They may begin earlier. None: there is a hole, or one does not follow from the other.
    """
    by_first = {each.first_sequence: each for each in retirements if each.log_id == log_id}
    chain: list[Retirement] = []
    for begin in sorted(by_first):
        each = by_first[begin]
        if each.last_sequence < first_sequence or begin >= end_sequence:
            continue
        if not chain and begin > first_sequence:
            return None
        if chain and (chain[-1].last_sequence + 1 != begin or chain[-1].head_hash != each.previous_head_hash):
            return None
        chain.append(each)
    return chain if chain and chain[-1].last_sequence == end_sequence - 1 else None
