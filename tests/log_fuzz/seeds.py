"""Sound logs in parts, for mutations to change: header, frames, and what their writer leaves next to the segments."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import attrs
import msgspec
from google_crc32c import value as crc32c
from lifecycle_driver import play_seed
from stored_logs import header_of, tell_story

from kvledger.adapters.figures import Totals
from kvledger.adapters.recorded.extension import Recorder
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import StartFolds
from kvledger.lifecycle.codec import EventDecoder, encode_events, vocabulary_header
from kvledger.lifecycle.snapshots import state_fingerprint
from kvledger.storage.events.end_record import RecordedEnd
from kvledger.storage.events.frames import FrameKind, encode_frame
from kvledger.storage.events.segment_file import NO_PREVIOUS_HASH, encode_header, segment_name
from kvledger.storage.events.snapshots import SNAPSHOT_FORMAT_VERSION

LOG_ID = "f" * 32


@attrs.define
class Log:
    """One log before it is written. Events are arrays as msgpack has them: wire code, fields."""

    name: str
    header: dict[str, Any]
    frames: list[list[list[Any]]]
    request_id: str
    places: list[dict[str, int]] = attrs.field(init=False)
    """Of each frame: `first_sequence`, `num_events`, `kind`."""
    end: dict[str, Any] = attrs.field(init=False)
    """The record of the end."""
    retirement: dict[str, Any] | None = None
    """Of the first half, which is missing then; the second half begins a segment that has a snapshot."""
    snapshot: dict[str, Any] | None = None
    """Its fields; `state` is a map."""

    def __attrs_post_init__(self) -> None:
        """Count."""
        sequence, self.places = 1, []
        for frame in self.frames:
            place = {"first_sequence": sequence, "num_events": len(frame), "kind": int(FrameKind.EVENTS)}
            self.places.append(place)
            sequence += len(frame)
        self.end = attrs.asdict(RecordedEnd(LOG_ID, "", sequence, "", is_closed=True))

    def write(self, directory: Path) -> Path:
        """Write all files, each with checksums that fit."""
        directory.mkdir(parents=True)
        half = len(self.frames) // 2 if self.snapshot is not None else 0
        hashed, segment = NO_PREVIOUS_HASH, bytearray()
        first = 1
        for number, (frame, place) in enumerate(zip(self.frames, self.places, strict=True)):
            if number in {0, half}:
                first = sum(map(len, self.frames[:number])) + 1
                block = encode_header(LOG_ID, first, hashed, self.header, 1 + (number > 0))
                previous, segment = hashed, bytearray(block)
                hashed = _hash_of(block)
            payload = msgspec.msgpack.encode(frame)
            data, hashed = encode_frame(
                place["kind"] % 256, place["first_sequence"] % 2**64, place["num_events"] % 2**32, payload, hashed
            )
            segment += data
        (directory / segment_name(first)).write_bytes(segment)
        end = self.end
        if isinstance(end, dict):
            end = {**end, "segment": end.get("segment") or segment_name(first)}
            end["head_hash"] = end.get("head_hash") or hashed.hex()
        body = msgspec.json.encode(end)
        (directory / "log.end").write_bytes(b"KVLEDGEREND %08x " % crc32c(body) + body)
        (directory / "writer.lock").write_bytes(b"1\n")
        if self.retirement is not None:
            line = msgspec.json.encode(_added(self.retirement, "head_hash", previous.hex()))
            (directory / "retired.jsonl").write_bytes(line + b"\n")
        if self.snapshot is not None:
            fields = _added(self.snapshot, "chain_hash", previous)
            for name in ("state", "reader", "totals"):
                part = fields.get(name) if isinstance(fields, dict) else None
                fields = _added(fields, name, part and msgspec.msgpack.encode(part), replace=True)
            body = msgspec.msgpack.encode(fields)
            path = (directory / segment_name(first)).with_suffix(".snapshot")
            path.write_bytes(b"KVLEDGERSNAP" + crc32c(body).to_bytes(4, "little") + body)
        return directory


def _added(fields: Any, name: str, value: Any, *, replace: bool = False) -> Any:
    """With one more, where these are still fields that lack it."""
    return {**fields, name: value} if isinstance(fields, dict) and (replace or name not in fields) else fields


def _hash_of(block: bytes) -> bytes:
    from hashlib import blake2b

    return blake2b(block[: len(block) // 2], digest_size=16).digest()


def log_of(
    name: str, events: Iterable[e.Event], configuration: LedgerConfiguration, core: Core, request_id: str
) -> Log:
    """A log as a connector writes it: one frame per observation, with its decisions."""
    header = {**header_of(configuration), **vocabulary_header(core)}
    frames: list[list[list[Any]]] = []
    for event in events:
        if not frames or not event.is_decision:
            frames.append([])
        frames[-1].append(raw(event))
    return Log(name, plain_header(header), frames, request_id)


def plain_header(header: Mapping[str, Any]) -> dict[str, Any]:
    """The same, as a reader decodes it."""
    return dict(msgspec.msgpack.decode(msgspec.msgpack.encode({**header, "process_id": 17, "engine_id": "engine"})))


def raw(event: e.Event) -> list[Any]:
    """An event as an array."""
    ((*fields,),) = msgspec.msgpack.decode(encode_events([event]))
    return fields


def without_beginning(log: Log, core: Core, configuration: LedgerConfiguration) -> Log:
    """The same after its first half was retired: it begins with a snapshot."""
    half = len(log.frames) // 2
    decoder = EventDecoder(core, log.header)
    folds = StartFolds(core, configuration)
    totals = Totals(folds.projections)
    sequence = 0
    for frame in log.frames[:half]:
        for event in decoder.decode(msgspec.msgpack.encode(frame)):
            sequence += 1
            folds.take([(sequence, event)])
    start = folds.start()
    found = attrs.evolve(log, name=f"{log.name} without its beginning")
    found.snapshot = {
        "log_id": LOG_ID,
        "sequence": sequence,
        "fingerprint": state_fingerprint(core, configuration),
        "state": msgspec.msgpack.decode(start.state),
        "reader": msgspec.msgpack.decode(start.reader),
        "totals": msgspec.msgpack.decode(totals.stored()),
        "format_version": SNAPSHOT_FORMAT_VERSION,
    }
    found.retirement = {
        "log": "log",
        "log_id": LOG_ID,
        "segment": segment_name(1),
        "first_sequence": 1,
        "last_sequence": sequence,
        "previous_head_hash": NO_PREVIOUS_HASH.hex(),
        "num_bytes": 1000,
        "reason": "size",
        "retired_at_unix_ns": 1_750_000_000_000_000_000,
        "is_rest_verifiable": True,
    }
    return found


def one_of_each(time_ns: int) -> list[e.Event]:
    """An event of every class, of the story's second request, with small values."""
    found = []
    for event_class in sorted(Core.standard().events.values(), key=lambda each: each.id):
        hints = get_type_hints(event_class)
        values = {name: _small(name, hints[name], time_ns) for name in e.field_names(event_class)}
        found.append(event_class(**values))
    return found


