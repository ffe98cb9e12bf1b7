"""What a case changes of a log: numbers, types, texts, frames, bytes. Each is drawn from a seed."""

from __future__ import annotations

import contextlib
import copy
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
from log_torture.stored import BLOCK_HEADER_BYTES, blocks_of, forged_block

from kvledger.lifecycle import Core
from kvledger.lifecycle.events import field_names, wire_code
from kvledger.storage.events import LogDamaged, LogTooNew
from kvledger.storage.events.compressed import compress_segment
from kvledger.storage.events.segment_file import segment_paths
from log_fuzz.seeds import Log

INTEGERS = (
    -(2**63), -(2**31), -1, 0, 1, 17, 2**16, 30_000_000, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63,
    2**64 - 1,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**64 - 1,
    1.5,
    float("nan"),
    "",
    "x",
    "\x1b[2J",
    b"x",
    [],
    [[]],
    {},
    {"a": 1},
)
"""In the place of a value of another type."""
Path_ = tuple[Any, ...]
_FIELDS = {wire_code(event): field_names(event) for event in Core.standard().events.values()}
_PARTS = ("header", "frames", "places", "end", "retirement", "snapshot")


@attrs.frozen
class Spot:
    """One integer of a log, and the others that mean the same."""

    kind: Path_
    """Part of the log, wire code or key, place; list positions left out."""
    paths: tuple[Path_, ...]

    def __str__(self) -> str:
        return "/".join(map(str, self.kind))


def spots_of(log: Log) -> list[Spot]:
    """Every integer in it."""
    found: dict[Path_, list[Path_]] = {}
    for path, value in _integers((), {part: getattr(log, part) for part in _PARTS}, log):
        del value
        found.setdefault(_kind(path, log), []).append(path)
    return [Spot(kind, tuple(paths)) for kind, paths in found.items()]


def _kind(path: Path_, log: Log) -> Path_:
    if path[0] == "frames":
        event = log.frames[path[1]][path[2]]
        rest = [each for each in path[3:] if not isinstance(each, int) or each < 100]
        inner = tuple(each for each in rest[1:] if isinstance(each, str))
        name = event[3] if inner and isinstance(event[3], str) else ""
        return ("event", event[0], *rest[:1], name, *inner)
    if path[0] == "places":
        return path[0], path[2]
    return tuple(each for each in path if not isinstance(each, int))


def _integers(path: Path_, value: Any, log: Log) -> Iterator[tuple[Path_, int]]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _integers((*path, key), each, log)
    elif isinstance(value, list | tuple):
        is_event = path[:1] == ("frames",) and len(path) == 3
        for place, each in enumerate(value):
            if is_event and place == 0:
                continue  # the wire code
            yield from _integers((*path, place), each, log)
    elif isinstance(value, bytes) and path[:1] == ("frames",) and _payload(value) is not None:
        yield from _integers(path, _payload(value), log)


def texts_of(log: Log) -> list[tuple[Path_, str]]:
    """Every text in its events, their payloads and the header, and where it is."""
    return [*_texts(("header",), log.header), *_texts(("frames",), log.frames)]


