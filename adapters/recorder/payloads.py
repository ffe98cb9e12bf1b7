"""The recorder's events; apart from the rest of the extension, so that its rules can read them."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from kvledger.adapters.recorder import said
from kvledger.lifecycle import Extension


class RecorderEvents(Extension):
    """What a recorder writes."""

    name = "recorder"
    events: ClassVar[dict[str, type[msgspec.Struct]]] = {
        "began": said.Began,
        "lookup_returned": said.LookupReturned,
        "end_returned": said.EndReturned,
        "returned": said.Returned,
        "worker_started": said.WorkerStarted,
        "called": said.Called,
        "reported": said.Reported,
        "workers_reported": said.WorkersReported,
        "vllm_heard": said.VLLMHeard,
        "sent": said.Sent,
        "transferred": said.Transferred,
        "transferred_for": said.TransferredFor,
        "transfers_ended": said.TransfersEnded,
        "transfers_awaited": said.TransfersAwaited,
        "undecoded": said.Undecoded,
    }


payload_of = RecorderEvents.payload_of
