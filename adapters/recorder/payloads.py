"""What an event of the recorder says, by its name; apart from the extension, so that its rules can read it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from kvledger.adapters.recorder import said
from kvledger.lifecycle import events as e

NAME = "recorder"
VERSION = 1
PAYLOADS: Mapping[str, type[msgspec.Struct]] = MappingProxyType(
    {
        "lookup_returned": said.LookupReturned,
        "end_returned": said.EndReturned,
        "returned": said.Returned,
        "workers_reported": said.WorkersReported,
        "vllm_heard": said.VLLMHeard,
        "sent": said.Sent,
        "transferred": said.Transferred,
        "transferred_for": said.TransferredFor,
        "undecoded": said.Undecoded,
    }
)


def payload_of(event: e.ExtensionEvent) -> msgspec.Struct | None:
    """None of an event of another extension, or that cannot be read."""
    kind = PAYLOADS.get(event.name)
    if event.extension != NAME or event.extension_version != VERSION or kind is None:
        return None
    try:
        return msgspec.msgpack.decode(event.payload, type=kind)
    except msgspec.MsgspecError:
        return None
