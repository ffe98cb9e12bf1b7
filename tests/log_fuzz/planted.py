"""Logs with one file, or one part of it, replaced by bytes that its writer would not write; checksums are right."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
from google_crc32c import value as crc32c
from log_torture import reopened
from stored_logs import tell_story, write_log

from kvledger.adapters.recorded.extension import Recorder
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events, vocabulary_header
from kvledger.storage.events.segment_file import segment_paths

DEPTH = 100_000
_NAME = b"\xa1z"
"""msgpack of a key that no reader knows."""

MSGPACK: Mapping[str, bytes] = MappingProxyType(
    {
        "deep lists": b"\x91" * DEPTH + b"\xc0",
        "deep maps": (b"\x81" + _NAME) * DEPTH + b"\xc0",
        # Python takes it, and fails where it is printed or compared.
        "lists just deep enough": b"\x91" * 700 + b"\xc0",
        "a list as key": b"\x81" + b"\x91" * 300 + b"\xc0\xc0",
        "no UTF-8": b"\xa2\xff\xfe",
        "a lone surrogate": b"\xa3\xed\xa0\x80",
        "a map as key": b"\x81\x80\xc0",
        "an unknown type": b"\xd4\x05a",
        "a time": b"\xd6\xff\x00\x00\x00\x01",
        "a time that no calendar has": b"\xc7\x0c\xff" + b"\x00" * 4 + b"\x7f" + b"\xff" * 7,
        "a list of 4 billion": b"\xdd\xff\xff\xff\xff",
        "a text of 4 GB": b"\xdb\xff\xff\xff\xff",
        "not a number": b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    }
)
"""One value each."""
JSON: Mapping[str, bytes] = MappingProxyType(
    {
        "deep lists": b"[" * DEPTH + b"]" * DEPTH,
        "deep objects": b'{"z":' * DEPTH + b"0" + b"}" * DEPTH,
        "a number of 5000 digits": b"1" * 5000,
        "a number of 100 digits": b"1" * 100,
        "a large exponent": b"1e999",
        "not a number": b"NaN",
        "a lone surrogate": b'"\\ud800"',
        "no UTF-8": b'"\xff\xfe"',
        "nothing": b"",
        "half an object": b'{"a":',
    }
)
"""One value each."""


def story_log(directory: Path, *, segment_bytes: int = 1 << 20) -> Path:
    """A sound log with events of an extension that is here, and of one that is not."""
    driver = tell_story()
    core = Core.standard().extended(Recorder())
    header = {
        "extensions": [
            *(vocabulary_header(core)["extensions"]),  # type: ignore[misc]
            {"name": "elsewhere", "version": 1, "made_by": "elsewhere:Elsewhere", "events": ["said"]},
        ]
    }
    return write_log(directory, driver.observed, driver.configuration, segment_bytes=segment_bytes, header=header)


def rewrite_header(log: Path, change: Callable[[dict[str, object]], bytes]) -> None:
    """Write the header block of the first segment anew; `change` makes its body of the fields that it has."""
    segment = segment_paths(log)[0]
    data = segment.read_bytes()
    (size,) = struct.unpack_from("<I", data, 10)
    body = change(msgspec.msgpack.decode(data[18 : 18 + size]))
    prefix = struct.pack("<8sHI", b"KVLEDGER", 1, len(body))
    copy = prefix + struct.pack("<I", crc32c(prefix + body)) + body
    segment.write_bytes(2 * copy + data[2 * (18 + size) :])


def with_field(fields: Mapping[str, object], name: str, value: bytes) -> bytes:
    """Msgpack of a map in which one field is the msgpack `value`; it may be a new one."""
    return msgspec.msgpack.encode({**fields, name: msgspec.Raw(value)})


def plant_in_header(log: Path, value: bytes) -> None:
    """An unknown part of the block that each segment begins with."""
    rewrite_header(log, lambda fields: with_field(fields, "z", value))


def plant_in_named_header(log: Path, value: bytes) -> None:
    """A text of the header that commands print."""

    def change(fields: dict[str, object]) -> bytes:
        header = fields["header"]
        assert isinstance(header, dict)
        return with_field(fields, "header", with_field(header, "vllm_version", value))

    rewrite_header(log, change)


def append_frame(log: Path, payload: bytes, num_events: int = 1) -> None:
    """Add a frame that follows, as its writer would."""
    store = reopened(log)
    store.append(payload, num_events)
    store.close()


def plant_as_frame(log: Path, value: bytes) -> None:
    """All events of a frame."""
    append_frame(log, value)


def plant_as_field(log: Path, value: bytes) -> None:
    """A field of an event."""
    append_frame(log, msgspec.msgpack.encode([(e.LogNote.__struct_config__.tag, msgspec.Raw(value), 40_000)]))


def plant_as_payload(log: Path, value: bytes) -> None:
    """What the recorder's event says."""
    event = e.ExtensionObserved("chat-9", "recorder", "lookup_returned", Recorder.version, value, 40_000)
    append_frame(log, encode_events([event]))


def plant_in_payload(log: Path, value: bytes) -> None:
    """Something besides in what the recorder's event says."""
    started = {
        "recorder": "x", "num_blocks": 1, "block_bytes": 1, "num_ranks": 1, "enable_prefix_caching": False,
        "async_scheduling": False, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1,
    }  # fmt: skip
    payload = with_field(started, "kv_transfer", with_field({}, "z", value))
    event = e.ExtensionNoted("recorder", "recording_started", Recorder.version, payload, 40_000)
    append_frame(log, encode_events([event]))


def plant_as_payload_from_elsewhere(log: Path, value: bytes) -> None:
    """What an event of an extension says that is not installed."""
    event = e.ExtensionObserved("chat-9", "elsewhere", "said", 1, value, 40_000)
    append_frame(log, encode_events([event]))


def plant_as_end(log: Path, value: bytes) -> None:
    """The record of the end."""
    (log / "log.end").write_bytes(b"KVLEDGEREND %08x " % crc32c(value) + value)


def plant_in_end(log: Path, value: bytes) -> None:
    """Something besides in the record of the end."""
    body = (log / "log.end").read_bytes().split(b" ", 2)[2].strip()
    plant_as_end(log, body[:-1] + b',"z":' + value + b"}")


def plant_as_retirement(log: Path, value: bytes) -> None:
    """The record of what was retired, of a log that has lost its first segment."""
    segment_paths(log)[0].unlink()
    (log / "retired.jsonl").write_bytes(value + b'\n{"z":' + value + b"}\n")


def plant_as_snapshot(log: Path, value: bytes) -> None:
    """All snapshots, of a log that has lost its first segment."""
    for number, segment in enumerate(segment_paths(log)):
        body = value if number % 2 else b"\x81" + _NAME + value
        segment.with_suffix(".snapshot").write_bytes(b"KVLEDGERSNAP" + struct.pack("<I", crc32c(body)) + body)
    segment_paths(log)[0].unlink()


IN_MSGPACK = (
    plant_in_header,
    plant_in_named_header,
    plant_as_frame,
    plant_as_field,
    plant_as_payload,
    plant_in_payload,
    plant_as_payload_from_elsewhere,
    plant_as_snapshot,
)
IN_JSON = (plant_as_end, plant_in_end, plant_as_retirement)