def _small(name: str, kind: Any, time_ns: int) -> Any:
    named = {
        "request_id": "chat-9",
        "time_ns": time_ns,
        "generation": 0,
        "cause": 1,
        "trace_parent": b"",
        "key": b"k" * 16,
    }
    if name in named:
        return named[name]
    arguments = get_args(kind)
    if kind in {int, str, bytes, bool}:
        return {int: 1, str: "one", bytes: b"k" * 16, bool: False}[kind]
    if type(None) in arguments:
        return _small(name, next(each for each in arguments if each is not type(None)), time_ns)
    if arguments and arguments[-1] is ...:
        return (_small("", arguments[0], time_ns),)
    if hasattr(kind, "_fields"):  # a named tuple
        return kind(*(_small("", each, time_ns) for each in get_type_hints(kind).values()))
    return tuple(_small("", each, time_ns) for each in arguments)


def payloads() -> list[e.Event]:
    """An event of every kind that a recorder writes."""
    found: list[e.Event] = []
    for number, kind in enumerate(Recorder.events.values()):
        hints = get_type_hints(kind)
        payload = kind(**{name: _payload_value(name, hints[name]) for name in kind.__struct_fields__})
        found.append(Recorder.observed("chat-9", payload, 50_000 + number))
        found.append(Recorder.noted(payload, 50_000 + number))
    return found


def _payload_value(name: str, kind: Any) -> Any:
    if name == "kv_transfer":
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"blocks": 8}}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return kind(**{each: _payload_value(each, hints[each]) for each in kind.__struct_fields__})
    named = {"hook": "get_finished", "recorder": "KVLedgerRecorder", "job": "1", "jobs": ("1",), "is_whole": True}
    return named.get(name, _small(name, kind, 0))


@cache
def told() -> tuple[Log, ...]:
    """Logs that need no vLLM: a story, walks, one event of each class, a recorder's, some without their beginning."""
    driver = tell_story()
    standard, recording = Core.standard(), Core.standard().extended(Recorder())
    story = log_of("story", driver.observed, driver.configuration, standard, "chat-17")
    each = [*driver.observed, *(one for one in one_of_each(40_000))]
    recorded = [event for event in driver.observed if not event.is_decision]
    found = [
        story,
        log_of("one event of each class", each, driver.configuration, standard, "chat-9"),
        log_of("recorder", [*recorded, *payloads()], driver.configuration, recording, "chat-9"),
        without_beginning(story, standard, driver.configuration),
    ]
    for seed, options in enumerate(({}, {"chunk_size": 32}, {"block_size": 32})):
        own = play_seed(seed, 12, **{"chunk_size": 16, "block_size": 16, **options})
        request_id = next(event.request_id for event in own.observed if isinstance(event, e.RequestArrived))
        walked = log_of(f"walk {seed}", own.observed, own.configuration, standard, request_id)
        found += [walked, without_beginning(walked, standard, own.configuration)]
    for seed in range(3, 6):
        own = play_seed(seed, 40, chunk_size=8 << seed - 3, block_size=16)
        request_id = next(event.request_id for event in own.observed if isinstance(event, e.RequestArrived))
        walked = log_of(f"walk {seed}", own.observed, own.configuration, standard, request_id)
        found.append(without_beginning(walked, standard, own.configuration))
    return tuple(found)


def served() -> Sequence[Log]:
    """Logs of simulated engines, and of recorders in them; they are made in another process, since vLLM is large."""
    with tempfile.TemporaryDirectory(prefix="kvledger-fuzz-") as folder:
        path = Path(folder) / "logs"
        subprocess.run([sys.executable, str(Path(__file__).with_name("engines.py")), str(path)], check=True)
        stored = msgspec.msgpack.decode(path.read_bytes())
    return [Log(name, header, frames, request_id) for name, header, frames, request_id in stored]