def _texts(path: Path_, value: Any) -> Iterator[tuple[Path_, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _texts((*path, key), each)
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _texts((*path, place), each)
    elif isinstance(value, bytes) and path[0] == "frames" and _payload(value) is not None:
        yield from _texts(path, _payload(value))


def _payload(value: bytes) -> dict[str, Any] | None:
    """What an extension's payload says."""
    try:
        decoded = msgspec.msgpack.decode(value)
    except Exception:  # noqa: BLE001 -- bytes that are a key
        return None
    return decoded if isinstance(decoded, dict) else None


def put(log: Log, path: Path_, value: Any) -> None:
    """Set what is at a path; a payload on the way is encoded again."""
    setattr(log, path[0], _with(getattr(log, path[0]), path[1:], value))


def _with(part: Any, path: Path_, value: Any) -> Any:
    if not path:
        return value
    if isinstance(part, bytes):
        return msgspec.msgpack.encode(_with(_payload(part), path, value))
    part[path[0]] = _with(part[path[0]], path[1:], value)
    return part


@attrs.frozen
class Mutation:
    """What was done, in words, and the log with it."""

    text: str
    write: Callable[[Path], Path]
    has_end: bool = True
    """Whether the record of the end is as it was, so that `show --follow` ends."""


def one_integer(log: Log, spot: Spot, chance: random.Random) -> Mutation:
    """One number becomes another one."""
    changed, path, value = copy.deepcopy(log), chance.choice(spot.paths), chance.choice(INTEGERS)
    put(changed, path, value)
    return Mutation(f"{spot} = {value} at {path}", changed.write, has_end=path[0] not in {"end", "header"})


def some_integers(log: Log, spots: Sequence[Spot], chance: random.Random) -> Mutation:
    """Several numbers become others."""
    changed, texts, has_end = copy.deepcopy(log), [], True
    for spot in chance.sample(spots, min(len(spots), chance.randint(2, 6))):
        path, value = chance.choice(spot.paths), chance.choice(INTEGERS)
        put(changed, path, value)
        texts.append(f"{spot} = {value} at {path}")
        has_end = has_end and path[0] not in {"end", "header"}
    return Mutation("; ".join(texts), changed.write, has_end=has_end)


def borrowed_values(log: Log, chance: random.Random) -> Mutation:
    """Fields have values that fields of the same name have in other events: two requests with one ordinal, and such."""
    changed, texts = copy.deepcopy(log), []
    by_name: dict[str, list[tuple[Path_, Any]]] = {}
    for at, frame in enumerate(log.frames):
        for place, event in enumerate(frame):
            for field, name in enumerate(_FIELDS.get(event[0], ()), 1):
                by_name.setdefault(name, []).append((("frames", at, place, field), event[field]))
    names = ["ordinal", "request_id", "job_id", *chance.sample(sorted(by_name), 3)]
    for _ in range(chance.randint(1, 6)):
        found = by_name.get(chance.choice(names))
        if found:
            (path, _), (_, value) = chance.choice(found), chance.choice(found)
            put(changed, path, copy.deepcopy(value))
            texts.append(f"{path} = {value!r}")
    return Mutation("; ".join(texts), changed.write)


def another_type(log: Log, chance: random.Random) -> Mutation:
    """A value in the header, or in a file next to the segments, is of another type, or missing."""
    changed = copy.deepcopy(log)
    parts = [part for part in ("header", "header", "header", "end", "retirement", "snapshot") if getattr(log, part)]
    path: Path_ = (chance.choice(parts),)
    inner = getattr(changed, path[0])
    while isinstance(inner, dict | list) and inner and (len(path) == 1 or chance.random() < 0.6):
        key = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        path, inner = (*path, key), inner[key]
    value = chance.choice(VALUES)
    if path[0] in {"end", "retirement"} and isinstance(value, bytes):
        value = None
    put(changed, path, value)
    return Mutation(f"{path} = {value!r}", changed.write, has_end=False)


def other_frames(log: Log, chance: random.Random) -> Mutation:
    """Frames or events are repeated, left out or in another order; the chain fits."""
    changed = copy.deepcopy(log)
    what = chance.choice(["repeated", "left out", "swapped", "event left out", "event repeated", "shuffled"])
    frames = changed.frames
    at = chance.randrange(len(frames))
    to = chance.randrange(len(frames))
    if what == "repeated":
        frames[to:to] = copy.deepcopy(frames[at : at + chance.randint(1, 5)])
    elif what == "left out":
        del frames[at : min(len(frames) - 1, at + chance.randint(1, 5))]
    elif what == "swapped":
        frames[at], frames[to] = frames[to], frames[at]
    elif what == "event left out" and len(frames[at]) > 1:
        del frames[at][chance.randrange(len(frames[at]))]
    elif what == "event repeated":
        frames[at].append(copy.deepcopy(chance.choice(frames[to])))
    else:
        chance.shuffle(frames)
    if chance.random() < 0.8 and changed.snapshot is None:
        changed.__attrs_post_init__()
    else:
        del changed.frames[len(changed.places) :], changed.places[len(changed.frames) :]
    return Mutation(f"frames: {what}, {at}, {to}", changed.write)


def other_payload_bytes(log: Log, chance: random.Random) -> Mutation:
    """Bytes inside of a frame's payload are others; its checksum fits."""
    changed = copy.deepcopy(log)
    at = chance.randrange(len(changed.frames))
    payload = bytearray(msgspec.msgpack.encode(changed.frames[at]))
    for _ in range(chance.randint(1, 3)):
        payload[chance.randrange(len(payload))] = chance.choice([chance.randrange(256), 0x91, 0xDD, 0xDF, 0xCF, 0xC0])
    changed.frames[at] = msgspec.Raw(bytes(payload))  # type: ignore[call-overload]
    return Mutation(f"payload {at} = {bytes(payload).hex()}", changed.write)


def other_file_bytes(log: Log, chance: random.Random) -> Mutation:
    """Bytes of a file are others, are left out or repeated, or its end is missing; no checksum fits."""

    def write(directory: Path) -> Path:
        log.write(directory)
        own = random.Random(seed)
        if own.random() < 0.5:
            compress_all(directory)
        path = own.choice(sorted(file for file in directory.iterdir() if file.stat().st_size > 10))
        data = bytearray(path.read_bytes())
        for _ in range(own.randint(1, 4)):
            at = own.randrange(len(data))
            length = own.choice([1, 1, 2, 40, 1000])
            kind = own.randrange(5)
            if kind == 0:
                data[at] ^= 1 << own.randrange(8)
            elif kind == 1:
                data[at : at + length] = own.randbytes(length)
            elif kind == 2:
                data[at:at] = data[at // 2 : at // 2 + length]
            elif kind == 3 and len(data) > length + 10:
                del data[at : at + length]
            else:
                del data[max(10, at) :]
        path.write_bytes(data)
        return directory

    seed = chance.getrandbits(64)
    return Mutation(f"bytes of a file, {seed}", write, has_end=False)


def other_block(log: Log, chance: random.Random) -> Mutation:
    """A block of a compressed segment states other numbers, or has another stream; its checksums fit."""

    def write(directory: Path) -> Path:
        compress_all(log.write(directory))
        own = random.Random(seed)
        segment = own.choice(segment_paths(directory))
        data, block = segment.read_bytes(), own.choice(blocks_of(segment))
        stream = data[block.at + BLOCK_HEADER_BYTES : block.end_at]
        offset, num_bytes = block.offset, block.num_bytes
        kind = own.randrange(4)
        if kind == 0:
            offset = own.choice([offset + 1, offset - 1, 1, 1 << 40, (1 << 64) - 1])
        elif kind == 1:
            num_bytes = own.choice([0, 1, num_bytes + 1, 1 << 24, (1 << 32) - 1])
        elif kind == 2:
            stream, num_bytes = zlib.compress(bytes(1 << 24)), own.choice([num_bytes, 1 << 24])
        else:
            stream = zlib.compress(own.randbytes(num_bytes))
        segment.write_bytes(forged_block(offset, num_bytes, stream).join(block.without(data)))
        return directory

    seed = chance.getrandbits(64)
    return Mutation(f"a block of a compressed segment, {seed}", write)


def compress_all(directory: Path) -> None:
    """Compress every segment; the last one too, which no writer does."""
    for segment in segment_paths(directory):
        with contextlib.suppress(LogDamaged, LogTooNew):  # such as one that was mutated
            compress_segment(segment, replacing=contextlib.nullcontext())


def other_snapshot(log: Log, chance: random.Random) -> Mutation:
    """Numbers, keys and entries of a snapshot's state are others; each may be one from elsewhere in it."""
    changed, texts = copy.deepcopy(log), []
    for _ in range(chance.randint(1, 3)):
        snapshot = changed.snapshot or {}
        parts = [
            each for name in ("state", "reader", "totals") for each in _parts(("snapshot", name), snapshot.get(name))
        ]
        path, part = chance.choice(parts)
        places = list(part) if isinstance(part, dict) else list(range(len(part)))
        place, other = chance.choice(places), chance.choice(places)
        numbers = [value for _, value in _integers((), changed.snapshot, changed)]
        value = chance.choice([chance.choice(INTEGERS), chance.choice(numbers)])
        what = chance.choice(["value", "value", "key", "left out", "repeated", "swapped"])
        if what == "left out":
            del part[place]
        elif what == "swapped":
            part[place], part[other] = part[other], part[place]
        elif what == "repeated" and isinstance(part, list):
            part.insert(other, copy.deepcopy(part[place]))
        elif what == "key" and isinstance(place, int) and isinstance(part, dict):
            part[value] = part.pop(place)
        elif what == "value" and isinstance(part[place], int) and not isinstance(part[place], bool):
            part[place] = value
        else:
            part[place], other = copy.deepcopy(part[other]), place
        texts.append(f"{what} {value} at {(*path, place)}, {other!r}")
    return Mutation("; ".join(texts), changed.write)


def _parts(path: Path_, value: Any) -> Iterator[tuple[Path_, Any]]:
    """Every map and list that is not empty, and where it is."""
    if isinstance(value, dict | list) and value:
        yield path, value
        for place, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _parts((*path, place), each)


KINDS: tuple[Callable[[Log, random.Random], Mutation], ...] = (
    lambda log, chance: some_integers(log, spots_of(log), chance),
    lambda log, chance: some_integers(log, spots_of(log), chance),
    borrowed_values,
    borrowed_values,
    another_type,
    another_type,
    other_frames,
    other_payload_bytes,
    other_file_bytes,
    other_block,
)
"""One is drawn for each random case."""
